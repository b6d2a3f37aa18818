"""A broker.conf: a Java .properties file with RocketMQ's names of the options."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError

if TYPE_CHECKING:
    from rmqstore.config.store_config import StoreConfig

__all__ = [
    "DEFAULT_STORE_HOST",
    "fields_by_option",
    "parse_java_properties",
    "read_java_properties",
    "values_of_lines",
    "values_of_properties",
]

DEFAULT_STORE_HOST = "127.0.0.1:10911"
_ODD_OPTION_NAMES = {
    "enabled_append_prop_crc": "enabledAppendPropCRC",
    "force_verify_prop_crc": "forceVerifyPropCRC",
}


def _option_name(field_name: str) -> str:
    first, *rest = field_name.split("_")
    return _ODD_OPTION_NAMES.get(field_name) or first + "".join(word.capitalize() for word in rest)


def fields_by_option(cls: type[StoreConfig]) -> dict[str, dataclasses.Field[Any]]:
    """The field of each of RocketMQ's option names; names of 4.x, which spelled two of them with one p, are among them."""
    fields = {_option_name(item.name): item for item in dataclasses.fields(cls) if not item.metadata.get("own")}
    for name in ("CommitLog", "ConsumeQueue"):
        fields["mapedFileSize" + name] = fields["mappedFileSize" + name]
    return fields


def values_of_properties(
    cls: type[StoreConfig], source: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that a broker.conf, or a mapping, gives: `StoreConfig.from_properties` says which, and the errors."""
    if not isinstance(source, Mapping):
        return values_of_lines(cls, read_java_properties(source), os.fspath(source), overrides)
    return _values(cls, [(str(name), str(value), f"option {name}") for name, value in source.items()], overrides)


def read_java_properties(path: str | os.PathLike[str]) -> list[tuple[str, str, int]]:
    """list of (name, value, line number): what a .properties file says; raises as `parse_java_properties`, or OSError."""
    # Java's Properties.load reads bytes as ISO-8859-1; other characters come as escapes.
    with open(path, encoding="iso-8859-1", newline="") as file:
        return list(parse_java_properties(file.read(), os.fspath(path)))


def values_of_lines(
    cls: type[StoreConfig], lines: Iterable[tuple[str, str, int]], path: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """As `values_of_properties`, of lines that were read from the file `path` before."""
    items = [(name, value, f"{path}, line {line}: option {name}") for name, value, line in lines]
    return _values(cls, items, overrides)


def _values(
    cls: type[StoreConfig], items: list[tuple[str, str, str]], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    fields = fields_by_option(cls)
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    address, port = DEFAULT_STORE_HOST.rsplit(":", 1)
    places: dict[str, str] = {}
    for name, text, place in items:
        target = fields.get(name)
        if target is not None:
            values[target.name] = _parse_option(target, text, place)
            places[target.name] = place
        elif name == "brokerIP1":
            address = f"[{text.strip()}]" if ":" in text and not text.strip().startswith("[") else text.strip()
            places["store_host"] = place
        elif name == "listenPort":
            port = text.strip()
            places["store_host"] = place
        else:
            unknown[name] = text
    if "store_host" in places:
        values["store_host"] = f"{address}:{port}"
    for name, value in values.items():
        # One by one first, so that the error can say where the value stands.
        if name not in overrides and name not in ("max_hash_slot_num", "max_index_num"):
            try:
                cls(**{name: value})
            except (ValueError, StoreError) as error:
                raise ValueError(f"{places[name]}: {error}") from None
    return {"unknown": unknown, **values, **overrides}


def _parse_option(target: dataclasses.Field[Any], text: str, place: str) -> Any:
    text = text.strip()
    if target.type == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{place} is {text!r}: write true or false")
        return text.lower() == "true"
    if target.type == "int":
        if not re.fullmatch("[+-]?[0-9]{1,19}", text):
            raise ValueError(f"{place} is {text!r}: write a whole number")
        return int(text)
    return text


_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_java_properties(text: str, path: str | None = None) -> Iterator[tuple[str, str, int]]:
    """Parse the text of a Java .properties file into (name, value, line number), as java.util.Properties reads it.

    Comments begin with # or !; a name ends at =, : or white space; a backslash at the end of a line joins the next one;
    escapes are those of Java.  A name may come several times; the last one counts for Java.
    """
    where = f"{path}, line " if path else "line "
    lines = enumerate(re.split(r"\r\n|\r|\n", text), 1)
    for number, line in lines:
        line = line.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        # An odd number of backslashes at the end joins the next line, without its leading white space.
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1]
            try:
                line += next(lines)[1].lstrip(" \t\f")
            except StopIteration:
                break
        pos = 0
        while pos < len(line) and line[pos] not in "=: \t\f":
            pos += 2 if line[pos] == "\\" else 1
        rest = line[pos:].lstrip(" \t\f")
        if rest[:1] in ("=", ":"):
            rest = rest[1:].lstrip(" \t\f")
        yield _unescape(line[:pos], f"{where}{number}"), _unescape(rest, f"{where}{number}"), number


def _unescape(text: str, place: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[:1] == "u":
            if len(code) != 5:
                raise ValueError(f"{place}: \\u needs four hex digits")
            return chr(int(code[1:], 16))
        return _ESCAPES.get(code, code)

    text = re.sub(r"\\(u[0-9a-fA-F]{0,4}|.|\Z)", replace, text, flags=re.DOTALL)
    # Characters beyond U+FFFF come as two escapes.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
