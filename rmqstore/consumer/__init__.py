"""Consuming: reading a topic for a group, and the two files that keep how far a group came.

Owns `Consumer`, the broker's consumerOffset.json and the offsets.json of broadcasting consumers.  It reads a store through whoever
gives it messages, and writes nothing but these two files.

- `consumer`: `Consumer`, the messages of a topic from where its group stopped
- `consumer_offset`: `ConsumerOffsets`, the progress that a broker keeps; `local_offsets`: that of broadcasting consumers
- `offsets_file`: what both share: loading with a backup, persisting, replacing a file safely
- `fastjson`: the JSON dialect of these files
"""
