#!/usr/bin/env bash
# Fuzzes the readers of RabbitMQ's terms, and those of what a 5.x broker keeps beside its plain files, with atheris for so many
# seconds each (default 20); more arguments are libFuzzer's.  Where atheris has no wheel it says so and ends well, except when
# CI is true.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-20}
python=.venv/bin/python
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
cd "$(mktemp -d)"
for target in rabbitmq/fuzz_terms fuzz_broker_files; do
    "$root/$python" "$root/tests/$target.py" "-max_total_time=$seconds" "${@:2}"
done
