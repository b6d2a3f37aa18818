# Install Debian packages as root, or by sudo without a password. Source this file; the caller defines `unavailable`, which exits.

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(false)
    ! sudo -n true 2>/dev/null || as_root=(sudo -n)
fi
needs_root() { [ "${as_root[*]}" != false ] || unavailable "$1 needs root, or sudo that asks no password"; }

apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -qq -o DPkg::Lock::Timeout=300 "$@"; }

# Print the version of package $1 that apt would install, if it has one.
candidate() {
    local found
    found=$(apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: *//p')
    [ "$found" = "(none)" ] || echo "$found"
}

# An old index names files that the mirror no longer has: fetch it once then.
install() {
    needs_root "installing $*"
    command -v apt-get >/dev/null || unavailable "there is no apt-get here to install $* with"
    apt install -y --no-install-recommends "$@" >&2 || { apt update >&2 && apt install -y --no-install-recommends "$@" >&2; } \
        || unavailable "apt-get could not install $*"
}

# Report that a tool for tests of the real systems is not available; fail if CI is true.
skip_tests() {
    if [ "${CI:-}" = true ]; then
        echo "$1 (required when CI=true)" >&2
        exit 1
    fi
    echo "$1; its tests will be skipped" >&2
    exit 0
}
