"""The stack on another release: the trial, its report, and taking it there."""
