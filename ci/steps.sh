#!/usr/bin/env bash
# The steps of continuous integration: demo, tests, checks, fuzzing, simulated lives, a debug build or one that sanitizers
# watch, the other environments (a build without Linux's own, another Python, aarch64), instruction counts, benchmarks once.
#
# ci/run.sh starts this as a stranger.  After a failed demo or set-up nothing else runs; any other step that fails lets the
# following ones run, so that one run says everything that is wrong.  The last lines are the time of each step, pytest's closing
# lines, and "N passed, N failed" (errors count as failed).
#
# A run has 90 minutes, and the same machine takes 44 on one day and 75 on another without the simulated lives.  So what holds for
# every commit comes first, and what gives up time comes last: the environments whose turn it is not, then the simulated lives.
# SECONDS, where it is given, is what was used up before (bash counts on from it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

times=()
failed_steps=()

step() {
    local name=$1 begin=$SECONDS code=0
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    "$@" || code=$?
    times+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - begin)) "$([ "$code" = 0 ] && echo ok || echo "FAILED, code $code")")")
    echo "${times[-1]}"
    [ "$code" = 0 ] || failed_steps+=("$name")
    return "$code"
}

# The number in front of a word of pytest's closing lines, added up.  A word that no line has counts 0: where grep found nothing
# it once ended the script, and just when nothing had failed.
count() {
    local found sum=0
    while read -r found; do sum=$((sum + ${found%% *})); done < <(grep -oE "[0-9]+ $1" <<<"$closing")
    echo "$sum"
}

summary() {
    local name line failed=0
    closing=
    printf '\n=== steps\n'
    printf '%s\n' ${times[@]+"${times[@]}"}
    printf 'all          %4d s\n' "$SECONDS"
    for name in test test-rest; do
        line=$(grep -E '^=+ .* in [0-9.]+s.* =+$' "build/ci/$name.log" 2>/dev/null | tail -n 1 || true)
        if [ -n "$line" ]; then
            echo "$name: $line"
            closing+="$line"$'\n'
        else
            # Tests that never came to their end, or that pytest would not start, are no success.
            echo "make $name did not come to its end"
            [ ${#failed_steps[@]} -gt 0 ] || failed_steps+=("$name")
            failed=1
        fi
    done
    [ ${#failed_steps[@]} = 0 ] || echo "failed: ${failed_steps[*]}"
    failed=$((failed + $(count failed) + $(count 'errors?')))
    echo "$(count passed) passed, $failed failed"
}

rm -rf build/ci
step demo bash ci/demo.sh || { summary; exit 1; }
step setup bash ci/setup.sh || { summary; exit 1; }
step test bash ci/tests.sh test || true
step venv make venv || true
step test-rest bash ci/tests.sh test-rest || true
# Disks that are full or read-only, which only root may mount: root of a namespace of its own.
step outages env RMQSTORE_MOUNTS=required unshare --user --map-root-user --mount .venv/bin/python -m pytest -q --color=no \
    tests/store/test_faults.py tests/store/test_populating.py \
    -k "full_disk or read_only_file_system or end_the_process" || true
step checks bash ci/checks.sh || true
# The same seed every time: whether a change passes is not to hang on luck; `make fuzz` searches on.
step fuzz bash ci/fuzz.sh 4 -seed=1 || true
step watched bash ci/watched.sh || true
step instructions make instructions || true
step bench bash ci/bench.sh || true

environment() {
    case $1 in
        portable) step portable make test-portable PYTEST_ARGS="--color=no -q" ;;
        python) step python env PYTEST_ARGS="-q" bash ci/pythons.sh --turn ;;
        arm64) step arm64 env PYTEST_ARGS="-q" bash ci/arm64.sh --short ;;
    esac
}
# One of them has its turn after every commit; the others run too where less than 48 minutes are gone.
environments=(portable python arm64)
commits=$(git rev-list --count HEAD)
for later in 0 1 2; do
    name=${environments[$(((commits + later) % 3))]}
    if [ "$later" = 0 ] || [ "$SECONDS" -lt 2880 ]; then
        environment "$name" || true
    else
        times+=("$(printf '%-12s    - s  not run, as %d s are gone and it is not its turn' "$name" "$SECONDS")")
        echo "${times[-1]}"
    fi
done
# The same seeds every time, as many of them as the time allows, which is 21 minutes on most days: how many steps were done is
# printed, and decides nothing.
minutes=$(((4920 - SECONDS) / 60))
minutes=$((minutes > 21 ? 21 : minutes < 1 ? 1 : minutes))
step simulate make simulate SIMULATE_STEPS=1000000 SIMULATE_ARGS="--minutes $minutes" || true
summary
[ ${#failed_steps[@]} = 0 ]
