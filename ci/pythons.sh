#!/usr/bin/env bash
# The suite on other versions of Python, each in an environment of its own, without Spark, Java, a RabbitMQ node and a browser.
#
#     ci/pythons.sh [VERSION...]    these (default: all in VERSIONS below)
#     ci/pythons.sh --turn          one, by the number of commits: each has its turn, and a commit always the same
#     ci/pythons.sh --lend [VERSION...]
#                                   for a user without rights, later: makes ready what only root can (default: for --turn)
#
# An interpreter is pythonX.Y on the PATH, one that was lent, or of pyenv.  Where none of them has 3.14 it comes from Debian
# (ci/debian.sh), which needs root; then the suite runs as the user who owns the checkout.  A pyenv in somebody's home is closed to
# others: --lend copies the version into RMQSTORE_CACHE (default: /var/cache/rmqstore), or fetches the Debian there.
# A version that cannot be had is passed over, and said so; when CI is true that fails, unless RMQSTORE_MAY_SKIP is set.  The tests
# run on a copy of the files that git knows, under build/pythons/VERSION, with a build of its own.
# JOBS are the processes side by side (default: all processors); PYTEST_ARGS are more arguments of pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Those of pyproject.toml but 3.11, on which everything else runs.
VERSIONS=(3.10 3.12 3.13 3.14)
SELECTION="not slow and not long and not java and not rabbitmq and not spark and not browser"
root="$PWD"
base="$root/build/pythons"
cache="${RMQSTORE_CACHE:-/var/cache/rmqstore}"

lent=no
if [ "${1:-}" = --lend ]; then
    lent=yes
    shift
    [ $# -gt 0 ] || set -- --turn
fi
versions=("$@")
if [ "${1:-}" = --turn ]; then
    versions=("${VERSIONS[$(($(git rev-list --count HEAD) % ${#VERSIONS[@]}))]}")
fi
[ ${#versions[@]} -gt 0 ] || versions=("${VERSIONS[@]}")

# Whether program $1 is Python $2, with what an environment and a build need.  By running it: pyenv puts a program of that name on
# the PATH that may only say that it is not there.
is_python() {
    [ "$("$1" -c 'import ensurepip, os, sys, sysconfig, venv; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")
print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]
}

# Sets `python`, the interpreter $1, and `at_home`, the words that run a command where it is at home; or returns 1.
find_python() {
    local candidate folder
    at_home=()
    for candidate in "python$1" "$cache/python-$1/bin/python" \
        "$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")/versions/$1".*/bin/python; do
        python=$candidate
        if is_python "$python" "$1"; then return 0; fi
    done
    [ "$1" = 3.14 ] || return 1
    folder=$(bash ci/debian.sh make forky amd64 python3.14 python3.14-venv python3.14-dev gcc libc6-dev git) || return 1
    python=/usr/bin/python3.14
    at_home=(bash "$root/ci/debian.sh" run "$folder")
}

# A copy of pyenv's newest Python $1 that every user can read and start; the Debian of one that pyenv has not.
lend() {
    local prefix lent="$cache/python-$1" as_root=()
    local of_pyenv=("${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*)
    prefix="${of_pyenv[-1]}"
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if is_python "$prefix/bin/python" "$1"; then
        umask 022
        "${as_root[@]}" rm -rf "$lent"
        "${as_root[@]}" mkdir -p "$lent"
        # Python's own tests are a third of it.
        tar --create --file=- --directory="$prefix" --exclude="./lib/python$1/test" . \
            | "${as_root[@]}" tar --extract --no-same-owner --file=- --directory="$lent"
        # A shared libpython is named by its place in the home.
        if readelf --dynamic "$lent/bin/python$1" | grep -qF "[$prefix/lib]"; then
            command -v patchelf >/dev/null || "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 \
                apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends patchelf >/dev/null
            "${as_root[@]}" patchelf --set-rpath '$ORIGIN/../lib' "$lent/bin/python$1"
        fi
        "${as_root[@]}" chmod -R a+rX "$lent"
        is_python "$lent/bin/python" "$1"
    else
        find_python "$1"
    fi
    echo "pythons.sh: Python $1 for a user without rights is in $cache"
}

if [ "$lent" = yes ]; then
    for version in "${versions[@]}"; do
        # Where bash looks at a status it does not stop at a failure inside.
        set +e
        (set -e; lend "$version")
        status=$?
        set -e
        if [ "$status" != 0 ]; then
            echo "pythons.sh: Python $version cannot be lent" >&2
            [ "${CI:-}" != true ] || [ -n "${RMQSTORE_MAY_SKIP:-}" ] || exit 1
        fi
    done
    exit 0
fi

# What git knows, as it is now, and a repository of its own, for the tests that ask git.  Every version takes the same C.
copy_tree() {
    tree="$base/$1/tree"
    mkdir -p "$tree"
    find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
    git ls-files -z --cached --others --exclude-standard --deduplicate | while IFS= read -r -d '' name; do
        [ ! -e "$name" ] || printf '%s\0' "$name"
    done | tar --null --files-from=- --create --file=- | tar --extract --directory="$tree" --file=-
    if [ ! -d "$tree/build/cython" ] && [ -d build/cython ]; then
        mkdir -p "$tree/build"
        cp -a build/cython "$tree/build/cython"
    fi
    git -C "$tree" init --quiet
    git -C "$tree" add --all
    git -C "$tree" -c user.name=suite -c user.email=suite@localhost commit --quiet --message "The files under test"
}

# A command in the copy.
inside() { (cd "$tree" && "${at_home[@]}" "$@"); }

build_suite() {
    local requirements
    # One that was made for another interpreter does not start; it is made again.
    if ! inside "$environment/bin/python" -c '' 2>/dev/null; then
        rm -rf "$environment"
        inside "$python" -m venv "$environment"
    fi
    # One list for the Makefile and this.
    read -r -a requirements < <(sed -n 's/^BUILD_REQUIREMENTS := //p' Makefile | tr -d '"')
    inside "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
    inside "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-compile \
        --editable '.[test]'
    inside "$environment/bin/python" -c 'import sys, rmqstore._core as core; print(sys.version, core.__file__, sep="\n")'
}

test_suite() {
    local arguments
    read -r -a arguments <<<"${PYTEST_ARGS:-}"
    inside env CI="${CI:-}" "$environment/bin/python" -m pytest -n "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --dist loadscope \
        --color=no -m "$SELECTION" "${arguments[@]}"
}

run_version() {
    local tree environment="$base/$1/environment"
    copy_tree "$1"
    TIMEFORMAT="pythons.sh: Python $1: built in %R s, processors busy %U + %S s"
    time build_suite
    TIMEFORMAT="pythons.sh: Python $1: tested in %R s, processors busy %U + %S s"
    time test_suite
}

mkdir -p "$base"
failed=()
table=()
for version in "${versions[@]}"; do
    echo "--- Python $version"
    if ! find_python "$version"; then
        table+=("$version: there is no such interpreter here")
        [ "${CI:-}" != true ] || [ -n "${RMQSTORE_MAY_SKIP:-}" ] || failed+=("$version")
        continue
    fi
    log="$base/$version.log"
    # A failure ends this version and not the others; where bash looks at a status it does not stop at a failure inside.
    set +e
    (set -e; run_version "$version") 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    set -e
    [ "$status" = 0 ] || failed+=("$version")
    table+=("$version: $(grep -E '(passed|failed|errors?).* in [0-9.]+s' "$log" | tail -1 | tr -d '=' | sed 's/^ *//; s/ *$//')")
done
echo "--- by version"
printf 'Python %s\n' "${table[@]}"
if [ ${#failed[@]} -gt 0 ]; then
    echo "pythons.sh: failed: ${failed[*]}" >&2
    exit 1
fi
