#!/usr/bin/env bash
# The tests of the core on aarch64: compiled here by a cross compiler, run by qemu in a small Debian (ci/debian.sh).
#
#     ci/arm64.sh [PYTEST_ARGUMENT...]    arguments instead of the files in TESTS
#     ci/arm64.sh --short                 without the tests that `make test` leaves out too (tests/long_tests.py): for every commit
#     ci/arm64.sh --lend                  for a user without rights, later: fetches the Debian, qemu and the compiler, as root
#
# What runs there and nowhere else here: the CRC by aarch64's own instructions, the fences that its compiler makes, the hash
# without SSE2, chars that have no sign.  qemu orders memory as strongly as this machine: a missing fence need not show.
# Where it cannot be had this says so and ends well, except when CI is true and RMQSTORE_MAY_SKIP is not set.  PYTHON makes the
# build (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TESTS=(core/test_{core,crc,region} store/test_{lifetime,vectors,golden,corruption,crash,put,table})
root="$PWD"
base="$root/build/arm64"
python=${PYTHON:-$root/.venv/bin/python}

give_up() {
    if [ "${CI:-}" = true ] && [ -z "${RMQSTORE_MAY_SKIP:-}" ]; then
        echo "arm64.sh: $1 (required when CI=true)" >&2
        exit 1
    fi
    echo "arm64.sh: $1; the tests on aarch64 do not run" >&2
    exit 0
}

debian=$(bash ci/debian.sh make bookworm arm64 python3.11 libpython3.11-dev gcc libc6-dev git) \
    || give_up "there is no Debian for arm64"
if ! command -v aarch64-linux-gnu-gcc >/dev/null; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
        --no-install-recommends gcc-aarch64-linux-gnu >&2 || give_up "there is no cross compiler for aarch64"
fi
if [ "${1:-}" = --lend ]; then
    echo "arm64.sh: $debian, $(aarch64-linux-gnu-gcc --version | head -n 1)"
    exit 0
fi
"$python" -c 'import Cython, setuptools, pip' \
    || give_up "$python has no Cython, setuptools and pip; make venv installs them"

build_arm64() {
    mkdir -p "$base"
    # As in `make debug-test`; the interpreter and the C library are those of the Debian, the compiler is this machine's.
    find "$base" -path '*/lib/*' -name '*.py' -delete
    CC="aarch64-linux-gnu-gcc --sysroot=$debian -I$debian/usr/include/python3.11" \
        LDSHARED="aarch64-linux-gnu-gcc --sysroot=$debian -shared" LDFLAGS='' _PYTHON_HOST_PLATFORM=linux-aarch64 \
        SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
        "$python" setup.py --quiet build_ext --build-lib "$base/lib" --build-temp "$base/temp"
    "$python" setup.py --quiet build_py --build-lib "$base/lib"
    # Only wheels, which this machine's pip can unpack for another one.
    "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$base/site" --only-binary :all: \
        --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none --platform manylinux_2_28_aarch64 \
        --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform any \
        click hypothesis lz4 numpy pyarrow pytest pytest-timeout pytest-xdist rich zstandard
}

in_debian() {
    bash ci/debian.sh run "$debian" env CI="${CI:-}" "PYTHONPATH=$base/lib:$base/site" PYTHONSAFEPATH=1 \
        "RMQSTORE_EXPECTED_BUILD=$base/lib" /usr/bin/python3.11 "$@"
}

TIMEFORMAT="arm64.sh: built in %R s, processors busy %U + %S s"
time build_arm64
in_debian -c '
import platform, sys
from rmqstore import _core
print(platform.machine(), sys.version, _core.__file__, "CRC by", _core.crc32_implementations())
assert platform.machine() == "aarch64"
'
selection="not slow and not java and not rabbitmq and not spark"
if [ "${1:-}" = --short ]; then
    selection+=" and not long"
    shift
fi
arguments=("$@")
[ ${#arguments[@]} -gt 0 ] || arguments=("${TESTS[@]/%/.py}") arguments=("${arguments[@]/#/tests/}")
read -r -a more <<<"${PYTEST_ARGS:-}"
TIMEFORMAT="arm64.sh: tested in %R s, processors busy %U + %S s"
time in_debian -m pytest -n "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" --dist loadscope --color=no --timeout=1200 \
    -m "$selection" "${arguments[@]}" "${more[@]}"
