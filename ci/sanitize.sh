#!/usr/bin/env bash
# Tests on a build that sanitizers watch (`make sanitize`, `make sanitize-rest`, `make sanitize-threads`).
#
#     ci/sanitize.sh address [PYTEST_ARGUMENT...]    AddressSanitizer and UndefinedBehaviorSanitizer
#     ci/sanitize.sh thread [PYTEST_ARGUMENT...]     ThreadSanitizer
#
# The build is in build/sanitize/KIND/lib.  The interpreter is an ordinary one, so the runtime is loaded by
# LD_PRELOAD; the programs that tests start have it too.  Reports go to build/sanitize/KIND/report.*, as pytest keeps
# what a test writes and a process that dies takes that with it; each is shown at the end, and one is a failure.  CC is
# the compiler that made the build, PYTHON the interpreter (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=$1
shift
python=${PYTHON:-$PWD/.venv/bin/python}
folder=build/sanitize/$kind
lib=$PWD/$folder/lib
compiler=${CC:-cc}
mkdir -p "$folder"
rm -f "$folder"/report.*

# The path of a library of the compiler's; gcc gives back the name alone where it has none, clang says where it would
# be.
library() {
    local found
    for name in "$@"; do
        found=$("$compiler" -print-file-name="$name")
        if [ "${found#/}" != "$found" ] && [ -e "$found" ]; then
            readlink -f "$found"
            return
        fi
    done
    echo "sanitize.sh: $compiler has none of: $*" >&2
    echo "Install its sanitizers (Debian, Ubuntu: libgcc-N-dev; Fedora: libasan, libubsan, libtsan), then run this again." >&2
    return 1
}

case $kind in
    address)
        # Code that throws C++ exceptions is loaded later, but the runtime looks for the C++ library only at the start.
        preload="$(library libasan.so "libclang_rt.asan-$(uname -m).so" libclang_rt.asan.so):$(library libstdc++.so.6)"
        # Python itself keeps memory to its end.  Leaks of ours are a test (tests/core/test_sanitizers.py).
        # A test asks for more memory than there is, and is to be told so.  SIGBUS is ours: a file that was cut short.
        options=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64:handle_sigbus=0
        export ASAN_OPTIONS="$options:log_path=$PWD/$folder/report"
        export UBSAN_OPTIONS="halt_on_error=${HALT:-1}:print_stacktrace=1:log_path=$PWD/$folder/report"
        # Every object of Python's, and of Arrow's, is a piece of memory with an end of its own.
        export PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system
        ;;
    thread)
        preload=$(library libtsan.so "libclang_rt.tsan-$(uname -m).so" libclang_rt.tsan.so)
        export TSAN_OPTIONS="suppressions=$PWD/ci/tsan.supp:history_size=5:log_path=$PWD/$folder/report"
        ;;
    *)
        echo "usage: ci/sanitize.sh address|thread [PYTEST_ARGUMENT...]" >&2
        exit 2
        ;;
esac

# Python's own handler of a fault would take the place of the runtime's, which says where it was; what C's assert says
# of a process that ends is not kept from being seen.  A report ends its process and with it the run, which otherwise might
# wait for that process's tests forever.
code=0
env LD_PRELOAD="$preload" PYTHONPATH="$lib" PYTHONSAFEPATH=1 RMQSTORE_EXPECTED_BUILD="$lib" RMQSTORE_SANITIZE="$kind" \
    "$python" -m pytest -p no:faulthandler --capture=sys --max-worker-restart=0 "$@" || code=$?
reports=$(find "$folder" -maxdepth 1 -name 'report.*' | sort)
for report in $reports; do
    printf '\n=== %s\n' "$report"
    head -n 120 "$report"
    code=1
done
exit "$code"
