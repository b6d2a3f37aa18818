"""The store that users meet, and the parts that it is made of.

Nothing here prints, and a read-only open writes nothing (I7).

- `message_store`: the store: open, put, get, query, look up, scan, flush, close
- `table_rows`: the columns of an Arrow table as rows to put
- `columns`: messages as Arrow columns: schema, arrays over the core's buffers
- `dispatcher`: what a record leaves in queues and index, and whether it is there already
- `recovery`: opening for writing: judge, cut, dispatch
- `undispatched`: units in memory for records that a broker stored and did not dispatch before it died
- `retention`: which files have had their time, and deleting them
- `housekeeping`: the background thread of a store that is open for writing: when each of its tasks is due
- `populating`: how far ahead of the writer pages are made ready, on a second such thread
- `stats`: plain numbers of an open store, read from its files
"""
