"""The store that users meet, and the parts that it is made of.

Nothing here prints, and a read-only open writes nothing (I7).

- `message_store`: the public API: open, put, flush, close
- `reading`, `querying`: its questions about queues, keys and the log; `results`: answers
- `async_puts`: puts in an event loop
- `condition`: damage, lost parts of the log, progress; `stats`: numbers
- `store_state`: what the parts share: files, the append lock, whether they may be read and written
- `writing`: putting messages, both entry points, and what makes a message plain; `table_writing`: the rows of an Arrow table
- `columns`: messages as Arrow columns, and the scan of the log; `placed_columns`: those at given places, of queues and keys
- `local_queue`: a queue and the commit log as a source of messages: the walk of a get, the filter by tag, store times
- `tiered`: what is in tiered storage, joined with the log
- `pages`: cursors: pages of a key, a time range, a queue
- `flushing`: what is on the disk, group commit, the checkpoint
- `upkeep`: the threads, timers, files and pages prepared ahead; `retention`: which files have expired, and deleting them
- `opening`: the abort mark, what is forced at opening and closing, stores that were forgotten
- `recovery`: cut and dispatch after `judgement`: where the log ends, what of the index is sound
- `lost_log`: units and entries that point outside the log
- `dispatch_rules`: which units and entries a record leaves, and whether queues have them already; `dispatcher`: writing them
- `undispatched`: units in memory for records that a broker stored and did not dispatch; `completion`: those for RocksDB
"""
