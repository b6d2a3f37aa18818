#!/usr/bin/env bash
# The steps of continuous integration. Each is a command that a developer can run alone; none is left out, whatever the time.
#
# A failed demo or set-up ends the run. After any other failure the next step runs, so that one run reports all failures.
# The last lines are the end of each failed step's output, the time of each step, and "N passed, N failed" over pytest's
# closing lines (a step that fails without a failed test counts as one). ci/run.sh starts this on a clean copy of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

times=() failed=()

step() {
    local name=$1 begin=$SECONDS result=ok
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@" 2>&1 | tee "build/ci/$name.log" || { result=FAILED; failed+=("$name"); }
    times+=("$(printf '%-9s %5d s  %s' "$name" $((SECONDS - begin)) "$result")")
    echo "${times[-1]}"
}

# Print the sum of the numbers before a word (passed, failed, error) in pytest's closing lines.
count() {
    local sum=0 found
    while read -r found _; do sum=$((sum + found)); done \
        < <({ grep -hE '^=* ?[0-9]+ .* in [0-9.]+s' build/ci/*.log || true; } | { grep -oE "[0-9]+ $1" || true; })
    echo "$sum"
}

finish() {
    local name bad
    for name in "${failed[@]}"; do
        printf '\n=== %s failed; its last lines:\n' "$name"
        tail -n 40 "build/ci/$name.log"
    done
    printf '\n=== steps\n'
    printf '%s\n' "${times[@]}"
    printf 'all       %5d s\n' "$SECONDS"
    bad=$(($(count failed) + $(count error)))
    [ "$bad" -ge "${#failed[@]}" ] || bad=${#failed[@]}
    echo "$(count passed) passed, $bad failed"
    exit $((bad > 0))
}

# First, where nothing is installed yet: the demo must bring little with it (the whole of `dev` is six times that).
demo() {
    local size
    make demo || return 1
    size=$(du -cm -s .venv build | tail -n 1 | cut -f 1)
    echo "steps.sh: $size MB in .venv and build"
    [ "$size" -le 300 ] || { echo "steps.sh: the demo needs at most 300 MB"; return 1; }
    ! .venv/bin/python -c 'import pytest' 2>/dev/null || { echo "steps.sh: the demo installed pytest"; return 1; }
}

rm -rf build/ci
mkdir -p build/ci
step demo demo
step setup bash ci/java.sh
[ ${#failed[@]} = 0 ] || finish
step test make test PYTEST_ARGS="--color=no --durations=15"
step rest make test-rest PYTEST_ARGS="--color=no --durations=15"
step interop make test-interop PYTEST_ARGS="--color=no --durations=15"
step outages make test-outages PYTEST_ARGS="--color=no"
step checks bash ci/checks.sh
step sanitize make sanitize PYTEST_ARGS="--color=no -q"
step newest bash ci/pythons.sh 3.15
# The same seeds every time: whether a change passes must not depend on luck. The nightly workflow tries new ones.
step fuzz bash ci/fuzz.sh 1 -seed=1
step simulate make simulate SIMULATE_STEPS=8000
finish
