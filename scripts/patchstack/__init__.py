"""The fork as a patch stack on a pinned upstream release.

`stack` is what the repository states: the release (`base`), the whole files we wrote
(`own`), our edits of upstream's (`patch`). `release` brings upstream's archives.
`tree` makes `vllm/` of the two and keeps its history. `drift` compares what our code
takes from upstream, `rebase` carries the patches to another release, `refresh` turns
edits into patches and orders them, `check` says what is wrong. `commands` parse the
command line, call one of these and print.

Dependencies go one way, in that order. Standard library and git only.
"""
