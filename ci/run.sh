#!/usr/bin/env bash
# Run continuous integration: system packages first, then every step (ci/steps.sh) on a clean copy of the checkout (ci/clean.sh).
#
# Needs bash, make, git, a C compiler, Java 17, Maven, Python >= 3.10 with venv, and a package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

rm -rf build/ci
begin=$SECONDS
bash ci/system.sh || { echo "0 passed, 1 failed"; exit 1; }
echo "system.sh took $((SECONDS - begin)) s"
exec bash ci/clean.sh "SECONDS=$SECONDS" bash ci/steps.sh
