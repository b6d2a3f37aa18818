#!/usr/bin/env bash
# A real browser for the tests of the web console: the Chromium that is installed, or Debian's package.
#
# Playwright drives it over its own protocol and fetches no browser. RMQSTORE_CHROMIUM names one elsewhere. Without one, this
# says so and succeeds (tests in a browser are skipped), except when CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unavailable() { skip_tests "browser.sh: $1"; }
. ci/apt.sh

find_browser() {
    local name
    for name in ${RMQSTORE_CHROMIUM:-chromium chromium-browser google-chrome}; do
        if command -v "$name"; then return 0; fi
    done
    return 1
}

if ! find_browser >/dev/null; then
    [ -z "${RMQSTORE_CHROMIUM:-}" ] || unavailable "RMQSTORE_CHROMIUM names $RMQSTORE_CHROMIUM, which does not exist"
    # On Ubuntu the package of this name is a wrapper around snap, which a container cannot run.
    case "$(candidate chromium)" in *snap*) unavailable "the system's package chromium is only a wrapper around snap" ;; esac
    # A font with Latin, Greek and Cyrillic; without any font Chromium draws boxes, and axe judges boxes.
    install chromium fonts-dejavu-core
fi
browser=$(find_browser) || unavailable "the package chromium has no program chromium"
# Debian's wrapper complains of a comparison on machines with much memory; the answer is on stdout.
version=$("$browser" --version 2>/dev/null) || unavailable "$browser does not start"
echo "browser.sh: $version ($browser)"
