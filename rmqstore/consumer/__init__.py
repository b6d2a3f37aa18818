"""Consuming: reading a topic for a group, and the two files that keep how far a group came.

Owns `Consumer`, the broker's consumerOffset.json and the offsets.json of broadcasting consumers.  It reads a store through whoever
gives it messages, and writes nothing but these two files.
"""
