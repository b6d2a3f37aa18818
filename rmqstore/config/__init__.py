"""StoreConfig: the options of a store, from a broker.conf or inferred from its files.

- `store_config`: `StoreConfig`, every option with its default and its rule; the names and values of a broker.conf
- `infer`: the geometry of a store, from its files
- `saved_options`: the options that a store was created with, in a file of its own
- `places`: options that place the log elsewhere, and DLedger's log, which are refused; the file with the progress of groups
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
