#!/usr/bin/env bash
# Fuzz the readers of files with atheris, SECONDS for each target (default 20); more arguments are libFuzzer's.
#
#     ci/fuzz.sh [SECONDS [LIBFUZZER_ARGUMENT...]]   once over all targets
#     ci/fuzz.sh long [SECONDS]                      again and again until stopped; what was learned stays in build/fuzz/corpus
#
# TARGET is a part of the names of targets, the others are left out; PART=2/4 takes every fourth of the rest, from the
# second on.  MINUTES ends a long run at the first target after that time.  One that finds something does not stop the
# others; the exit code is 1 then.  SANITIZE=address has AddressSanitizer watch as well, in a
# build of its own in build/fuzz-address, at some third of the speed.
# libFuzzer sees the compiled modules too: it takes a build of its own in build/fuzz (ci/fuzz/coverage.c).  Bytes that a target
# refuses are in build/fuzz/found.  Without a wheel of atheris this says so and succeeds, except when CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

long=
if [ "${1:-}" = long ]; then
    long=1
    shift
    set -- "${1:-600}" "${@:2}"
fi
seconds=${1:-20}
python=${PYTHON:-$PWD/.venv/bin/python}
if ! "$python" -c 'import atheris' 2>/dev/null; then
    # No extra of the package: there are no wheels but for Linux on x86-64.
    "$python" -m pip install --quiet --only-binary :all: 'atheris>=2.3' || true
fi
if ! "$python" -c 'import atheris' 2>/dev/null; then
    echo "fuzz.sh: there is no atheris for this Python and machine; hypothesis makes the hostile bytes in the tests" >&2
    [ "${CI:-}" != "true" ] || exit 1
    exit 0
fi
root=$PWD
folder=$root/build/fuzz${SANITIZE:+-$SANITIZE}
lib=$folder/lib
export RMQSTORE_SANITIZE=fuzzer${SANITIZE:+,$SANITIZE}
# Compiles only what changed.  The Python modules are copied again, so that no deleted one is left.
"$python" setup.py --quiet build_ext --build-lib "$lib" --build-temp "$folder/temp"
find "$lib" -name '*.py' -delete
"$python" setup.py --quiet build_py --build-lib "$lib"
# The compiled modules ask for libFuzzer when they are loaded, so it comes before the interpreter.
preload=$("$python" -c 'import atheris; print(atheris.path())')/ubsan_with_fuzzer.so
if [ "${SANITIZE:-}" = address ]; then
    # Both runtimes in one library.  It looks for that of C++ only once, at the start; options are those of ci/sanitize.sh.
    preload="${preload/ubsan/asan} $("${CC:-cc}" -print-file-name=libstdc++.so.6)"
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64:handle_sigbus=0
    export PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system
    # A sanitizer that sees nothing says nothing: a planted mistake has to end its process.
    planted=$(env LD_PRELOAD="$preload" PYTHONPATH="$lib" PYTHONSAFEPATH=1 "$python" - 2>&1 <<'EOF' || true
import tempfile
from rmqstore import _core
with tempfile.TemporaryFile() as file:
    file.truncate(5000)
    _core._read_outside(_core.Region.map(file.fileno(), 5000, False, False), 5000)
EOF
    )
    [[ $planted == *"AddressSanitizer: use-after-poison"* ]] \
        || { printf 'fuzz.sh: AddressSanitizer does not see a planted mistake:\n%s\n' "$planted" >&2; exit 1; }
fi
found=$root/build/fuzz/found
mkdir -p "$found"
targets=(
    terms broker_files readers:log readers:queue readers:batch_queue readers:queue_extension
    readers:index readers:checkpoint readers:journal readers:segment readers:message_file
    readers:qi readers:qs readers:dets readers:ets readers:consumer_offset readers:delay_offset readers:topics
    readers:import_jsonl readers:import_arrow
)
part=${PART:-1/1}
number=0
chosen=()
for target in "${targets[@]}"; do
    case $target in *"${TARGET:-}"*) ;; *) continue ;; esac
    [ $((number++ % ${part#*/})) -ne $((${part%/*} - 1)) ] || chosen+=("$target")
done
[ ${#chosen[@]} -gt 0 ] || { echo "fuzz.sh: there is no target for TARGET=${TARGET:-} PART=$part" >&2; exit 2; }
failed=()
time_is_up() { [ -n "${MINUTES:-}" ] && [ "$SECONDS" -ge $((MINUTES * 60)) ]; }
cd "$(mktemp -d)"
while :; do
    for target in "${chosen[@]}"; do
        [ -z "$long" ] || ! time_is_up || break
        name=${target%%:*}
        kind=${target#"$name"}
        kind=${kind#:}
        corpus=()
        if [ -n "$long" ]; then
            corpus=("$root/build/fuzz/corpus/${kind:-$name}")
            mkdir -p "${corpus[@]}"
        fi
        echo "=== fuzz: $target" >&2
        # atheris names an input that takes a minute, and may not end by itself then.
        timeout --kill-after=10 "$((seconds + 300))" \
            env LD_PRELOAD="$preload" PYTHONPATH="$lib${PYTHONPATH:+:$PYTHONPATH}" "$python" "$root/tests/fuzz/$name.py" ${kind:+"$kind"} -timeout=60 \
            "-artifact_prefix=$found/${kind:-$name}-" "-max_total_time=$seconds" "${@:2}" ${corpus[@]+"${corpus[@]}"} \
            || failed+=("$target")
    done
    [ -n "$long" ] && ! time_is_up || break
done
[ ${#failed[@]} -eq 0 ] || { echo "fuzz.sh: found something with ${failed[*]}; the bytes are in $found" >&2; exit 1; }
