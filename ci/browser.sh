#!/usr/bin/env bash
# A real browser for the tests of the web console: the Chromium that is there, or Debian's package.
#
# Does nothing when one is there.  Playwright drives it over its own protocol; Playwright's browsers are not fetched.  RMQSTORE_CHROMIUM
# names one elsewhere.  Where none can be installed this says so and ends well (the tests in a browser are skipped; those of the
# console without one are not), except when CI is true, where the browser must not be missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

give_up() {
    if [ "${CI:-}" = "true" ]; then
        echo "browser.sh: $1 (required when CI=true)" >&2
        exit 1
    fi
    echo "browser.sh: $1; the tests of the console in a browser will be skipped" >&2
    exit 0
}

find_browser() {
    local name
    for name in ${RMQSTORE_CHROMIUM:-chromium chromium-browser google-chrome}; do
        if command -v "$name"; then return 0; fi
    done
    return 1
}

if ! find_browser >/dev/null; then
    [ -z "${RMQSTORE_CHROMIUM:-}" ] || give_up "RMQSTORE_CHROMIUM names $RMQSTORE_CHROMIUM, which is not there"
    command -v apt-get >/dev/null || give_up "there is no apt-get here to install chromium with"
    as_root=()
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || give_up "chromium is missing and cannot be installed without root"
        as_root=(sudo -n)
    fi
    apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o DPkg::Lock::Timeout=120 "$@"; }
    # On Ubuntu the package of this name is a wrapper around snap, which a container cannot run.
    candidate() { apt-cache policy chromium 2>/dev/null | sed -n 's/^ *Candidate: *//p'; }
    case "$(candidate)" in
        "" | "(none)") apt update -qq || give_up "apt-get update failed" ;;
    esac
    case "$(candidate)" in
        "" | "(none)") give_up "the system has no package chromium" ;;
        *snap*) give_up "the system's package chromium is only a wrapper around snap" ;;
    esac
    echo "browser.sh: installing chromium $(candidate)"
    # A font with Latin, Greek and Cyrillic; without any font Chromium draws boxes, and axe judges boxes.
    packages=(chromium fonts-dejavu-core)
    # An index of packages that is older than the mirror names files that are gone: then it is fetched once.
    apt install -y -qq --no-install-recommends "${packages[@]}" >/dev/null \
        || { apt update -qq && apt install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; } \
        || give_up "apt-get could not install chromium"
fi

browser=$(find_browser) || give_up "the package chromium has no program chromium"
# Debian's wrapper complains of a comparison on machines with much memory; the answer is on stdout.
version=$("$browser" --version 2>/dev/null) || give_up "$browser does not start"
echo "browser.sh: $version ($browser)"
