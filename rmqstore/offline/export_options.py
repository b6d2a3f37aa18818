"""The options of an export: format, columns, form of bodies, compression, and what damage does.

Owns which of them fit together, and what the name of an output says of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rmqstore._columns import COLUMN_NAMES
from rmqstore.config import StoreConfig
from rmqstore.errors import MissingDependencyError
from rmqstore.files.output_file import format_of
from rmqstore.store.columns import chosen_columns, import_pyarrow

__all__ = ["BODY_FORMS", "COMPRESSIONS", "CORRUPT_MODES", "FORMATS", "ExportOptions"]

FORMATS = ("jsonl", "csv", "arrow", "parquet", "files")
"""The formats of an export."""

BODY_FORMS = ("text", "hex", "base64", "raw", "none")
"""How bodies are written: text where they are UTF-8 (else base64), hexadecimal, base64, bytes as they are, or not at all."""

CORRUPT_MODES = ("fail", "report", "skip")
"""What damage does: end the export, be passed over and counted, or be written with ``corrupt`` set."""

COMPRESSIONS = {
    "jsonl": ("none", "gzip", "zstd"),
    "csv": ("none", "gzip", "zstd"),
    "arrow": ("none", "lz4", "zstd"),
    "parquet": ("none", "snappy", "gzip", "zstd"),
    "files": ("none",),
}
"""The compressions of each format."""

BODIES = ("body", "body_stored")
"""The columns that hold bodies."""

# A CRC covers the body, so it is looked at where a body or a word about it is asked for; the compression where the body
# is not asked for as it is stored.
DECODED = frozenset({"body", "corrupt"})
"""Columns that need the decompressed body."""

JUDGED = frozenset({*BODIES, "corrupt"})
"""Columns that need the CRC."""


@dataclass(frozen=True)
class ExportOptions:
    """How an export reads a store and writes its output.

    Attributes
    ----------
    format : {"jsonl", "csv", "arrow", "parquet", "files"} or None
        None is what the ending of the output says, ``jsonl`` for an open file.
    columns : iterable of str or None
        As of `MessageStore.scan`; None is all but those that repeat others.
    body : {"text", "hex", "base64", "raw", "none"} or None
        How bodies are written.  None is ``raw`` for Arrow, Parquet and single files, ``text`` otherwise: bodies that are not
        UTF-8 become base64, and ``body_encoding`` says so.
    corrupt : {"fail", "report", "skip"}
        What damage does.  Without ``body`` and ``corrupt`` among the columns CRCs are not looked at.
    compression : str or None
        One of `COMPRESSIONS`; None is what the ending says (``.gz``, ``.zst``), zstd for Parquet.
    force : bool
        Replace a file that exists; a folder is never replaced.
    shown : bool
        The output is a terminal: everything outside ASCII is escaped.
    safe_csv : bool
        In CSV, put an apostrophe before each text that a spreadsheet would run as a formula; an import does not take it
        away.
    only_known_topics : bool
        Make no output, and replace none, where the store has none of the selection's topics: a name that was mistyped leaves
        nothing that looks like an answer.  Otherwise the output is there, without a row.
    config : StoreConfig or None
        None is `StoreConfig.infer`.
    tiered : path or None
        The broker's tieredStoreFilePath: what the local log no longer has comes from there first, queue by queue; not with a
        range of phy offsets, which are places of the local log.
    """

    format: str | None = None
    columns: Iterable[str] | None = None
    body: str | None = None
    corrupt: str = "fail"
    compression: str | None = None
    force: bool = False
    shown: bool = False
    safe_csv: bool = False
    only_known_topics: bool = False
    config: StoreConfig | None = None
    tiered: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class Layout:
    """What an export writes, once all options are known.

    Attributes
    ----------
    format : str
    columns : tuple of str
    body : str
        One of `BODY_FORMS`.
    compression : str
    shown, safe_csv : bool
        See `ExportOptions`.
    """

    format: str
    columns: tuple[str, ...]
    body: str
    compression: str
    shown: bool
    safe_csv: bool


def layout_of(options: ExportOptions, path: str | None) -> Layout:
    """Return what these options mean for an output with this path, None for an open file.

    Raises
    ------
    ValueError
        A value that does not exist, or one that does not fit the format.
    MissingDependencyError
        The format needs a library that is not installed.
    """
    said, compression = ("jsonl", None) if path is None else format_of(path)
    format = options.format or said
    if format is None:
        raise ValueError(
            f"the name {path!r} does not tell the format; give one of {', '.join(FORMATS)}, or a name that ends with "
            ".jsonl, .csv, .arrow or .parquet"
        )
    if compression is not None and format not in ("jsonl", "csv"):
        raise ValueError(
            f"a {format} file is compressed inside: leave .gz and .zst out of its name, and give --compress"
        )
    if options.safe_csv and format != "csv":
        raise ValueError(f"safe_csv is for CSV, and the format is {format}")
    for value, what, known in [(format, "format", FORMATS), (options.corrupt, "corrupt", CORRUPT_MODES)]:
        if value not in known:
            raise ValueError(f"{what} is {value!r}; give {', '.join(known[:-1])} or {known[-1]}")
    if options.body is not None and options.body not in BODY_FORMS:
        raise ValueError(f"body is {options.body!r}; give {', '.join(BODY_FORMS[:-1])} or {BODY_FORMS[-1]}")
    binary = format in ("arrow", "parquet", "files")
    form = options.body or ("raw" if binary else "text")
    if form == "raw" and not binary:
        raise ValueError(f"{format} has no place for raw bytes; give text, hex, base64 or none, or another format")
    if format == "files" and form != "raw":
        raise ValueError("the format files writes bodies as they are; leave body out, or choose another format")
    names = chosen_columns(options.columns)
    if format == "files" and JUDGED.isdisjoint(names):
        names = (*names, "body")
    if form == "none":
        names = tuple(name for name in names if name not in BODIES)
    if not names:
        raise ValueError(f"no column is left; there are {', '.join(COLUMN_NAMES)}")
    compression = options.compression or compression or ("zstd" if format == "parquet" else "none")
    if compression not in COMPRESSIONS[format]:
        raise ValueError(f"{format} is not compressed with {compression}; give {', '.join(COMPRESSIONS[format])}")
    if compression == "zstd" and format in ("jsonl", "csv"):
        import_zstandard()
    if format in ("arrow", "parquet"):
        import_pyarrow()
    if format == "files" and path is None:
        raise ValueError("the format files makes a folder; give its name")
    return Layout(format, names, form, compression, options.shown, options.safe_csv)


def import_zstandard() -> Any:
    """Import zstandard; MissingDependencyError says how to install it."""
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            "files compressed with zstd need the library zstandard: install it with 'pip install rmqstore[compression]'"
        ) from None
    return zstandard
