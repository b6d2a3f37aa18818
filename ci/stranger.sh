#!/usr/bin/env bash
# Runs a command as it would run on a stranger's machine: bash ci/stranger.sh make test
#
# In a clean copy of what git knows of this folder (changes that are not committed included), with no variable but PATH, HOME,
# TMPDIR, CI, the ones that are given in front of the command (NAME=VALUE), and those that a package index needs; with an umask of
# 077, a home and a temporary folder that are empty and private; and as a user without rights, where root can make one.  So nothing
# is found that was installed or cached by hand, and nothing works only because of who runs it.  What the command leaves in
# build/ci comes back; all else goes, unless RMQSTORE_KEEP=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
[ $# -gt 0 ] || { echo "usage: ci/stranger.sh [NAME=VALUE ...] COMMAND [ARGUMENT ...]" >&2; exit 2; }

# Not below TMPDIR: that may be a folder which other users do not reach.
top=$(mktemp -d /var/tmp/rmqstore.XXXXXX)
user=
cleanup() {
    local code=$?
    trap - EXIT
    if [ -d "$top/checkout/build/ci" ]; then
        mkdir -p "$root/build/ci"
        cp -R "$top/checkout/build/ci/." "$root/build/ci/"
    fi
    if [ -n "$user" ]; then
        # A daemon of RabbitMQ's runtime or of a build tool may outlive the command; it is this user's, so it goes.
        pkill -KILL -u "$user" 2>/dev/null || true
        for _ in 1 2 3 4 5 6 7 8 9 10; do userdel "$user" 2>/dev/null && break; sleep 0.5; done
    fi
    if [ "${RMQSTORE_KEEP:-}" = 1 ]; then echo "stranger.sh: kept $top"; else rm -rf "$top"; fi
    exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

umask 077
mkdir "$top/home" "$top/tmp" "$top/checkout"
git clone --quiet --no-hardlinks . "$top/checkout"
# A clone of a clone has lost the branch's upstream and tags, which nothing here asks for; what is not committed comes on top.
git ls-files -z --deleted | (cd "$top/checkout" && xargs -0 -r rm -f --)
git diff --name-only -z HEAD --diff-filter=d | xargs -0 -r cp --parents -P -t "$top/checkout" --
git ls-files -z --others --exclude-standard | xargs -0 -r cp --parents -P -t "$top/checkout" --

kept=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "HOME=$top/home" "TMPDIR=$top/tmp")
while IFS= read -r name; do
    case "$name" in
        PIP_CACHE_DIR | PIP_TARGET | PIP_USER | PIP_PREFIX) ;;
        CI | JAVA_HOME | PIP_* | SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | CURL_CA_BUNDLE | NODE_EXTRA_CA_CERTS) kept+=("$name=${!name}") ;;
        http_proxy | https_proxy | no_proxy | HTTP_PROXY | HTTPS_PROXY | NO_PROXY | MAVEN_ARGS | npm_config_registry) kept+=("$name=${!name}") ;;
    esac
done < <(compgen -e)

run=()
if [ "$(id -u)" = 0 ] && command -v useradd >/dev/null && command -v runuser >/dev/null; then
    user=rmqstore-$$
    useradd --system --user-group --home-dir "$top/home" --no-create-home --shell /bin/bash "$user"
    chmod 711 "$top"
    chown -R "$user:" "$top/home" "$top/tmp" "$top/checkout"
    run=(runuser -u "$user" --)
elif [ "$(id -u)" = 0 ]; then
    echo "stranger.sh: there is no useradd or runuser here; the command runs as root" >&2
    [ "${CI:-}" != true ] || exit 1
fi
cd "$top/checkout"
echo "stranger.sh: as ${user:-$(id -un)} in $PWD"
code=0
"${run[@]}" env -i "${kept[@]}" "$@" </dev/null || code=$?
left=$(find "$top/tmp" -mindepth 1 -maxdepth 1 2>/dev/null | head -20)
[ -z "$left" ] || printf 'stranger.sh: left in the temporary folder: %s\n' "$left"
exit "$code"
