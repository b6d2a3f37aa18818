"""Schemas of Arrow as Spark has them, and what a schema that a user asks for may say.

Owns the types of Spark for the types of the columns, for both data sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    TimestampType,
)

from rmqstore.errors import StoreError
from rmqstore.store.columns import import_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["check_field", "spark_type"]


def spark_type(kind: pa.DataType) -> DataType:
    """Return the type of Spark for a type of a column."""
    types = import_pyarrow().types
    if types.is_list(kind):
        return ArrayType(StringType())
    if types.is_map(kind):
        return MapType(StringType(), StringType())
    if types.is_timestamp(kind):
        return TimestampType()
    if types.is_binary(kind) or types.is_fixed_size_binary(kind):
        return BinaryType()
    if types.is_boolean(kind):
        return BooleanType()
    if types.is_integer(kind):
        return LongType() if kind.bit_width == 64 else IntegerType()
    return StringType()


def check_field(field: StructField, wanted: Mapping[str, DataType]) -> None:
    """Raise StoreError for a field that no column is, or whose column has another type than `wanted` says."""
    if field.name not in wanted:
        raise StoreError(f"there is no column {field.name!r}; there are {', '.join(wanted)}")
    ours, theirs = wanted[field.name].simpleString(), field.dataType.simpleString()
    if theirs != ours:
        raise StoreError(
            f"column {field.name} is {ours}, the schema says {theirs}; give the first and cast the DataFrame"
        )
