"""The CommitLog: the segments of a store as one log of records.

What a record leaves in queues and index is not known here, and damage is a verdict that others decide about.

- `commit_log`: `CommitLog`: append, read a record at its place
- `log_walk`: going over the log: `stretches` (the one loop of recovery, verify and rebuild), messages, columns, headers
- `log_end`: where the log ends, and how a reader beside a writer notices that it was cut
- `pieces`: where the pieces of a long log begin, which threads work at ahead of the caller
"""
