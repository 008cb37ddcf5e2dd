"""Tests of what runs the fork for real: proxies, server, bundle, bench, smoke."""

import os

# Before vllm is imported, which some tests do.
os.environ.update(VLLM_TARGET_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
