"""Stores and Apache Spark: reading, following, querying and writing stores with PySpark 4, and rebuilding them on a cluster.

Owns the public names of the subpackage.  Each is looked up when it is first asked for, so that importing this package
imports neither pyspark nor pyarrow.

Nothing below this folder imports it, and it imports pyspark only where Spark itself is needed.

- `plan`: pieces of a log and of its queues; where the first record of a piece begins.  Never imports pyspark
- `options`, `batches`: what may be asked of a source; the record batches of a piece, damage among them
- `source`: the data source `rocketmq-store`; `reader`: its readers of a batch and of a stream; `writer`: appending, and
  `bulk_load` of a new store
- `tiered`: pieces of tiered storage, and their record batches
- `rabbitmq`: the data source `rabbitmq-queue`
- `query`: the messages of many keys through the index files
- `rebuild`: the passes of a rebuild; their tasks are plain functions of paths: `rebuild_records` (what tasks share, pass 1),
  `rebuild_index` (pass 2 and the comparison)
- `tasks`: functions that Spark runs in its workers
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from rmqstore.errors import MissingDependencyError

__all__ = ["bulk_load", "query", "rebuild", "register"]

_MODULES = {
    "bulk_load": "writer",
    "query": "query",
    "rebuild": "rebuild",
    "register": "source",
}


class _Package(types.ModuleType):
    # Some functions are named as their modules are.  The name is the function's, in whatever order modules are imported;
    # `from rmqstore.spark.rebuild import …` still reaches the module.

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("pandas", "pyarrow", "pyspark"):
            raise MissingDependencyError(
                "Spark needs PySpark 4.0 or later: install it with pip install 'rmqstore[spark]'"
            ) from error
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
