"""Packs the fork as a wheel: the release's, with our files in their places."""
