"""The CommitLog: the segments of a store as one log of records.

What a record leaves in queues and index is not known here, and damage is a verdict that others decide about.

- `commit_log`: append, read, go over (`stretches`, the one loop of recovery, verify and rebuild; `scans`, the same with pieces
  scanned ahead on two threads), `Pieces` (where they begin, their threads), where the log ends
"""
