"""Answers about a store, and its repair: what command line, console and Spark share.

All of them take a path, beside a broker that runs or one that died; only `rebuild` and `importing` write.

- `describe`: a store in one look
- `verify`: what is wrong, with file, position and what to do
- `rebuild`: queues and index again, from the log alone
- `export`: which messages a selection means, and their files
- `importing`: rows of files as tables to put, and where each row stands in its file
- `metrics`: names, labels and meaning of the Prometheus metrics
"""
