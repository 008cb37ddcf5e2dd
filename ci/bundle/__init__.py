"""Packs the fork for a GPU machine that has no network."""
