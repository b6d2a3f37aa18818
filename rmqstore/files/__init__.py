"""Files of a store, whatever their bytes mean.

Nothing here knows records, queues or an index; of the rest of the package only the core and the errors are known.  No file
changes its size or its address while it is mapped (I2).

- `os_errors`: what an OSError means: missing, unreadable, not a file, full disk; no other package tests an `errno`
- `listing`: the entries of a directory, and why it cannot be listed; asking again where a file went while it was read; no other
  package lists one or has such a loop
- `open_file`: careful opening (`open_regular`, `read_small_file`), where a file was written; `durable`: forcing names and bytes
- `mapped_file`: one file of fixed size: making, mapping, flushing; the pool that bounds how many are mapped; what is never
  copied (`NotCopied`); one that is on no disk (`MemoryFile`)
- `mapped_file_queue`: a directory of equal files as one stream, and what is wrong with the others there
- `prepared_files`: making files: before they are needed, and renamed into place
- `output_file`: files and folders that have their name only when they are complete
- `store_lock`: who may write; what has to be closed, and is when the program ends
- `checkpoint`: the three times of a store's last flushes
"""
