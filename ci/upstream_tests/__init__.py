"""Upstream's own tests on the pristine base and on the fork; see `__main__`."""
