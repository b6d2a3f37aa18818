"""The index by key: hash index files, the index in RocksDB, and the choice between them.

Entries of files hold hashes: whether a record has the key is decided by the record.

- `key_source`: the protocol of every index, several as one, and the comparison of records with keys
- `index_file`: one hash index file
- `index_service`: all files: their names and order, the roll to a new file, three tries to create one
- `database_index`: the index in RocksDB, and the part of the log that it covers
- `log_index`: the files, and entries in memory, made from the log, for the rest
"""
