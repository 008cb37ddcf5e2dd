#!/usr/bin/env bash
# Write the hash-locked requirement files from their .in files, with the uv that
# scripts/test.sh uses. Needs an applied tree.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
uv=${UV:-../../.test-env/uv/bin/uv}
mapfile -t links < <(./find-links.sh)
for name in uv cpu; do
    "$uv" pip compile -q --python-version 3.11 --generate-hashes \
        --no-emit-find-links --no-emit-index-url --no-header "${links[@]}" \
        -o "$name.txt" "$name.in"
done
