#!/usr/bin/env bash
# Creates .venv with everything that the other steps need and builds the core; says what it found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "system:   $(uname -srm), $(getconf _NPROCESSORS_ONLN) processors"
echo "compiler: $(${CC:-cc} --version | head -n 1)"
make venv
bash ci/java.sh
bash ci/rabbitmq.sh
bash ci/browser.sh
.venv/bin/python --version
.venv/bin/python -m pip list --format=freeze
