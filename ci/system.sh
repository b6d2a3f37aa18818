#!/usr/bin/env bash
# The system packages that continuous integration uses: all that needs root, before anything runs as a stranger.
#
# Debian's Python with its header files and venv (an unprivileged user cannot use one below /root), a RabbitMQ node, Chromium,
# Valgrind, the Python whose turn it is, and a Debian for arm64 with its cross compiler.  The last two stay in RMQSTORE_CACHE (default:
# /var/cache/rmqstore) for the next time.  Each part says so where it cannot be had, and fails when CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What a stranger's PATH finds; ci/stranger.sh uses the same.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if ! python3 -c 'import ensurepip, sysconfig, os; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "system.sh: python3 on $PATH lacks venv or its header files, and there is no apt-get here" >&2
        exit 1
    fi
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3 python3-dev python3-venv
fi
echo "system.sh: $(python3 --version) ($(command -v python3))"
bash ci/rabbitmq.sh
bash ci/browser.sh
bash ci/valgrind.sh
bash ci/pythons.sh --lend
bash ci/arm64.sh --lend
