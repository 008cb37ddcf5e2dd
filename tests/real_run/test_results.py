"""ci/results/summary.sh: what is kept of the log of a GPU run."""

import subprocess
from pathlib import Path

SUMMARY = Path(__file__).resolve().parents[2] / "ci" / "results" / "summary.sh"
LOG = """\
collected 3 items

tests/gpu/test_engine.py (MainProcess pid=7) INFO 11-30 00:16:44 \
[stack_identity.py:65] vLLM 9.9.0 with stack abc.def, version 9.9.0+ours.1
(MainProcess pid=7) INFO 11-30 00:16:45 [core.py:139] Initializing an engine
(MainProcess pid=7) INFO 11-30 00:17:30 [a_state.py:187] DeepSeek-V4.1 decode: of 7
.(MainProcess pid=7) INFO 11-30 00:18:12 [a_state.py:398] decode metadata: in_graph=66
..decode metadata: in_graph=67
steps compared: 460
>       assert False
E       assert False
tests/gpu/test_engine.py:7: AssertionError
ERROR    vllm.dump_input:dump_input.py:72 Dumping
FAILED tests/gpu/test_engine.py::test_steps - assert False
===== 1 failed, 2 passed in 95.43s (0:01:35) =====
"""
KEPT = """\
collected 3 items
vLLM 9.9.0 with stack abc.def, version 9.9.0+ours.1
DeepSeek-V4.1 decode: of 7
decode metadata: in_graph=66
decode metadata: in_graph=67
steps compared: 460
E       assert False
FAILED tests/gpu/test_engine.py::test_steps - assert False
===== 1 failed, 2 passed in 95.43s (0:01:35) =====
"""


def test_what_claims_rest_on_is_kept(tmp_path):
    (tmp_path / "a log").write_text(LOG)
    done = subprocess.run([SUMMARY, tmp_path / "a log"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, KEPT)


def test_without_a_log_it_says_how_to_use_it():
    done = subprocess.run([SUMMARY], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ci/results/summary.sh LOG\n")
