#!/usr/bin/env bash
# `make test` or `make test-rest`: ci/tests.sh test|test-rest.  Keeps pytest's output in build/ci/NAME.log, from which steps.sh
# takes the counts.
#
# Tests share a disk with whoever runs them: at no moment may they hold more than 3 GB in temporary files, in memory or on the
# disk, and when all passed nothing is left; what is left is listed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1
limit=3072
mkdir -p build/ci
log=build/ci/$name.log
: >"$log"
# Everything that tests make lies in this folder, or in memory under this name.
temporary=$(mktemp -d)
export TMPDIR=$temporary
held() { { du -sm --total "$temporary" /dev/shm/rmqstore-* 2>/dev/null || true; } | tail -n 1 | cut -f 1; }
before=$(held)

make "$name" PYTEST_ARGS="--color=no --durations=15 ${PYTEST_ARGS:-}" >>"$log" 2>&1 &
tests=$!
tail -n +1 -f --pid="$tests" "$log" &
peak=0
while kill -0 "$tests" 2>/dev/null; do
    now=$(held)
    [ "${now:-0}" -le "$peak" ] || peak=$now
    sleep 1
done
code=0
wait "$tests" || code=$?
wait || true
echo "tests.sh: at most $((peak - before)) MB of temporary files at a moment"
if [ "$code" = 0 ] && [ $((peak - before)) -gt "$limit" ]; then
    echo "tests.sh: that is more than $limit MB"
    code=1
fi
# Empty folders and links, such as pytest's own, are nothing.
left=$(find "$temporary" -type f | sed -n 1,20p)
if [ -n "$left" ]; then
    printf 'tests.sh: %s MB are left, such as:\n%s\n' "$(du -sm "$temporary" | cut -f 1)" "$left"
    if [ "$code" = 0 ]; then
        echo "tests.sh: all passed, and nothing is to be left"
        code=1
    fi
fi
rm -rf "$temporary"
exit "$code"
