#!/usr/bin/env bash
# The compiled modules on builds that are watched, by turn: after every other commit their tests with bounds checks and C's
# asserts (`make debug-test`), and the fuzzer under AddressSanitizer; after those between their tests under the sanitizers
# (`make sanitize`, `make sanitize-threads`).  Together they would take a third of the time that continuous integration has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

commits=$(git rev-list --count HEAD)
code=0
if [ $((commits % 2)) = 1 ]; then
    make debug-test PYTEST_ARGS="--color=no -q" || code=$?
    # The same seed every time, as in the step of the plain fuzzer (ci/steps.sh).
    SANITIZE=address bash ci/fuzz.sh 3 -seed=1 || code=$?
else
    make sanitize PYTEST_ARGS="--color=no -q" || code=$?
    make sanitize-threads PYTEST_ARGS="--color=no -q" || code=$?
fi
exit "$code"
