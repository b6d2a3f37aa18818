"""A store as a Polars LazyFrame: what a query does not ask for is not read.

Owns the path from a Polars query to the calls of a `MessageStore`: `predicate` reads what a filter says of columns, `scan`
chooses the call that answers it, runs it in Polars' threads, and has what else of a store is a table.  It never decides which
rows a query keeps: Polars applies the whole filter to all that was read, so what is not understood costs time and nothing else.
It needs polars and pyarrow (``pip install rmqstore[polars]``) and loads them at the first call.
"""

from rmqstore.polars.scan import scan_store, scan_tables

__all__ = ["scan_store", "scan_tables"]
