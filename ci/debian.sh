#!/usr/bin/env bash
# A small Debian in a folder, for interpreters and processors that this machine does not have; and programs run in it.
#
#     ci/debian.sh make SUITE ARCHITECTURE PACKAGE...    makes it where it is not there yet; prints its folder
#     ci/debian.sh run FOLDER COMMAND...                 runs a command in it, in the working directory of the caller
#
# The packages are unpacked and not configured: none of their scripts runs, so a foreign architecture takes as long as this
# machine's own.  What the scripts would have made and the tests need is made here.  `make` takes the folder below
# RMQSTORE_CACHE (default: /var/cache/rmqstore), where it is found again as long as the packages that are asked for are the same.
# `run` shows the command the Debian's programs, this checkout, TMPDIR, /tmp, /dev and /proc, by mounts that go with it.
#
# `make` needs root, or sudo that asks nothing, and apt, unless the folder is there; it installs mmdebstrap, and qemu-user-static for
# a foreign architecture, where they are missing.  `run` needs no more than the right to make a user namespace, and is then who
# calls it; where it is called by root, or with such a sudo, it is the user who owns the checkout.  Leaves with 3 where it cannot be
# had here.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

unavailable() {
    echo "debian.sh: $1" >&2
    exit 3
}

# Nobody, where this user cannot be root.
as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(false)
    ! sudo -n true 2>/dev/null || as_root=(sudo -n)
fi
needs_root() { [ "${as_root[*]}" != false ] || unavailable "$1 needs root, or sudo that asks no password"; }

apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o DPkg::Lock::Timeout=300 "$@"; }

# An index of packages that is older than the mirror names files that are gone: then it is fetched once.
install() {
    needs_root "installing $*"
    command -v apt-get >/dev/null || unavailable "there is no apt-get here to install $* with"
    apt install -y -qq --no-install-recommends "$@" >&2 \
        || { apt update -qq >&2 && apt install -y -qq --no-install-recommends "$@" >&2; } \
        || unavailable "apt-get could not install $*"
}

# The kernel starts programs of another processor by qemu, which it has opened before (flag F): the folder needs nothing of it.
foreign_programs() {
    local entry="/proc/sys/fs/binfmt_misc/qemu-$1"
    [ -e "/usr/bin/qemu-$1-static" ] && [ -e /usr/sbin/update-binfmts ] || install qemu-user-static binfmt-support
    if [ ! -e /proc/sys/fs/binfmt_misc/register ]; then
        needs_root "starting programs of $1 by qemu"
        "${as_root[@]}" mount -t binfmt_misc none /proc/sys/fs/binfmt_misc || unavailable "this kernel has no binfmt_misc"
    fi
    [ -e "$entry" ] || "${as_root[@]}" /usr/sbin/update-binfmts --enable "qemu-$1" || true
    grep -qs '^flags:.*F' "$entry" || unavailable "binfmt_misc does not start programs of $1 by qemu"
}

make_debian() {
    local suite=$1 architecture=$2 folder part wanted
    shift 2
    folder="${RMQSTORE_CACHE:-/var/cache/rmqstore}/debian-$suite-$architecture"
    part="$folder.part"
    # How it is made belongs to what is asked for.
    wanted="$* $(declare -f make_debian | sha256sum)"
    if [ "$(dpkg --print-architecture 2>/dev/null)" != "$architecture" ]; then
        case "$architecture" in
            arm64) foreign_programs aarch64 ;;
            *) unavailable "nothing is known of $architecture here" ;;
        esac
    fi
    if [ "$(cat "$folder/packages-asked-for" 2>/dev/null)" != "$wanted" ]; then
        needs_root "fetching Debian $suite for $architecture into $folder"
        # Whoever runs something there may be another user than the one who made it.
        umask 022
        command -v mmdebstrap >/dev/null || install mmdebstrap
        echo "debian.sh: fetching Debian $suite for $architecture into $folder" >&2
        "${as_root[@]}" mkdir -p "$(dirname "$folder")"
        "${as_root[@]}" rm -rf "$part" "$folder"
        # The signatures are checked, the date until which a release counts is not: a mirror that is behind will do.
        # bookworm's base-files lack the links from /bin to /usr/bin, which a hook of mmdebstrap makes.
        "${as_root[@]}" mmdebstrap --quiet --mode=root --variant=extract --architectures="$architecture" \
            --aptopt='Acquire::Check-Valid-Until "false"' --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
            --include="base-files base-passwd bash coreutils dash findutils grep libc-bin sed $*" \
            "$suite" "$part" ${RMQSTORE_DEBIAN_MIRROR:+"$RMQSTORE_DEBIAN_MIRROR"} >&2 \
            || unavailable "mmdebstrap could not make Debian $suite for $architecture"
        # What base-passwd, gcc and libc-bin would have made when they were configured, and a python3 that is the one asked for.
        "${as_root[@]}" cp "$part/usr/share/base-passwd/passwd.master" "$part/etc/passwd"
        "${as_root[@]}" cp "$part/usr/share/base-passwd/group.master" "$part/etc/group"
        # What `run` shows this machine's files in place of.
        "${as_root[@]}" mkdir -p "$part/etc/ssl/certs"
        "${as_root[@]}" touch "$part/etc/hosts" "$part/etc/pip.conf" "$part/etc/resolv.conf"
        [ ! -e "$part/usr/bin/gcc" ] || "${as_root[@]}" ln -sf gcc "$part/usr/bin/cc"
        [ -e "$part/usr/bin/python3" ] || "${as_root[@]}" ln -s "$(cd "$part/usr/bin" && ls python3.?? | tail -n 1)" "$part/usr/bin/python3"
        "${as_root[@]}" chroot "$part" /sbin/ldconfig
        echo "$wanted" | "${as_root[@]}" tee "$part/packages-asked-for" >/dev/null
        "${as_root[@]}" mv "$part" "$folder"
    fi
    echo "$folder"
}

# What `run` does as root of a mount namespace of its own, where nothing stays mounted: a root folder in memory, with the folders of
# the Debian that programs need, and this machine's names of hosts, certificates and package index.  Folders with wheels that
# only this machine has are not there.
show_and_run='
    folder=$1 checkout=$2 here=$3 user=$4 group=$5
    shift 5
    root=$folder/tmp
    mount -t tmpfs -o mode=755 none "$root"
    mkdir -p "$root/run" "$root/suite" "$root/var/tmp"
    chmod 1777 "$root/var/tmp"
    cp -P "$folder"/bin "$folder"/lib* "$folder"/sbin "$root"
    show() {
        [ -e "$root$2" ] || mkdir -p "$root$2"
        mount --rbind "$1" "$root$2"
    }
    show "$folder/usr" /usr
    show "$folder/etc" /etc
    { cat "$folder/etc/passwd"; echo "suite:x:$user:$group::/suite:/bin/bash"; } >"$root/run/passwd"
    show "$root/run/passwd" /etc/passwd
    for each in /dev /proc /tmp "${TMPDIR:-/tmp}" "$checkout" /etc/ssl/certs /etc/hosts /etc/pip.conf /etc/resolv.conf; do
        [ ! -e "$each" ] || show "$each" "$each"
    done
    if [ "$as_mapped" = yes ]; then
        leave=(unshare --user --map-user="$user" --map-group="$group" --root="$root")
    else
        chown "$user:$group" "$root/suite"
        leave=(chroot --userspec="$user:$group" "$root")
    fi
    exec "${leave[@]}" /usr/bin/env -u PIP_FIND_LINKS -u as_mapped HOME=/suite \
        PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin bash -euc "cd \"\$0\"; exec \"\$@\"" "$here" "$@"
'

run_in() {
    local folder=$1 user group enter
    shift
    user=$(stat -c %u "$checkout") group=$(stat -c %g "$checkout")
    if [ "${as_root[*]}" != false ]; then
        enter=("${as_root[@]}" env ${TMPDIR:+"TMPDIR=$TMPDIR"} as_mapped=no unshare --mount --propagation private)
    else
        # Root of this namespace alone; the command is this user again.
        user=$(id -u) group=$(id -g)
        enter=(env as_mapped=yes unshare --user --map-root-user --mount --propagation private)
        "${enter[@]}" true || unavailable "the system lets this user make no user namespace, nor be root by sudo"
    fi
    "${enter[@]}" bash -euc "$show_and_run" debian.sh "$folder" "$checkout" "$PWD" "$user" "$group" "$@"
}

case "${1:-}" in
    make) make_debian "${@:2}" ;;
    run) run_in "${@:2}" ;;
    *) sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed '$d' >&2; exit 2 ;;
esac
