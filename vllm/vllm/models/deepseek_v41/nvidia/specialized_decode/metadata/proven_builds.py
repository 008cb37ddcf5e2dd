# SPDX-License-Identifier: Apache-2.0
"""The fused builds of a deployment, each held to upstream's builders before use."""

import torch
from vllm.logger import init_logger

from .fused_build import FusedBuild, UpstreamBuild
from .key import GraphKey
from .proof import difference_from_upstream

logger = init_logger(__name__)


class ProvenBuilds:
    """The fused builds that were held to upstream's, by the key of their graph."""

    def __init__(self) -> None:
        self._proven: dict[GraphKey, FusedBuild] = {}
        self._refused: dict[GraphKey, FusedBuild] = {}
        # Whether DeepGEMM was found to schedule otherwise than the launch does.
        self._deepgemm_schedules = False

    def known(self, build: FusedBuild) -> FusedBuild | None:
        """A proven build that writes what ``build`` does, or None. Does no work on
        the device.
        """
        return _alike(self._proven, build)

    def prove(
        self, build: FusedBuild, build_upstream: UpstreamBuild, max_len: int
    ) -> FusedBuild | None:
        """``known``, after comparing ``build`` to ``build_upstream`` if need be, on
        sequences of up to ``max_len`` tokens.

        Where its schedules of DeepGEMM's are all that differs, DeepGEMM goes on to
        make them. Whatever else goes wrong means that the fused build is not used.
        """
        known = self.known(build)
        if known is not None or _alike(self._refused, build) is not None:
            return known
        why = None
        try:
            build, path = self._compared(build, build_upstream, max_len)
            if path is not None:
                why = f"differs from upstream's in {path}: please report this"
        except torch.OutOfMemoryError:
            why = (
                "could not be compared with upstream's, as the GPU's memory is full: "
                "lower gpu_memory_utilization"
            )
        except Exception as error:
            logger.exception("Comparing the fused attention metadata failed.")
            why = (
                f"could not be compared with upstream's ({in_brief(error)}): please "
                "report this"
            )
        finally:
            # Upstream takes what the capture of the graphs leaves allocated off the
            # KV cache.
            torch.cuda.empty_cache()
        if why is not None:
            logger.error(
                "DeepSeek-V4.1 decode: the fused metadata build of %d requests of %d "
                "tokens is not used. It %s.",
                build.key.num_reqs,
                build.key.num_tokens,
                why,
            )
            self._refused[build.key] = build
            return None
        self._proven[build.key] = build
        return build

    def _compared(
        self, build: FusedBuild, build_upstream: UpstreamBuild, max_len: int
    ) -> tuple[FusedBuild, str | None]:
        """``build``, or itself with DeepGEMM's own schedules where it takes that to
        be equal, and the path where it is not.
        """
        if self._deepgemm_schedules:
            build = build.with_deepgemm_schedules()
        path = difference_from_upstream(build, build_upstream, max_len)
        if path is None or not build.knows_schedules:
            return build, path
        rest = build.with_deepgemm_schedules()
        still = difference_from_upstream(rest, build_upstream, max_len)
        if still is None:
            self._deepgemm_schedules = True
            logger.warning(
                "DeepSeek-V4.1 decode: DeepGEMM makes the schedule of the indexer's "
                "logits in launches of its own, as it comes out other than expected "
                "in %s. Please report this.",
                path,
            )
        return rest, still

    def release(self) -> None:
        """Forget the builds, with the buffers they keep alive."""
        self._proven.clear()
        self._refused.clear()


def in_brief(error: Exception) -> str:
    """Its type and first line: CUDA's errors go on for lines about debugging."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _alike(builds: dict[GraphKey, FusedBuild], build: FusedBuild) -> FusedBuild | None:
    known = builds.get(build.key)
    return known if known is not None and known.writes_for(build) else None
