#!/usr/bin/env bash
# The whole test suite, slow tests included, by `make test`.  Keeps pytest's output in build/ci/tests.log, from which run.sh takes the counts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/ci
rm -f build/ci/tests.log
make test PYTEST_ARGS="--slow --color=no --durations=15 ${PYTEST_ARGS:-}" 2>&1 | tee build/ci/tests.log
