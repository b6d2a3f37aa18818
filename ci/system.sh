#!/usr/bin/env bash
# Install the system packages of continuous integration: everything that needs root.
#
# Debian's Python with its header files and venv (an unprivileged user cannot use one below /root), a RabbitMQ node, Chromium,
# and the interpreters of ci/pythons.sh, which stay in RMQSTORE_CACHE (default: /var/cache/rmqstore) for the next run. A part that
# cannot be installed says so, and fails if CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unavailable() { echo "system.sh: $1" >&2; exit 1; }
. ci/apt.sh

# The PATH of ci/clean.sh.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if ! python3 -c 'import ensurepip, sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    install python3 python3-dev python3-venv
fi
echo "system.sh: $(uname -srm), $(getconf _NPROCESSORS_ONLN) processors, $(python3 --version), $(${CC:-cc} --version | head -n 1)"
bash ci/rabbitmq.sh
bash ci/browser.sh
bash ci/pythons.sh --prepare 3.15
