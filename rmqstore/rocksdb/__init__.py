"""The RocksDB databases of a 5.x broker: opening one without a trace, and what its keys and values are.

Owns the way into a database and the layout of its entries.  It never changes a database that is there, and it knows neither the
commit log nor the queues: who completes a database from the log stands in the rooms that read the log.  It needs rocksdict (``pip
install rmqstore[rocksdb]``) and loads it at the first opening.

- `database`: `Database`, one database opened read-only, and what makes RocksDB loop in its logs; the folders of a store that hold
  databases (`queue_databases`)
- `queues`: `QueueDatabase`, the consume queues: units, the last unit of each queue, the checkpoint; `QueueDatabaseWriter`, a new
  one as a broker opens it
- `index`: the index by key: the entries that a record has, and those of a key
- `settings`: topics, subscription groups and offsets, in each of the layouts
- `waiting`: what pop handed out, timers and transactions
"""
