"""The store that users meet, and the parts that it is made of.

Nothing here prints, and a read-only open writes nothing (I7).

- `message_store`: the store as users meet it: open, put, flush, close; its bases: `queue_questions`: what is in a queue,
  `log_questions`: what has a key, what is in the log; `condition`: damage, numbers, progress; `damage`: which files
- `results`: what these operations answer with
- `store_state`: what the parts share: files, the append lock, whether they may be read and written
- `writing`: putting messages, both ways in, and what makes a message plain; `long_way`: the rules for all others
- `table_writing`: putting the rows of an Arrow table; `table_rows`: its columns as rows to put
- `reading`: get, table and offset by time of a queue, waiting for messages; `arrivals`: what wakes who waits; `querying`: by
  key, by tag, by id
- `tiered`: what is in tiered storage, joined with the log; `tiered_columns`: columns of that
- `columns`: messages as Arrow columns: schema, arrays over the core's buffers; `queue_columns`: those of a queue, whatever its
  kind; `key_columns`: those that keys find
- `local_queue`: a queue and the commit log as a source of messages: the walk of a get, the filter by tag, store times
- `pages`: cursors: pages of a key, a time range, a queue
- `flushing`: what is on the disk, group commit, the checkpoint; `progress`: that of consumer groups
- `upkeep`: timers, files prepared ahead, retention; `housekeeping`: the threads and when a task is due; `populating`: how
  far ahead of the writer pages are made ready; `retention`: which files have had their time, and deleting them
- `opening`: the abort mark, what is forced at opening and closing; `closing`: in which order, and for whom
- `recovery`: cut and dispatch after `judgement`, where the log ends; `index_survey`: what of the index is sound
- `lost_log`: units and entries that lead outside the log, which nobody cuts or replaces unasked
- `dispatch_rules`: which units and entries a record leaves; `dispatcher`: writing them; `agreement`: whether queues hold them
  already; `undispatched`: units in memory
  for records that a broker stored and did not dispatch before it died; `completion`: the same for queues in RocksDB
- `queue_lives`: topics that were deleted, or deleted and created again, whose records need no units
- `light_queues`: further queues of messages that were sent to other topics
- `stats`: plain numbers of an open store, read from its files
"""
