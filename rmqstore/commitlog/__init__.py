"""The CommitLog: the segments of a store as one log of records.

This package knows neither queues nor index.  Damage is a verdict; callers decide its consequences.

- `commit_log`: `CommitLog`: append records, read a record at its offset
- `log_walk`: scans: `stretches` (the one loop of recovery, verify and rebuild), messages, columns, headers
- `log_end`: the end of the log, and a reader's check that a writer did not cut it
- `pieces`: the pieces of a long log, which threads process ahead of the caller
"""
