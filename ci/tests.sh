#!/usr/bin/env bash
# Run `make test`, `make test-rest` or `make test-interop`: ci/tests.sh TARGET.
#
# Fails too if the tests hold more than 3 GB of temporary files at a time, or leave files behind after they passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit=3072
temporary=$(mktemp -d)
sizes=$(mktemp)
export TMPDIR=$temporary
# MB of everything that tests make: it is in this folder, or in memory under this name.
held() { { du -sm --total "$temporary" /dev/shm/rmqstore-* 2>/dev/null || true; } | tail -n 1 | cut -f 1; }
before=$(held)
while :; do held; sleep 1; done >"$sizes" &
sampler=$!
code=0
make "$1" PYTEST_ARGS="--color=no --durations=15 ${PYTEST_ARGS:-}" || code=$?
kill "$sampler"
peak=$(($(sort -n "$sizes" | tail -n 1) - before))
echo "tests.sh: at most $peak MB of temporary files at a time"
if [ "$code" = 0 ] && [ "$peak" -gt "$limit" ]; then
    echo "tests.sh: the limit is $limit MB"
    code=1
fi
# Empty folders and links, such as pytest's own, do not count.
left=$(find "$temporary" -type f | sed -n 1,20p)
if [ "$code" = 0 ] && [ -n "$left" ]; then
    printf 'tests.sh: all tests passed and left files behind:\n%s\n' "$left"
    code=1
fi
rm -rf "$temporary" "$sizes"
exit "$code"
