"""Measures what the fork is for, beside the code it replaces, in one run."""
