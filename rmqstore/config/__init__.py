"""StoreConfig: the options of a store, where they come from, and what a store's own files say about them.

Owns RocketMQ's option names with its defaults, the reading of a broker.conf, and finding the geometry of a store from its files
alone.

- `store_config`: `StoreConfig`, every option with its default and its rule; the names and values of a broker.conf
- `infer`: the options that a store's own files show
- `saved_options`: the options that a store was made with, in a file of its own
- `places`: options that place the log elsewhere, DLedger's log, which are refused; which of two files has the progress of groups
"""

from rmqstore.config.infer import AssumedSizes, is_usual_size, own_size
from rmqstore.config.store_config import StoreConfig, fields_by_option, parse_java_properties, system_clock

__all__ = [
    "AssumedSizes",
    "StoreConfig",
    "fields_by_option",
    "is_usual_size",
    "own_size",
    "parse_java_properties",
    "system_clock",
]
