"""Flat files: what a 5.x broker's tiered storage (its Posix provider) keeps of a store, read as it lies on a disk.

Owns the folders and names of tiered storage, its metadata, the run of flat files of a queue, its index files, and what a queue
and a key find in them.  It only reads and takes no lock.  A flat file that is missing or short is a `Finding` or an error that
names it, and never a shorter answer.  RocketMQ's words: a flat file is one file of a run that has no fixed size.

- `metadata`: `TieredMetadata`, config/tieredStoreMetadata.json of the broker's local store
- `flat_files`: `FlatFiles`, the files of one kind of one queue as one stream of bytes, with its holes
- `flat_log`: `FlatLog`, the records of one queue; `flat_queue`: `FlatQueue`, its units and what they lead to
- `flat_index`: `FlatIndexFile`, one index file in either form; `FlatIndex`, all of them; `flat_keys`: of one queue
- `flat_store`: `FlatStore`, what one broker has in tiered storage: its queues, and messages by queue and by key
- `flat_verify`: everything in it that is wrong, as findings
"""
