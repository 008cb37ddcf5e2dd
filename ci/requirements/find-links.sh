#!/usr/bin/env bash
# The folders of local wheels that pip is set to, as options of uv, one a line: uv
# does not read pip's settings.
set -euo pipefail
python3 -m pip config list |
    sed -n "s/^[^=]*find-links='\(.*\)'$/\1/p" | tr ' ' '\n' |
    sort -u | sed '/^$/d; s/^/--find-links=/'
