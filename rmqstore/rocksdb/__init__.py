"""The RocksDB databases of a 5.x broker: opening one without a trace, and what its keys and values are.

Owns the way into a database and the layout of its entries.  It never changes a database that is there, and it knows neither the
commit log nor the queues: who completes a database from the log stands in the rooms that read the log.  It needs rocksdict (``pip
install rmqstore[rocksdb]``) and loads it at the first opening.

- `log_files`: the files that RocksDB writes as logs, and types of records there that it does not come past
- `places`: `queue_databases`, where the database of queues lies; `is_database`
- `database`: `Database`, one database opened read-only
- `queues`: `QueueDatabase`, the consume queues: units, the last unit of each queue, the checkpoint
- `index`: the index by key: the entries that a record has, and those of a key
- `queue_writer`: `QueueDatabaseWriter`, a new one as a broker opens it
- `settings`: topics, subscription groups and offsets, in each of the layouts; `pop_records`: what pop handed out
- `timers`, `transactions`: the entries of ``rocksdbstore/`` that wait
"""
