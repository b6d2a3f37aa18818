#!/usr/bin/env bash
# `make demo` first, where nothing is installed yet: it must bring little with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# MB of the environment and the builds after it; what the whole of `dev` needs is six times that.
limit=300
make demo
size=$(du -sm .venv build | awk '{ sum += $1 } END { print sum }')
echo "demo.sh: $size MB in .venv and build"
[ "$size" -le "$limit" ] || { echo "demo.sh: the demo needs at most $limit MB"; exit 1; }
if .venv/bin/python -c 'import pytest' 2>/dev/null; then
    echo "demo.sh: the demo installed pytest, which it does not use"
    exit 1
fi
