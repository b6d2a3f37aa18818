#!/usr/bin/env bash
# A small Debian in a folder, for interpreters that this machine does not have; and programs run in it.
#
#     ci/debian.sh make SUITE PACKAGE...     makes it where it is missing; prints its folder
#     ci/debian.sh run FOLDER COMMAND...     runs a command in it, in the working directory of the caller
#
# The packages are unpacked and not configured: what their scripts would have made and the tests need is made here.  `make` puts the
# folder below RMQSTORE_CACHE (default: /var/cache/rmqstore), and rebuilds it when other packages are asked for.  `run` shows the
# command the Debian's programs, this checkout, TMPDIR, /tmp, /dev and /proc, by mounts that end with it.
#
# `make` needs root, or sudo that asks nothing, and apt, unless the folder exists; it installs mmdebstrap where that is missing.
# `run` needs only the right to make a user namespace; called by root, or with such a sudo, the command runs as the user who owns
# the checkout.  Exits with 3 where this is not possible.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

unavailable() {
    echo "debian.sh: $1" >&2
    exit 3
}

. "$checkout/ci/apt.sh"

make_debian() {
    local suite=$1 folder part wanted
    shift
    folder="${RMQSTORE_CACHE:-/var/cache/rmqstore}/debian-$suite"
    part="$folder.part"
    # How it is made belongs to what is asked for.
    wanted="$* $(declare -f make_debian | sha256sum)"
    if [ "$(cat "$folder/packages-asked-for" 2>/dev/null)" != "$wanted" ]; then
        needs_root "fetching Debian $suite into $folder"
        # Another user may run commands there.
        umask 022
        command -v mmdebstrap >/dev/null || install mmdebstrap
        echo "debian.sh: fetching Debian $suite into $folder" >&2
        "${as_root[@]}" mkdir -p "$(dirname "$folder")"
        "${as_root[@]}" rm -rf "$part" "$folder"
        # The signatures are checked, the date until which a release counts is not: a mirror that is behind will do.
        "${as_root[@]}" mmdebstrap --quiet --mode=root --variant=extract \
            --aptopt='Acquire::Check-Valid-Until "false"' --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
            --include="base-files base-passwd bash coreutils dash findutils grep libc-bin sed $*" \
            "$suite" "$part" ${RMQSTORE_DEBIAN_MIRROR:+"$RMQSTORE_DEBIAN_MIRROR"} >&2 \
            || unavailable "mmdebstrap could not make Debian $suite"
        # The files that configuring base-passwd, gcc and libc-bin would make, and the python3 that is asked for.
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

# The part of `run` that is root of its own mount namespace, where nothing stays mounted: a root folder in memory, with the folders of
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
