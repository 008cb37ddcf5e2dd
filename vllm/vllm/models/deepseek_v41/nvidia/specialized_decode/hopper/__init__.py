# SPDX-License-Identifier: Apache-2.0
"""Kernels for DeepSeek-V4.1 decode steps on Hopper; README.md tells what and how."""
