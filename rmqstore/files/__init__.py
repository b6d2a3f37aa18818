"""Files of a store, independent of their content.

This package knows only the core and the errors.  No file changes its size or its address while it is mapped (I2).

- `os_errors`: OSErrors by meaning: missing, unreadable, not a file, full disk; no other package tests an `errno`
- `listing`: the entries of a directory, with the error of listing it; the one retry loop for deleted files
- `open_file`: careful opening (`open_regular`, `read_small_file`), written ranges; `durable`: forcing names and bytes to the disk
- `mapped_file`: one file of fixed size: creating, mapping, flushing; the pool that bounds the number of mappings; `NotCopied`;
  a file in memory (`MemoryFile`)
- `mapped_file_queue`: a directory of equal files as one stream, and problems among them
- `prepared_files`: files that are created ahead of their use
- `output_file`: files and folders that get their name when they are complete
- `store_lock`: the lock of a store; closing objects at the end of the program
- `checkpoint`: times and offsets of a store's last flushes
"""
