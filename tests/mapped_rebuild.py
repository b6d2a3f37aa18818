"""A rebuild by tasks, with any function that runs them, without Spark.

Owns the arguments, which are those of `rmqstore.rebuild`.
"""

from __future__ import annotations

from rmqstore.offline.rebuild import RebuildJob
from rmqstore.spark.rebuild import rebuild_with as run


def in_order(function, plan, tasks):
    """Run tasks one after the other."""
    return [function(plan, task) for task in tasks]


def rebuild_with(call, path, *args, parallelism=1, **options):
    """Rebuild with tasks that `call` runs."""
    return run(call, RebuildJob.of(path, *args, **options), parallelism)
