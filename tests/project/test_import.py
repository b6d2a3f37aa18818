"""What `import rmqstore` brings along: nothing that only some programs need, NumPy among it.

Owns no measurement: how long an import takes is a benchmark (`asv_bench/benchmarks/import_time.py`).
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy
import pytest

import rmqstore
from rmqstore import Message, MessageStore, StoreConfig, _numpy

# Front ends, extras, and what brings further libraries along: shutil the compression libraries, secrets OpenSSL.
NOT_NEEDED = {
    "asyncio", "click", "ctypes", "cython", "decimal", "hashlib", "ipaddress", "json", "lz4", "multiprocessing", "numpy",
    "pandas", "pickle", "platform", "pyarrow", "rich", "secrets", "shutil", "socket", "sqlite3", "ssl", "subprocess",
    "tempfile", "unittest", "urllib.request", "zstandard",
    "rmqstore.cli", "rmqstore.console", "rmqstore.consumer", "rmqstore.demo", "rmqstore.offline.export",
    "rmqstore.offline.importing", "rmqstore.offline.metrics", "rmqstore.rabbitmq", "rmqstore.spark", "rmqstore.store.stats",
}  # fmt: skip


def modules_after(code: str, *arguments: str) -> set[str]:
    """The modules that a fresh interpreter has loaded for `code`, without those that it has loaded by itself."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_only_what_every_use_needs():
    loaded = modules_after("import rmqstore")
    assert {"rmqstore.store.message_store", "rmqstore._core", "rmqstore._numpy"} <= loaded
    assert not loaded & NOT_NEEDED


def test_reading_message_by_message_needs_no_numpy(tmp_path):
    geometry = {"mapped_file_size_commit_log": 65536, "max_hash_slot_num": 10, "max_index_num": 40}
    path, index = str(tmp_path / "store"), str(tmp_path / "index")
    with MessageStore.open(path, config=StoreConfig(**geometry)) as store:
        put = store.put_message(Message("Topic", b"body", properties={"KEYS": "key"}))
    program = f"""
from rmqstore import IndexFile, MessageStore, StoreConfig
config = StoreConfig(**{geometry!r})
with MessageStore.open({path!r}, config=config, read_only=True) as store:
    assert [message.body for message in store.get_message("Topic", 0, 0).messages] == [b"body"]
    assert [message.keys for message in store.query_message("Topic", "key").messages] == [["key"]]
    assert store.message_at({put.phy_offset}).topic == "Topic"
    assert store.stats().max_phy_offset == {put.phy_offset + put.size}
with IndexFile.create({index!r}, config) as file:
    assert file.put_key("Topic#key", 100, 1_700_000_000_000)
    assert file.select_phy_offset("Topic#key", 32) == [100]
"""
    assert "numpy" not in modules_after(program)


def test_numpy_is_the_real_one_where_it_is_used():
    assert _numpy.ndarray is numpy.ndarray
    assert vars(_numpy)["ndarray"] is numpy.ndarray
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = _numpy.nothing_of_this_name
    loaded = modules_after("from rmqstore import _numpy as np\nassert np.zeros(3, np.int64).sum() == 0")
    assert "numpy" in loaded


# ---------------------------------------------------------------------------------------------------------------------
# Names that are loaded when they are first asked for.


def test_every_public_name_is_there():
    assert set(rmqstore.__all__) <= set(dir(rmqstore))
    modules_after("import rmqstore\nassert set(rmqstore.__all__) <= set(dir(rmqstore))")
    modules_after("from rmqstore import *\nimport rmqstore\nassert all(name in globals() for name in rmqstore.__all__)")
    modules_after("import rmqstore\nassert all(hasattr(rmqstore, name) for name in rmqstore.__all__)")


def test_a_name_that_is_loaded_later_is_that_of_its_module():
    loaded = modules_after(
        "import rmqstore\nfrom rmqstore import Consumer, StoreStats\n"
        "from rmqstore.store.stats import StoreStats as same\nassert rmqstore.StoreStats is StoreStats is same"
    )
    assert {"rmqstore.consumer.consumer", "rmqstore.store.stats"} <= loaded
    assert pickle.loads(pickle.dumps(rmqstore.StoreStats)) is rmqstore.StoreStats


def test_a_name_that_is_not_there_is_an_error():
    with pytest.raises(AttributeError, match="module 'rmqstore' has no attribute 'Consumers'"):
        _ = rmqstore.Consumers
    with pytest.raises(ImportError, match="Consumers"):
        from rmqstore import Consumers  # noqa: F401


@pytest.mark.parametrize("name", ["describe", "rebuild", "verify"])
@pytest.mark.parametrize(
    "statements",
    [
        "import rmqstore",
        "import rmqstore.offline.{name}",
        "import rmqstore\nimport rmqstore.offline.{name}",
        "from rmqstore.offline.{name} import {name}",
        "import rmqstore.offline.{name} as module\nimport rmqstore",
        "from importlib import import_module\nimport_module('rmqstore.offline.{name}')\nimport_module('rmqstore')",
        "import rmqstore.store.message_store, rmqstore.cli, rmqstore.offline.{name}",
    ],
)
def test_a_function_is_not_hidden_by_the_module_of_its_name(name, statements):
    check = f"import rmqstore\nfrom rmqstore import {name}\nassert rmqstore.{name} is {name} and callable({name})"
    modules_after(statements.format(name=name) + "\n" + check)
