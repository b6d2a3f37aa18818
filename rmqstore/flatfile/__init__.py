"""Flat files: what a 5.x broker's tiered storage (its Posix provider) keeps of a store, read as it is on a disk.

It only reads and takes no lock.  A flat file that is missing or short is a `Finding` or an error that names it, and never a
shorter answer.  RocketMQ's words: a flat file is one file of a run that has no fixed size.

- `flat_files`: `FlatFiles`, the files of one kind of one queue as one stream of bytes; `FlatLog`; `TieredMetadata`
- `flat_queue`: `FlatQueue`, the units of a queue and what they point to
- `flat_index`: `FlatIndexFile`, one index file in either form; `FlatIndex`, all of them; `FlatKeys`, of one queue
- `flat_store`: `FlatStore`, what one broker has in tiered storage: its queues, and messages by queue and by key
- `flat_verify`: everything in it that is wrong, as findings
"""
