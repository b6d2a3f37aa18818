#!/usr/bin/env bash
# The whole test suite by `make test`; of the long soaks (`make soak`) it runs the short versions.  Keeps pytest's output in build/ci/tests.log, from which run.sh takes the counts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/ci
rm -f build/ci/tests.log
make test PYTEST_ARGS="--color=no --durations=15 ${PYTEST_ARGS:-}" 2>&1 | tee build/ci/tests.log
