#!/usr/bin/env bash
# A real RabbitMQ node for the interoperability tests: the server that is there, or Debian's package rabbitmq-server.
#
# Does nothing when a server is there.  Nothing is left running: while apt installs it, policy-rc.d forbids that services start,
# and what was there before comes back.  Where it cannot be installed this says so and ends well (the tests are skipped),
# except when CI is true, where the node must not be missing.
set -euo pipefail

server=/usr/lib/rabbitmq/bin/rabbitmq-server
# The version that the tests were written with: v1 indexes, one deliver after each publish.
wanted=3.10

give_up() {
    if [ "${CI:-}" = "true" ]; then
        echo "rabbitmq.sh: $1 (required when CI=true)" >&2
        exit 1
    fi
    echo "rabbitmq.sh: $1; the tests against a real RabbitMQ node will be skipped" >&2
    exit 0
}

if [ ! -x "$server" ]; then
    command -v apt-get >/dev/null || give_up "there is no apt-get here to install rabbitmq-server with"
    as_root=()
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || give_up "rabbitmq-server is missing and cannot be installed without root"
        as_root=(sudo -n)
    fi
    apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o DPkg::Lock::Timeout=120 "$@"; }
    candidate() { apt-cache policy rabbitmq-server 2>/dev/null | sed -n 's/^ *Candidate: *//p'; }
    case "$(candidate)" in
        "" | "(none)") apt update -qq || give_up "apt-get update failed" ;;
    esac
    found="$(candidate)"
    case "${found#*:}" in
        "" | "(none)") give_up "the system has no package rabbitmq-server" ;;
        "$wanted".*) ;;
        *) give_up "the system's rabbitmq-server is $found, not $wanted.x" ;;
    esac
    echo "rabbitmq.sh: installing rabbitmq-server $found"
    policy=/usr/sbin/policy-rc.d
    kept=
    restore() {
        if [ -n "$kept" ]; then
            "${as_root[@]}" mv -f "$kept" "$policy"
        else
            "${as_root[@]}" rm -f "$policy"
        fi
    }
    if [ -e "$policy" ] || [ -L "$policy" ]; then
        kept="$policy.rmqstore"
        "${as_root[@]}" mv -f "$policy" "$kept"
    fi
    trap restore EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
    # An index of packages that is older than the mirror names files that are gone: then it is fetched once.
    apt install -y -qq --no-install-recommends rabbitmq-server >/dev/null \
        || { apt update -qq && apt install -y -qq --no-install-recommends rabbitmq-server >/dev/null; } \
        || give_up "apt-get could not install rabbitmq-server"
fi

[ -x "$server" ] || give_up "the package rabbitmq-server has no $server"
# The name of the directory says the version; asking the server would start one.
version="$(basename "$(ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-* 2>/dev/null | sort -V | tail -n 1)")"
version="${version#rabbitmq_server-}"
case "$version" in
    "$wanted".*) echo "rabbitmq.sh: RabbitMQ $version" ;;
    *) give_up "RabbitMQ ${version:-of unknown version} is installed, not $wanted.x" ;;
esac
