#!/usr/bin/env bash
# Fuzzes the readers of RabbitMQ's terms, and those of what a 5.x broker keeps beside its plain files, with atheris for so many
# seconds each (default 20); more arguments are libFuzzer's.  libFuzzer sees the compiled modules too: it takes a build of its own
# in build/fuzz (ci/fuzz/coverage.c).  Where atheris has no wheel it says so and ends well, except when CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-20}
python=${PYTHON:-$PWD/.venv/bin/python}
if ! "$python" -c 'import atheris' 2>/dev/null; then
    # No extra of the package: there are no wheels but for Linux on x86-64.
    "$python" -m pip install --quiet --only-binary :all: 'atheris>=2.3' || true
fi
if ! "$python" -c 'import atheris' 2>/dev/null; then
    echo "fuzz.sh: atheris is not to be had for this Python and machine; hypothesis makes the hostile bytes in the tests" >&2
    [ "${CI:-}" != "true" ] || exit 1
    exit 0
fi
root=$PWD
lib=$root/build/fuzz/lib
export RMQSTORE_SANITIZE=fuzzer
# Compiles only what changed.  The Python modules are copied anew, so that none that is gone is left.
"$python" setup.py --quiet build_ext --build-lib "$lib" --build-temp build/fuzz/temp
find "$lib" -name '*.py' -delete
"$python" setup.py --quiet build_py --build-lib "$lib"
# The compiled modules ask for libFuzzer when they are loaded, so it comes before the interpreter.
preload=$("$python" -c 'import atheris; print(atheris.path())')/ubsan_with_fuzzer.so
cd "$(mktemp -d)"
for target in rabbitmq/fuzz_terms fuzz_broker_files; do
    env LD_PRELOAD="$preload" PYTHONPATH="$lib" "$python" "$root/tests/$target.py" "-max_total_time=$seconds" "${@:2}"
done
