"""Drives a real server of the fork and checks what it decoded with."""
