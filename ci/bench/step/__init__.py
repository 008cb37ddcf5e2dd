"""``scripts/bench.sh step``: decode steps of whole engines, and the parts of a step.

``__main__`` starts an engine process for each path (``engine``), which times steps,
then profiles a few. ``ranges`` names what a kernel was launched for, ``trace`` reads
the profile by those names, ``reads`` says what each part has to read, ``record``
keeps what came out, and ``plot`` draws it.
"""
