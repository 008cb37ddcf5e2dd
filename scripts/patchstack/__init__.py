"""The fork as a patch stack on a pinned upstream release.

`base` pins the release, `own` lists the files we wrote, `patches` is the format
of our edits to upstream's files, and `stack` is the three read together.
`fetch`, `archive` and `source` bring the release; `history` keeps base and
patches as commits; `tree` owns what lies in `vllm/`.  The commands (`apply`,
`refresh`, `status`, `doctor`) are thin.  Standard library and git only.
"""
