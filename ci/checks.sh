#!/usr/bin/env bash
# Checks that are no tests: ruff, mypy, and a wheel that is built from a source distribution, installed into a new
# environment outside the tree and used there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make --keep-going lint typecheck

python="$PWD/.venv/bin/python"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "--- source distribution, and a wheel from it"
"$python" setup.py --quiet sdist --dist-dir "$scratch/sdist"
# From the source distribution, not from the tree: this shows that nothing is missing from it.
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$scratch/wheel" "$scratch"/sdist/rmqstore-*.tar.gz
wheel=$(echo "$scratch"/wheel/rmqstore-*.whl)
"$python" - "$wheel" <<'PY'
import re
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
wanted = [r"rmqstore/_core\..*\.so", r"rmqstore/rabbitmq/_core\..*\.so", r"rmqstore/rabbitmq/_term\..*\.so", r"rmqstore/rabbitmq/_term\.pyi", r"rmqstore/_core\.pyi", r"rmqstore/_core\.pxd", r"rmqstore/py\.typed", r".*/licenses/LICENSE"]
missing = [pattern for pattern in wanted if not any(re.fullmatch(pattern, name) for name in names)]
unwanted = [name for name in names if name.endswith((".pyx", ".c", ".h")) or not name.startswith(("rmqstore/", "rmqstore-"))]
if missing or unwanted:
    sys.exit(f"the wheel lacks {missing} and should not hold {unwanted}")
print(f"{len(names)} files in the wheel")
PY

echo "--- the wheel in an environment of its own"
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet "$wheel"
cd "$scratch"
venv/bin/python -I - <<'PY'
import tempfile
from importlib.metadata import version

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig

assert rmqstore.__version__ == version("rmqstore"), (rmqstore.__version__, version("rmqstore"))
config = StoreConfig(
    mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2000, max_hash_slot_num=64, max_index_num=256
)
with tempfile.TemporaryDirectory() as folder:
    with MessageStore.open(folder + "/orders", config=config) as store:
        put = store.put_message(Message("Orders", b"paid", keys=["A-1001"], tags="EU"), queue_id=0)
        assert store.message_at(put.phy_offset).body == b"paid"
    with MessageStore.open(folder + "/orders", config=config, read_only=True) as store:
        assert [m.body for m in store.get_message("Orders", queue_id=0, queue_offset=0).messages] == [b"paid"]
        assert [m.msg_id for m in store.query_message("Orders", "A-1001").messages] == [put.msg_id]
from rmqstore.rabbitmq import Message as QueueMessage, QueueIndex

with tempfile.TemporaryDirectory() as folder:
    with QueueIndex.open(folder + "/queue", segment_entry_count=2048, create=True) as index:
        index.publish_many([QueueMessage(b"paid", routing_keys=["orders"])], deliver=True)
    with QueueIndex.open(folder + "/queue", segment_entry_count=2048, read_only=True) as index:
        assert [QueueMessage.from_term(entry.message).body for entry in index] == [b"paid"]
print("rmqstore", rmqstore.__version__, "works from", rmqstore.__file__)
PY
venv/bin/rmqstore --help
