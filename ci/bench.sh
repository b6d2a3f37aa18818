#!/usr/bin/env bash
# Every benchmark once, by asv's quick mode.  This shows that they run; the figures mean nothing.
#
# asv (0.6.6) leaves with a code other than 0 when a benchmark, its setup or its setup_cache raises, crashes or takes too
# long, when a module cannot be imported and when no benchmark is found.  It leaves with 0 when a track_ function returns
# None and when every setup of a benchmark raises NotImplementedError, although nothing was measured: the result lines show both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/ci
log=build/ci/bench.log
make bench 2>&1 | tee "$log"

if grep -E '^\[ *[0-9.]+%\] ··· .*( failed| n/a| skipped.*)$' "$log" >build/ci/bench.bad; then
    echo "These benchmarks measured nothing:"
    cat build/ci/bench.bad
    exit 1
fi
grep -qE 'Running [1-9][0-9]* total benchmarks' "$log" || { echo "asv did not say how many benchmarks it ran"; exit 1; }

# The peers once on small data, which shows that the harness works.
make bench-peers PEERS_ARGS="--quick"
