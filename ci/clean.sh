#!/usr/bin/env bash
# Run a command as on a clean machine: bash ci/clean.sh [NAME=VALUE ...] make test
#
# The command runs on a clean copy of the files that git knows (uncommitted changes included), with only PATH, HOME, TMPDIR, CI, the
# given variables, and those that a package index needs; with umask 077 and an empty, private home and temporary folder; and as an
# unprivileged user, where root can make one. It finds nothing that was installed or cached by hand. build/ci is copied back;
# everything else is deleted, unless RMQSTORE_KEEP=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
[ $# -gt 0 ] || { echo "usage: ci/clean.sh [NAME=VALUE ...] COMMAND [ARGUMENT ...]" >&2; exit 2; }

# Not below TMPDIR, which other users may not reach.
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
        # RabbitMQ's daemon or a build tool's may outlive the command.
        pkill -KILL -u "$user" 2>/dev/null || true
        for _ in 1 2 3 4 5 6 7 8 9 10; do userdel "$user" 2>/dev/null && break; sleep 0.5; done
    fi
    if [ "${RMQSTORE_KEEP:-}" = 1 ]; then echo "clean.sh: kept $top"; else rm -rf "$top"; fi
    exit "$code"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

umask 077
mkdir "$top/home" "$top/tmp" "$top/checkout"
git clone --quiet --no-hardlinks . "$top/checkout"
# Uncommitted changes come on top of the clone.
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
    echo "clean.sh: there is no useradd or runuser here; the command runs as root" >&2
    [ "${CI:-}" != true ] || exit 1
fi
cd "$top/checkout"
echo "clean.sh: as ${user:-$(id -un)} in $PWD"
code=0
"${run[@]}" env -i "${kept[@]}" "$@" </dev/null || code=$?
left=$(find "$top/tmp" -mindepth 1 -maxdepth 1 2>/dev/null | head -20)
[ -z "$left" ] || printf 'clean.sh: left in the temporary folder: %s\n' "$left"
exit "$code"
