"""ConsumeQueues: where the messages of a topic's queue lie in the log.

A unit is what a record left there: nothing here reads the log.

- `queue_folders`: which topic can name a folder, and the queues there are
- `consume_queue`: one simple queue; `consume_queue_ext`: its extension; `batch_consume_queue`: one batch queue;
  `unit_queue`: what they share, and finding a unit by store time, where clocks went back
- `consume_queue_store`: all queues of a store, opened at their first use
- `queue_look`: a look at a queue in its files, which stays unopened; a first one when a store is opened
- `database_queues`: queues in RocksDB, served as ordinary ones in memory; units that only the log has
"""
