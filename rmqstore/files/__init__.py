"""Files of a store, whatever their bytes mean.

Nothing here knows records, queues or an index; of the rest of the package only the core and the errors are known.  No file
changes its size or its address while it is mapped (I2).

- `mapped_file`: one file of fixed size: making, mapping, flushing; the pool that bounds how many are mapped; careful opening
  (`open_regular`, `read_small_file`); what is never copied (`NotCopied`)
- `mapped_file_queue`: a directory of equal files as one stream
- `prepared_files`: files that are allocated before they are needed
- `output_file`: files and folders that have their name only when they are complete
- `store_lock`: who may write; `unclosed`: what has to be closed, and is when the program ends
- `again`: asking again where a file went meanwhile
- `unread`: what lies in a directory and is read by nobody, with its size
- `checkpoint`: the three times of a store's last flushes
"""
