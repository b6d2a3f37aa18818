"""Spark as what maps tasks over a cluster: a function is applied to a plan and each task, and the answers come in order.

Owns how tasks and answers travel.  The tasks are plain functions over paths, which know nothing of Spark.  It imports
pyspark only through the session that it is given.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# So many tasks go to the cluster at once, together with the function.
_MAPPED_TASKS = 8192


@dataclass(frozen=True)
class Mapper:
    """Applies a function to (plan, task) for every task, somewhere.

    Attributes
    ----------
    map : callable
        Called as ``map(function, plan, tasks)``: runs the tasks in any order, more than once if it must, and returns the
        answers in the order of the tasks.
    parallelism : int
        The number of tasks that run at once.
    """

    map: Callable[[Callable[[Any, Any], Any], Any, Sequence[Any]], list[Any]]
    parallelism: int = 1

    def __call__(self, function: Callable[[Any, Any], Any], plan: Any, tasks: Sequence[Any]) -> list[Any]:
        """Return the answers in the order of the tasks."""
        return self.map(function, plan, tasks)


def _default_parallelism(spark: SparkSession) -> int:
    # How many tasks Spark says it runs at once.
    try:
        return max(spark.sparkContext.defaultParallelism, 1)
    except Exception:  # A session of Spark Connect has no context, and its error is not a public name.
        return int(spark.conf.get("spark.default.parallelism", "16") or 16)


def spark_mapper(spark: SparkSession, parallelism: int | None = None) -> Mapper:
    """Return a mapper that runs every task as a task of Spark's, by default as many at once as Spark says.

    An error about a store in a task is raised here as it is there.
    """

    def run(function: Callable[[Any, Any], Any], plan: Any, tasks: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        for first in range(0, len(tasks), _MAPPED_TASKS):
            answers += _map_tasks(spark, function, plan, list(tasks[first : first + _MAPPED_TASKS]))
        return answers

    return Mapper(run, _default_parallelism(spark) if parallelism is None else parallelism)


def _map_tasks(spark: SparkSession, function: Callable[[Any, Any], Any], plan: Any, tasks: list[Any]) -> list[Any]:
    def run(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        from rmqstore.spark.task import spare_collector

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
    """(StoreError or None, answer): an error about the store as a value, so that Spark does not try again in vain."""
    try:
        return None, function(plan, task)
    except StoreError as error:
        return error, None
