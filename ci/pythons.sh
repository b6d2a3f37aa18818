#!/usr/bin/env bash
# Run the suite on other versions of Python, each in its own environment, without Java, a RabbitMQ node and a browser.
#
#     ci/pythons.sh [VERSION...]            with the newest libraries (default: all of VERSIONS)
#     ci/pythons.sh --lowest VERSION        with the lowest versions that pyproject.toml allows; then Spark's tests too
#     ci/pythons.sh 3.14t                   a free-threaded interpreter (also 3.13t): FREE_THREADED_TESTS, with the libraries that have
#                                           wheels
#     ci/pythons.sh --prepare VERSION...    as root: make interpreters available to an unprivileged user who runs this later
#
# An interpreter is pythonX.Y on the PATH, a prepared one, or pyenv's; 3.14 and 3.15 come from Debian (ci/debian.sh) where none of
# these has them. A free-threaded one is compiled from Debian's source. Prepared interpreters are in RMQSTORE_CACHE (default:
# /var/cache/rmqstore). A missing interpreter is reported, and fails if CI is true, unless it is free-threaded. The tests run on a
# copy of the files that git knows, in build/pythons/VERSION, with its own build.
# JOBS is the number of processes (default: all processors); PYTEST_ARGS are more arguments for pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Those of pyproject.toml except 3.11, which runs everything else.
VERSIONS=(3.10 3.12 3.13 3.14 3.15)
FREE_THREADED_TESTS=(tests/core tests/consumequeue tests/store/test_{answers,columns,concurrency,free_threads,key_source,lifetime,put,reading,scan_threads,table,twelve_threads}.py)
SELECTION="not slow and not long and not java and not rabbitmq and not spark and not browser"
# Enough to show that a version of Spark works.
SPARK_TESTS=(tests/spark/test_read.py tests/spark/test_stream.py)
root="$PWD"
base="$root/build/pythons"
cache="${RMQSTORE_CACHE:-/var/cache/rmqstore}"

# Fail unless program $1 is Python $2 with all that an environment and a build need. It has to be run: pyenv's shims have such names.
is_python() {
    [ "$("$1" -c 'import ensurepip, os, sys, sysconfig, venv; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")
print("%d.%d" % sys.version_info[:2] + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' 2>/dev/null)" = "$2" ]
}

# Set `python`, the interpreter $1, and `at_home`, the words that run a command in its Debian; or return 1.
find_python() {
    local folder debian=(python3.1{4,5}{,-venv,-dev})
    at_home=()
    for python in "python$1" "$cache/python-$1/bin/python" "$cache/python-$1/bin/python$1" \
        "$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")/versions/$1".*/bin/python; do
        if is_python "$python" "$1"; then return 0; fi
    done
    case " ${debian[*]} " in *" python$1 "*) ;; *) return 1 ;; esac
    folder=$(bash ci/debian.sh make forky "${debian[@]}" gcc libc6-dev git) || return 1
    python=/usr/bin/python$1
    at_home=(bash "$root/ci/debian.sh" run "$folder")
}

# Compile Debian's source of Python $1 (as in 3.14t) without the GIL. No distribution's package has such an interpreter.
compile_free_threaded() {
    local suite=forky work apt
    [ "$1" != 3.13t ] || suite=trixie
    suite="${RMQSTORE_DEBIAN_SUITE:-$suite}"
    work=$(mktemp -d)
    apt=(timeout 900 apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State=$work"
        -o "Dir::Cache=$work" -o APT::Sandbox::User=root)
    echo "deb-src [check-valid-until=no] ${RMQSTORE_DEBIAN_MIRROR:-http://deb.debian.org/debian} $suite main" >"$work/sources.list"
    mkdir -p "$work/lists/partial" "$work/archives/partial"
    if ! (cd "$work" && "${apt[@]}" update && "${apt[@]}" source --download-only "python${1%t}") >&2; then
        echo "pythons.sh: Debian $suite has no source of Python ${1%t} here; there is no Python $1" >&2
        rm -rf "$work"
        return 1
    fi
    # Not a signature of it.
    tar --extract --directory="$work" --file="$(echo "$work"/python*.orig.tar.[gx]z)"
    (
        cd "$work"/Python-*
        umask 022
        # A home of its own, which nothing else is installed into; its own tests are half of it.
        ./configure -q --disable-gil --disable-test-modules --without-static-libpython --prefix="$cache/python-$1"
        make -s -j"${JOBS:-$(getconf _NPROCESSORS_ONLN)}"
        make -s altinstall
    ) >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log" >&2; return 1; }
    rm -rf "$work"
}

# Copy pyenv's newest Python $1 to where every user can run it, compile it, or fetch the Debian that has it.
prepare() {
    local copy="$cache/python-$1" as_root=() of_pyenv=("${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*)
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    if is_python "${of_pyenv[-1]}/bin/python" "$1"; then
        umask 022
        "${as_root[@]}" rm -rf "$copy"
        "${as_root[@]}" mkdir -p "$copy"
        # Python's own tests are a third of it.
        tar --create --file=- --directory="${of_pyenv[-1]}" --exclude="./lib/python$1/test" . \
            | "${as_root[@]}" tar --extract --no-same-owner --file=- --directory="$copy"
        # The program names a shared libpython by its path in the home.
        if readelf --dynamic "$copy/bin/python$1" | grep -qF "[${of_pyenv[-1]}/lib]"; then
            command -v patchelf >/dev/null || "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 \
                apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends patchelf >/dev/null
            "${as_root[@]}" patchelf --set-rpath '$ORIGIN/../lib' "$copy/bin/python$1"
        fi
        "${as_root[@]}" chmod -R a+rX "$copy"
        is_python "$copy/bin/python" "$1"
    elif [[ $1 == *t ]] && ! find_python "$1"; then
        compile_free_threaded "$1"
        find_python "$1"
    else
        find_python "$1"
    fi
    echo "pythons.sh: Python $1 is ready in $cache"
}

# Copy what git knows into `tree`, as a repository for the tests that ask git, with the C that Cython has generated.
copy_tree() {
    mkdir -p "$tree"
    find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
    git ls-files -z --cached --others --exclude-standard --deduplicate | while IFS= read -r -d '' name; do
        [ ! -e "$name" ] || printf '%s\0' "$name"
    done | tar --null --files-from=- --create --file=- | tar --extract --directory="$tree" --file=-
    if [ "$lowest" = no ] && [ ! -d "$tree/build/cython" ] && [ -d build/cython ]; then
        mkdir -p "$tree/build"
        cp -a build/cython "$tree/build/cython"
    fi
    git -C "$tree" init --quiet
    git -C "$tree" add --all
    git -C "$tree" -c user.name=suite -c user.email=suite@localhost commit --quiet --message "The files under test"
}

inside() { (cd "$tree" && "${at_home[@]}" "$@"); }
pip() { inside "$environment/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

build_suite() {
    local requirements wanted=(--editable . --group test)
    # pip takes the newest versions that have wheels for it; the other libraries have none.
    [[ $version != *t ]] || wanted=(--editable '.[arrow,cli]')
    inside "$environment/bin/python" -c '' 2>/dev/null || { rm -rf "$environment"; inside "$python" -m venv "$environment"; }
    read -r -a requirements < <(sed -n 's/^BUILD_REQUIREMENTS := //p' Makefile | tr -d '"')
    pip install 'pip>=25.1' # the first with --group
    if [ "$lowest" = yes ]; then
        wanted+=(--group spark)
        pip install uv
        # Extras that groups name are those of this tree, and given once more: uv takes the lowest of what is asked for directly.
        echo "rmqstore @ file://$tree" | inside "$environment/bin/uv" pip compile --quiet --resolution lowest-direct \
            --extra all --extra rocksdb --extra sql --extra spark --group test --no-emit-package rmqstore \
            --python-version "$version" --output-file "$base/lowest.txt" pyproject.toml -
        requirements=("${requirements[@]/>=/==}")
        pip install --requirement "$base/lowest.txt" "${requirements[@]/%/.*}"
    else
        pip install "${requirements[@]}"
        [[ $version != *t ]] || pip install --only-binary :all: numpy pyarrow hypothesis pytest pytest-timeout pytest-xdist
        # They have no wheels for 3.15, and the source distribution of lz4 does not find its own version.
        [ "$version" != 3.15 ] || SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LZ4=4.4.5 pip install lz4==4.4.5 zstandard
    fi
    pip install --no-build-isolation --no-compile "${wanted[@]}"
    inside "$environment/bin/python" -c 'import sys, rmqstore._core as core; print(sys.version, core.__file__, sep="\n")'
}

run_pytest() {
    local arguments
    read -r -a arguments <<<"${PYTEST_ARGS:-}"
    inside env CI="${CI:-}" "$environment/bin/python" -m pytest -n "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --dist loadscope \
        --color=no -q "$@" "${arguments[@]}"
}

run_version() {
    local name=$1
    [ "$lowest" = no ] || name=lowest-$1
    local tree="$base/$name/tree" environment="$base/$name/environment"
    copy_tree
    TIMEFORMAT="pythons.sh: $name: built in %R s, processors busy %U + %S s"
    time build_suite
    TIMEFORMAT="pythons.sh: $name: tested in %R s, processors busy %U + %S s"
    if [[ $version == *t ]]; then
        # The GIL stays off only while every module that is imported can do without it.
        inside env PYTHONWARNINGS=error::RuntimeWarning "$environment/bin/python" -c \
            'import sys, rmqstore, rmqstore.store.columns; sys.exit("the GIL is on" if sys._is_gil_enabled() else 0)'
        time run_pytest -m "$SELECTION" "${FREE_THREADED_TESTS[@]}"
        return
    fi
    time run_pytest -m "$SELECTION"
    [ "$lowest" = no ] || time run_pytest "${SPARK_TESTS[@]}"
}

action=run_version lowest=no
case "${1:-}" in
    --prepare) action=prepare; shift ;;
    --lowest) lowest=yes; shift ;;
esac
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=("${VERSIONS[@]}")
mkdir -p "$base"
code=0
for version in "${versions[@]}"; do
    echo "--- Python $version"
    if [ "$action" = run_version ] && ! find_python "$version"; then
        echo "pythons.sh: there is no Python $version here; bash ci/pythons.sh --prepare $version as root may install it" >&2
        [ "${CI:-}" != true ] || [[ $version == *t ]] || code=1
        continue
    fi
    # One version's failure does not stop the others; a tested command would ignore `set -e` inside.
    set +e
    (set -e; "$action" "$version")
    status=$?
    set -e
    if [ "$status" != 0 ]; then
        echo "pythons.sh: $action failed for Python $version" >&2
        [ "$action" = prepare ] && [ "${CI:-}" != true ] || code=1
    fi
done
exit "$code"
