"""ConsumeQueues: the places of the messages of a queue in the log.

Each record leaves a unit here.  This package never reads the log.

- `queue_folders`: the folders of queues and their names
- `consume_queue`: one simple queue; `consume_queue_ext`: its extension; `batch_consume_queue`: one batch queue;
  `unit_queue`: their base, and the search by store time
- `consume_queue_store`: all queues of a store, opened at their first use
- `queue_look`: an inspection of a queue's files without opening it, for the opening of a store
- `database_queues`: queues in RocksDB as ordinary ones in memory; units that only the log has
"""
