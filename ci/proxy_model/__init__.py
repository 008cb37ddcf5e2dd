"""Configurations that stand for DeepSeek-V4.1-Flash on one GPU, without weights."""
