"""Consuming: reading a topic for a group, and the progress of groups.

Owns `Consumer`, the broker's consumerOffset.json, and a broker's settings with the progress among them.  It writes only that file.

- `consumer`: `Consumer`, the messages of a topic from the progress of its group
- `consumer_offset`: `ConsumerOffsets`, the progress that a broker keeps
- `json_files`: the JSON dialect of a broker's files, and their backups
- `settings_sources`: topics, groups and offsets in JSON files and RocksDB, a broker's choice between them, and RocketMQ's own names
"""
