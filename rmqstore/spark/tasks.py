"""Run functions of a plan and a task in Spark's Python workers, and keep their garbage collector fast.

The functions know nothing of Spark.  pyspark is imported only in a task, or through the
session that is given.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Map", "answer_of", "parallelism_of", "spare_collector", "spark_map"]

Map = Callable[[Callable[[Any, Any], Any], Any, Sequence[Any]], list[Any]]
"""Called as ``map(function, plan, tasks)``: runs ``function(plan, task)`` for every task, in any order, more than once if it
must, and returns the answers in the order of the tasks."""

# Tasks that are sent to the cluster at once, together with the function.
_MAPPED_TASKS = 8192

_modules_spared = 0


def spare_collector() -> None:
    """Leave what the worker has imported so far out of its further garbage collections, if this is a task.

    PySpark (4.0 to 4.3, `pyspark.daemon`) collects all garbage after every task of a worker that it keeps.  The modules of
    PySpark, pyarrow and NumPy are most of what is looked at then, 25 ms each time, and never go.
    """
    global _modules_spared
    from pyspark import TaskContext

    if len(sys.modules) != _modules_spared and TaskContext.get() is not None:
        # A task imports more, so the next one of the worker comes here too.
        _modules_spared = len(sys.modules)
        gc.freeze()


def parallelism_of(spark: SparkSession) -> int:
    """Return the number of tasks that Spark runs at once."""
    try:
        return max(spark.sparkContext.defaultParallelism, 1)
    except Exception:  # A session of Spark Connect has no context, and its error is not a public name.
        return int(spark.conf.get("spark.default.parallelism", "16") or 16)


def spark_map(spark: SparkSession) -> Map:
    """Return a function that runs every task as a task of Spark's; an error about a store in a task is raised as it is."""

    def run(function: Callable[[Any, Any], Any], plan: Any, tasks: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        for first in range(0, len(tasks), _MAPPED_TASKS):
            answers += _map_tasks(spark, function, plan, list(tasks[first : first + _MAPPED_TASKS]))
        return answers

    return run


def _map_tasks(spark: SparkSession, function: Callable[[Any, Any], Any], plan: Any, tasks: list[Any]) -> list[Any]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        spare_collector()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                answer = pickle.dumps(answer_of(function, plan, tasks[number]))
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int64()), pa.array([answer], pa.binary())], names=["number", "answer"]
                )

    # One task for each number, also through Spark Connect, which knows no RDDs.
    frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(run, "number long, answer binary")
    answers: list[Any] = [None] * len(tasks)
    for row in frame.collect():
        answers[row["number"]] = pickle.loads(bytes(row["answer"]))
    for error, _ in answers:
        if error is not None:
            raise error
    return [answer for _, answer in answers]


def answer_of(function: Callable[[Any, Any], Any], plan: Any, task: Any) -> tuple[StoreError | None, Any]:
    """Return (StoreError or None, answer): the error is a value, so that Spark does not repeat the task."""
    try:
        return None, function(plan, task)
    except StoreError as error:
        return error, None
