"""Consuming: reading a topic for a group, and what keeps how far a group came.

Owns `Consumer`, the broker's consumerOffset.json and the offsets.json of broadcasting consumers, and the places in which a broker
keeps its settings, progress among them.  It reads a store through whoever gives it messages, and writes nothing but these two
files.

- `consumer`: `Consumer`, the messages of a topic from where its group stopped
- `consumer_offset`: `ConsumerOffsets`, the progress that a broker keeps; `local_offsets`: that of broadcasting consumers
- `offsets_file`: what both share: loading with a backup, persisting, replacing a file safely
- `settings_sources`: topics, groups and offsets in JSON files and RocksDB, and which of these a broker takes
- `system_names`: which topics and groups are RocketMQ's own
- `fastjson`: the JSON dialect of these files
"""
