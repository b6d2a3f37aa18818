"""Answers about a store, and its repair: what command line, console and Spark share.

All of them take a path, and work next to a running broker or on the store of a dead one; only `rebuild` and `importing`
write.

- `describe`: a store in one look, also what nothing reads of it; rows of its queues and of the progress of consumer groups
- `single_file`: one file of a store alone, recognised and read
- `settings`: a broker's topics, groups, offsets and pop records
- `verify`: what is wrong, with file, position and what to do, and the log itself; `verify_units` (queues),
  `verify_entries` (index), `verify_databases` (both in RocksDB), `verify_settings` (checkpoint, settings, what waits);
  `compared`: the log, queues and index that are compared, and what of them cannot be read
- `rebuild`: queues and index, from the log alone; `rebuild_queue_database`: queues as a RocksDB database;
  `rebuild_swap`: how both take the place of the old ones
- `export`: messages as files, and which a selection means; `export_files`: options and files
- `importing`: files into a store; `import_rows`: the files as tables to put
- `pending`: what still waits, and for what; `pending_queues` (delay levels, retries, dead letters, transactions),
  `pending_timers`: where what waits begins; `pending_search`: records and rows, which they share
- `timeline`: messages and bytes over time, sampled, and those after a place
- `metrics`: names, labels and meaning of the Prometheus metrics
"""
