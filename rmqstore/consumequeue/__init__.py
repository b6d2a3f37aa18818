"""ConsumeQueues: where the messages of a topic's queue lie in the log.

A unit is what a record left there: nothing here reads the log.

- `consume_queue`: one queue: simple, with extension, batch
- `consume_queue_store`: all queues of a store, opened at their first use
- `queue_look`: a look at a queue in its files, which stays unopened
- `database_queues`: queues in RocksDB, served as ordinary ones in memory; `collected_queues`: units that only the log has
"""
