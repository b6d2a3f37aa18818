"""What every task of ours does first in a Python worker of Spark's.

Owns the worker's garbage collector, and only in a worker: in any other process nothing is changed.
"""

from __future__ import annotations

import gc
import sys

from pyspark import TaskContext

__all__ = ["spare_collector"]

_modules_spared = 0


def spare_collector() -> None:
    """Leave what the worker has imported so far out of its further garbage collections, if this is a task.

    PySpark (4.0 to 4.3, `pyspark.daemon`) collects all garbage after every task of a worker that it keeps.  The modules of
    PySpark, pyarrow and NumPy are most of what is looked at then, 25 ms each time, and never go.
    """
    global _modules_spared
    if len(sys.modules) != _modules_spared and TaskContext.get() is not None:
        # A task imports more, so the next one of the worker comes here too.
        _modules_spared = len(sys.modules)
        gc.freeze()
