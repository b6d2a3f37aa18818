#!/usr/bin/env bash
# The whole of continuous integration: set-up, checks, tests, fuzzing, debug tests, instruction counts, benchmarks once, demo.
#
# Needs bash, make, git, a C compiler, Python >= 3.10 with venv, and a package index.  After a failed set-up nothing else
# runs; any other step that fails lets the following ones run, so that one run says everything that is wrong.  The last
# lines are the time of each step, pytest's closing line, and "N passed, N failed" (errors count as failed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

times=()
failed_steps=()

step() {
    local name=$1 begin=$SECONDS code=0
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@" || code=$?
    times+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - begin)) "$([ "$code" = 0 ] && echo ok || echo "FAILED, code $code")")")
    [ "$code" = 0 ] || failed_steps+=("$name")
    return "$code"
}

# The number in front of a word of pytest's closing line, or 0.
count() { grep -oE "[0-9]+ $1" <<<"$closing" | head -n 1 | grep -oE '[0-9]+' || echo 0; }

summary() {
    printf '\n=== steps\n'
    printf '%s\n' ${times[@]+"${times[@]}"}
    printf 'all          %4d s\n' "$SECONDS"
    closing=$(grep -E '^=+ .* in [0-9.]+s.* =+$' build/ci/tests.log 2>/dev/null | tail -n 1 || true)
    if [ -z "$closing" ]; then
        echo "the tests did not come to their end"
        [ ${#failed_steps[@]} -gt 0 ] || failed_steps+=(tests)
    fi
    [ ${#failed_steps[@]} = 0 ] || echo "failed: ${failed_steps[*]}"
    [ -z "$closing" ] || echo "$closing"
    local failed=$(($(count failed) + $(count 'errors?')))
    # Tests that never came to their end, or that pytest would not start, are no success.
    [ -n "$closing" ] || failed=1
    echo "$(count passed) passed, $failed failed"
}

rm -rf build/ci
step setup bash ci/setup.sh || { summary; exit 1; }
step checks bash ci/checks.sh || true
step tests bash ci/tests.sh || true
# The same seed every time: whether a change passes is not to hang on luck; `make fuzz` searches on.
step fuzz bash ci/fuzz.sh 20 -seed=1 || true
step debug-test make debug-test PYTEST_ARGS="--color=no -q" || true
step instructions make instructions || true
step bench bash ci/bench.sh || true
step demo make demo || true
summary
[ ${#failed_steps[@]} = 0 ]
