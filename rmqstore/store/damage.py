"""What of a store's files is damaged or cannot be read, as a list of errors.

Owns which parts are asked, and that each path is named once.  It only reads what was found when files were opened.
"""

from __future__ import annotations

import os

from rmqstore.consumequeue.consume_queue_store import unseen_text
from rmqstore.errors import StoreError
from rmqstore.rocksdb.places import closed_databases
from rmqstore.store.lost_log import is_named, lost_text
from rmqstore.store.store_state import StoreState

__all__ = ["damaged_files"]


def damaged_files(state: StoreState) -> list[StoreError]:
    """List what is damaged or cannot be read, see `MessageStore.damaged_files`."""
    log, queues = state.commit_log, state.queues
    listed = [log.files, *(queue.files for queue in queues.opened())]
    found: list[StoreError] = [problem for files in listed for problem in files.damaged()]
    named = {problem.path for problem in found}
    found += [
        StoreError(lost_text(begin, end), log.path)
        for begin, end in state.lost_log
        if not is_named(log, begin, end, named)
    ]
    found += [StoreError(unseen_text(error), folder) for folder, error in queues.unseen.items()]
    for (topic, queue_id), error in queues.unread.items():
        text = f"queue {queue_id} of {topic} cannot be read ({error.strerror or error}), and is left out"
        found.append(StoreError(text, None if error.filename is None else os.fsdecode(error.filename)))
    if state.index_service is not None:
        found += state.index_service.passed_over.values()
    completion, index_damage = state.undispatched.completion, state.database_index.damage
    databases: list[StoreError] = [
        *closed_databases(state.path),
        *(() if completion is None else completion.damage),
        *(() if index_damage is None else (index_damage,)),
    ]
    told = {problem.path for problem in found}
    for problem in databases:
        if problem.path not in told:
            told.add(problem.path)
            found.append(problem)
    return found
