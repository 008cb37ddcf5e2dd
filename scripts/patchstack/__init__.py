"""The fork as a patch stack on a pinned upstream release.

`base` pins the release, `own` lists the files we wrote, `patches` is the format
of our edits to upstream's files, and `stack` is the three read together.
`fetch`, `archive` and `source` bring the release; `history` keeps base and
patches as commits; `tree` owns what lies in `vllm/`.

For another release, `releases` records it, `carry` brings the patches over,
`symbols`, `uses` and `drift` compare what our code takes from upstream, `trial`
is the verdict, `report` its words, `accept` makes it the stack, `needs` its
requirements ours.  `undo` takes back what `accept` or `refresh` could not finish.

The commands (`apply`, `refresh`, `rebase`, `export`, `status`, `doctor`) are thin.
Standard library and git only.
"""
