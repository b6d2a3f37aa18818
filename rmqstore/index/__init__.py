"""The index by key: hash index files and the index in RocksDB, and which of them answer a question.

Entries of files hold hashes: whether a record has the key is decided by the record.

- `key_source`: the shape of every index, several as one, and which records have the keys
- `index_file`: one hash index file
- `index_service`: all of them: rolling, names, the read-write lock, three tries to make a file
- `database_index`: the index in RocksDB, what of the log it covers
- `log_index`: the files, and entries in memory for what they do not cover, made from the log
"""
