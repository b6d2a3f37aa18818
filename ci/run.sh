#!/usr/bin/env bash
# The whole of continuous integration: system packages as whoever runs this, then everything else as a stranger (ci/stranger.sh).
#
# Needs bash, make, git, a C compiler, Python >= 3.10 with venv, and a package index.  The last lines are the time of each step,
# pytest's closing lines, and "N passed, N failed" (ci/steps.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

rm -rf build/ci
begin=$SECONDS
bash ci/system.sh || { echo "0 passed, 1 failed"; exit 1; }
echo "system.sh took $((SECONDS - begin)) s"
exec bash ci/stranger.sh "SECONDS=$SECONDS" bash ci/steps.sh
