#!/usr/bin/env bash
# The site of these sources, and beside it those of the last three tags, each built by the .ci/run of its own commit. In an
# environment with torch:
#
#     .ci/site.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"; git worktree prune' EXIT

build() { # the sources in $1, into $2, which links to the others: name=place ...
    (cd "$1" && python -m pip install -q -e ".[test]" && SEQ1F1B_VERSIONS="${*:3}" SEQ1F1B_SITE=$2 .ci/run docs)
}

mapfile -t tags < <(git tag --list 'v*' --sort=-creatordate | head -n 3)
for tag in "${tags[@]}"; do
    others=(main=../)
    for other in "${tags[@]}"; do [ "$other" = "$tag" ] || others+=("$other=../$other/"); done
    git worktree add -q --detach "$work/$tag" "$tag"
    build "$work/$tag" "$work/sites/$tag" "${others[@]}"
done
own=()
for tag in "${tags[@]}"; do own+=("$tag=$tag/"); done
build "$PWD" "$site" "${own[@]}"
for tag in "${tags[@]}"; do cp -r "$work/sites/$tag" "$site/$tag"; done
