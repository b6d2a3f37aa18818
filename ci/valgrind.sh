#!/usr/bin/env bash
# Valgrind for the instruction counts: the one that is there, or the system's package.  Says what to do where neither works.
set -euo pipefail

if ! command -v valgrind >/dev/null; then
    echo "valgrind is missing; installing it"
    if ! command -v apt-get >/dev/null; then
        echo "There is no apt-get here: install valgrind (with its header files) by hand, then run this again." >&2
        exit 1
    fi
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    # One that needs no answers and no network that is not there: a failure is a failure of this step.
    if ! { "${as_root[@]}" apt-get update -qq && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq valgrind; }; then
        echo "valgrind could not be installed; without it the instruction counts cannot be compared." >&2
        exit 1
    fi
fi
valgrind --version
if ! printf '#include <valgrind/callgrind.h>\n' | ${CC:-cc} -E -x c - >/dev/null; then
    echo "valgrind/callgrind.h is missing: install the header files of valgrind (packages valgrind, valgrind-dev or valgrind-devel)." >&2
    exit 1
fi
