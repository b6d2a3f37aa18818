#!/usr/bin/env bash
# What tests use that pip does not install: RocketMQ's artifacts, a RabbitMQ node, a browser; says what it found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "system:   $(uname -srm), $(getconf _NPROCESSORS_ONLN) processors"
echo "compiler: $(${CC:-cc} --version | head -n 1)"
bash ci/java.sh
bash ci/rabbitmq.sh
bash ci/browser.sh
