"""Upstream's releases: found, fetched and unpacked."""
