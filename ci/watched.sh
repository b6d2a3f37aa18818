#!/usr/bin/env bash
# The tests of the compiled modules on a build that is watched, by turn: bounds checks and C's asserts (`make debug-test`) after
# every other commit, the sanitizers (`make sanitize`, `make sanitize-threads`) after those between.  Together they would take
# a third of the time that continuous integration has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commits=$(git rev-list --count HEAD)
if [ $((commits % 2)) = 1 ]; then
    make debug-test PYTEST_ARGS="--color=no -q"
else
    code=0
    make sanitize PYTEST_ARGS="--color=no -q" || code=$?
    make sanitize-threads PYTEST_ARGS="--color=no -q" || code=$?
    exit "$code"
fi
