"""The RocksDB databases of a 5.x broker: opening one without a trace, and the layout of keys and values.

Owns opening a database and the layout of its entries.  It never changes an existing database, and knows neither the commit log nor
the queues.  It needs rocksdict (``pip install rmqstore[rocksdb]``) and loads it at the first opening.

- `database`: `Database`, one database opened read-only, and checks for damage at which RocksDB loops; the folders of a store with
  databases (`queue_databases`)
- `queues`: `QueueDatabase`, the consume queues: units, the last unit of each queue, the checkpoint; `QueueDatabaseWriter`, a new
  one as a broker opens it
- `index`: the index by key: the entries of a record, and of a key
- `settings`: topics, subscription groups and offsets, in each of the layouts
- `waiting`: pop records, timers and transactions
"""
