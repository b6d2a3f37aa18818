"""Consuming: reading a topic for a group, and what keeps how far a group came.

Owns `Consumer`, the broker's consumerOffset.json, and the places in which a broker keeps its settings, progress among them.  It
writes nothing but that file.

- `consumer`: `Consumer`, the messages of a topic from where its group stopped
- `consumer_offset`: `ConsumerOffsets`, the progress that a broker keeps
- `json_files`: the JSON dialect of a broker's files, and their backups
- `settings_sources`: topics, groups and offsets in JSON files and RocksDB, which of these a broker takes, and which names are
  RocketMQ's own
"""
