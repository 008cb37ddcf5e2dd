"""Tests of what runs the fork for real: proxies, server, bundle, bench, smoke."""

import os
import sys
from pathlib import Path

# Before vllm is imported, which some tests do.
os.environ.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
