# SPDX-License-Identifier: Apache-2.0
"""Device metadata: the attention metadata of decode steps without host work."""
