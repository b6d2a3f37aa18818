"""The index by key: hash index files and the index in RocksDB, and which of them answer a question.

Entries hold hashes: whoever reads a record says whether it has the key.

- `index_file`: one hash index file
- `index_service`: all of them: rolling, names, the read-write lock, three tries to make a file
- `database_index`: the index in RocksDB, what of the log it covers, and the answers as RocketMQ gives them
- `log_index`: entries in memory for what the files on disk do not cover, made from the log
"""
