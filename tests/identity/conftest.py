"""Upstream's real code on a CPU."""

import os
import sys
from pathlib import Path

# Before vllm is imported.
os.environ.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
