"""Upstream's real code on a CPU."""

import os

# Before vllm is imported.
os.environ.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
