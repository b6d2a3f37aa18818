"""Tiered storage of a 5.x broker, read by itself: `TieredStore`.

Owns the face of what `flatfile` reads: queues, messages by queue and by key, columns, findings.  It works without the broker's
local store, and reads nothing of that but the metadata and index files that were not uploaded yet; who wants both as one opens
`MessageStore.open(path, read_only=True, tiered=...)`.

- `tiered_store`: `TieredStore`, `TieredQueue`
"""

from rmqstore.tiered.tiered_store import TieredQueue, TieredStore

__all__ = ["TieredQueue", "TieredStore"]
