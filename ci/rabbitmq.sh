#!/usr/bin/env bash
# A real RabbitMQ node for the interoperability tests: the server that is installed, or Debian's package rabbitmq-server.
#
# Nothing is left running: while apt installs it, policy-rc.d forbids that services start, and what was there before comes back.
# If it cannot be installed, this says so and succeeds (the tests are skipped), except when CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unavailable() { skip_tests "rabbitmq.sh: $1"; }
. ci/apt.sh

server=/usr/lib/rabbitmq/bin/rabbitmq-server
# The version that the tests were written with: v1 indexes, one deliver after each publish.
wanted=3.10

if [ ! -x "$server" ]; then
    needs_root "installing rabbitmq-server"
    found="$(candidate rabbitmq-server)"
    [ -n "$found" ] || { apt update >&2 || true; found="$(candidate rabbitmq-server)"; }
    case "${found#*:}" in
        "") unavailable "the system has no package rabbitmq-server" ;;
        "$wanted".*) ;;
        *) unavailable "the system's rabbitmq-server is $found, not $wanted.x" ;;
    esac
    echo "rabbitmq.sh: installing rabbitmq-server $found"
    policy=/usr/sbin/policy-rc.d
    restore() {
        if [ -e "$policy.rmqstore" ]; then
            "${as_root[@]}" mv -f "$policy.rmqstore" "$policy"
        else
            "${as_root[@]}" rm -f "$policy"
        fi
    }
    [ ! -e "$policy" ] || "${as_root[@]}" mv -f "$policy" "$policy.rmqstore"
    trap restore EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
    install rabbitmq-server
fi

[ -x "$server" ] || unavailable "the package rabbitmq-server has no $server"
# The name of the directory has the version; asking the server would start one.
version="$(basename "$(ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-* 2>/dev/null | sort -V | tail -n 1)")"
version="${version#rabbitmq_server-}"
case "$version" in
    "$wanted".*) echo "rabbitmq.sh: RabbitMQ $version" ;;
    *) unavailable "RabbitMQ ${version:-of unknown version} is installed, not $wanted.x" ;;
esac
