#!/usr/bin/env bash
# The steps of continuous integration: demo, tests, checks, fuzzing, simulated lives, a debug build or one that sanitizers
# watch, the other environments (a build without Linux's own, another Python, aarch64), instruction counts, benchmarks once.
#
# ci/run.sh starts this as a stranger.  After a failed demo or set-up nothing else runs; any other step that fails lets the
# following ones run, so that one run says everything that is wrong.  The last lines are what the failed steps said last, the time
# of each step, pytest's closing lines, and "N passed, N failed" (errors count as failed).
#
# A run has 90 minutes, and what takes 44 on one day, without the simulated lives, takes twice that on another.  So what holds for
# every commit comes first; what comes after is begun only while there is time for it (`in_time`), and the simulated lives take
# what is left.  The run says what it did not do.
# SECONDS, where it is given, is what was used up before (bash counts on from it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

times=()
failed_steps=()

step() {
    local name=$1 begin=$SECONDS code=0
    shift
    printf '\n=== %s: %s\n' "$name" "$*"
    mkdir -p build/ci
    # Into a file as well: where the step fails, its last lines are said once more at the end.
    "$@" 2>&1 | tee "build/ci/$name.out" || code=$?
    times+=("$(printf '%-12s %4d s  %s' "$name" $((SECONDS - begin)) "$([ "$code" = 0 ] && echo ok || echo "FAILED, code $code")")")
    echo "${times[-1]}"
    [ "$code" = 0 ] || failed_steps+=("$name")
    return "$code"
}

# A step that is not begun where so many seconds are gone.
in_time() {
    local limit=$1
    shift
    if [ "$SECONDS" -lt "$limit" ]; then
        step "$@" || true
    else
        times+=("$(printf '%-12s    - s  not run, as %d s are gone' "$1" "$SECONDS")")
        echo "${times[-1]}"
    fi
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
    # Who reads a long run reads its end: the reason stands there.
    for name in ${failed_steps[@]+"${failed_steps[@]}"}; do
        printf '\n=== %s failed; its last lines:\n' "$name"
        tail -n 40 "build/ci/$name.out"
    done
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
in_time 3900 watched bash ci/watched.sh
in_time 4200 instructions make instructions
in_time 4300 bench bash ci/bench.sh
environment() {
    case $1 in
        portable) in_time "$2" portable make test-portable PYTEST_ARGS="--color=no -q" ;;
        python) in_time "$2" python env PYTEST_ARGS="-q" bash ci/pythons.sh --turn ;;
        arm64) in_time "$2" arm64 env PYTEST_ARGS="-q" bash ci/arm64.sh --short ;;
    esac
}
# One of them has its turn after every commit.
environments=(portable python arm64)
commits=$(git rev-list --count HEAD)
environment "${environments[$((commits % 3))]}" 4000
environment "${environments[$(((commits + 1) % 3))]}" 2880
environment "${environments[$(((commits + 2) % 3))]}" 2880
# The same seeds every time, as many of them as the time allows, which is 21 minutes on most days: how many steps were done is
# printed, and decides nothing.
minutes=$(((4920 - SECONDS) / 60))
minutes=$((minutes > 21 ? 21 : minutes < 1 ? 1 : minutes))
step simulate make simulate SIMULATE_STEPS=1000000 SIMULATE_ARGS="--minutes $minutes" || true
summary
[ ${#failed_steps[@]} = 0 ]
