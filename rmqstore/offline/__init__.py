"""Answers about a store, and its repair: what command line, console and Spark share.

All of them take a path, beside a broker that runs or one that died; only `rebuild` and `importing` write.

- `describe`: a store in one look, and one row a queue; `layout`: what it keeps where, and what nothing reads
- `key_search`: messages by key where nobody knows the topic; `consumer_lag`: how far consumer groups are, and their sums
- `single_file`: one file of a store alone, recognised and read
- `settings`: a broker's topics, groups, offsets and pop records
- `verify`: what is wrong, with file, position and what to do; its parts: `verify_log`, `verify_units` (queues),
  `verify_entries` (index), `verify_settings`; `verify_queue_database`, `verify_databases`: the same of queues and of the
  index in RocksDB; `verify_waiting`: of timers and transactions, in files and in RocksDB; `verify_unread`: what cannot be
  read; `compared`: the log, queues and index that are compared
- `rebuild`: queues and index again, from the log alone; `rebuild_queue_database`: queues as a RocksDB database;
  `rebuild_swap`: how both take the place of the old ones
- `lost_messages`: what a cut of the log would delete, counted before
- `export`: messages as files; `export_options`: how; `export_source`: which messages a selection means;
  `export_tiered`: those of tiered storage; `export_files`: the files
- `importing`: files into a store; `import_input`: their bytes; `import_rows`, `import_arrow`: their rows as tables to put;
  `import_bounds`: the sizes of rows before they are decoded
- `pending`: what still waits, and for what; `pending_queues` (delay levels, retries, dead letters), `pending_timers`,
  `pending_transactions`: from where on it waits; `pending_search`, `pending_rows`: what they share
- `timeline`: messages and bytes over time, sampled; `metrics`: names, labels and meaning of the Prometheus metrics
"""
