"""Answers about a store, and its repair: what command line, console and Spark share.

All of them take a path, beside a broker that runs or one that died; only `rebuild` and `importing` write.

- `describe`: a store in one look; `layout`: what it keeps where, and which versions may have written it
- `queue_rows`: one row a queue, for the command line and SQL
- `key_search`: messages by key where nobody knows the topic; `consumer_lag`: how far consumer groups are, and their sums
- `single_file`: one file of a store alone, recognised and read
- `settings`: a broker's topics, groups, offsets and pop records
- `verify`: what is wrong, with file, position and what to do; `verify_units` (queues) and `verify_entries` (index):
  its parts; `verify_queue_database`, `verify_databases`: the same of queues and of the index in RocksDB;
  `verify_waiting`: of timers and transactions, in files and in RocksDB
- `rebuild`: queues and index again, from the log alone; `rebuild_queue_database`: queues as a RocksDB database
- `lost_messages`: what a cut of the log would delete, counted before
- `export`: which messages a selection means, and their files; `export_tiered`: those of tiered storage
- `importing`: rows of files as tables to put, and where each row stands in its file; `import_bounds`: their sizes before
  they are decoded
- `pending`: what still waits, and for what; `pending_queues` (delay levels, retries, dead letters), `pending_timers`,
  `pending_transactions`: from where on it waits; `pending_search`, `pending_rows`: what they share
- `timeline`: messages and bytes over time, sampled; `metrics`: names, labels and meaning of the Prometheus metrics
"""
