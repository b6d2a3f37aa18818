"""The questions that the console answers: one table for routes, parameters and the OpenAPI document.

A question has an address below ``/api`` and, if `page_rows` is set, a page at the same address without ``/api``.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rmqstore._version import __version__
from rmqstore.console.list_answers import CONSUMER_COLUMNS, GROUP_COLUMNS, INDEX_COLUMNS, SETTINGS_COLUMNS
from rmqstore.console.overview_answers import QUEUE_COLUMNS, TOPIC_COLUMNS
from rmqstore.console.rabbitmq_answers import RABBITMQ_COLUMNS
from rmqstore.console.rows import Asked, BadQueryError, NotFoundError, check_choice, sort_choices
from rmqstore.selection import INT64_MAX
from rmqstore.texts import parse_time

__all__ = ["KEY_TYPES", "PENDING_KINDS", "QUESTIONS", "Number", "Question", "openapi_document"]

KEY_TYPES = {"any": None, "unique": "U", "key": "K", "tag": "T"}
PENDING_KINDS = ("delayed", "timer", "transaction", "retry", "dlq")
_MAX_NUM = 1000


@dataclass(frozen=True)
class Text:
    """A text parameter, described by `text`."""

    name: str
    text: str

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        return {"type": "string"}

    def read(self, given: str) -> Any:
        """Parse the text of a query; raise `BadQueryError` if it is not valid."""
        return given


@dataclass(frozen=True)
class Number(Text):
    """A whole number; `default` if it is missing or empty."""

    default: int | None = None
    low: int = 0
    high: int = INT64_MAX

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        schema: dict[str, Any] = {"type": "integer", "format": "int64", "minimum": self.low, "maximum": self.high}
        return schema if self.default is None else {**schema, "default": self.default}

    def read(self, given: str) -> int | None:
        """Parse the number."""
        text = given.strip()
        if not text:
            return self.default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and self.low <= int(text) <= self.high):
            raise BadQueryError(f"{self.name} is {text[:40]!r}; give a whole number from {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True)
class Choice(Text):
    """One of `choices`, by default the first."""

    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema."""
        return {"type": "string", "enum": [each for each in self.choices if each]}

    def read(self, given: str) -> str:
        """Check the choice."""
        return check_choice(self.name, given, self.choices)


@dataclass(frozen=True)
class Time(Text):
    """A time; ms since epoch."""

    def read(self, given: str) -> int | None:
        """Parse the time."""
        if not given.strip():
            return None
        try:
            value = parse_time(given.strip()[:100])
        except ValueError as error:
            raise BadQueryError(f"{self.name}: {error}") from None
        if not -INT64_MAX <= value <= INT64_MAX:
            raise BadQueryError(f"{self.name} is out of range")
        return value


@dataclass(frozen=True)
class Question:
    """A question: its address, its parameters, and a summary of the answer.

    Attributes
    ----------
    path : str
        The address below ``/api``; parameters are in braces.
    name : str
        The name in `Console.answer`, and of the page's template.
    page_rows : int, optional
        Default of ``max_num`` on the page; None for a question without a page.
    page_parameters : tuple of Text
        Parameters of the page only, or replacements of some of `parameters` there.
    """

    path: str
    name: str
    summary: str
    parameters: tuple[Text, ...] = ()
    page_rows: int | None = None
    page_parameters: tuple[Text, ...] = ()
    method: str = "GET"

    def read(self, request: Request, *, page: bool) -> Asked:
        """Parse the parameters of a request; raise `BadQueryError`, or `NotFoundError` for those of the path."""
        expected = {each.name: each for each in (*self.parameters, *(self.page_parameters if page else ()))}
        asked = {name: each.read(request.query_params.get(name, "")) for name, each in expected.items()}
        if page and "max_num" in asked and not request.query_params.get("max_num", "").strip():
            asked["max_num"] = self.page_rows
        return asked | self._read_path(request)

    def _read_path(self, request: Request) -> dict[str, Any]:
        if "{queue_id}" in self.path:
            match = re.fullmatch("(?:/api)?/queues/(.+)/(-?[0-9]{1,10})", _raw_path(request), re.DOTALL)
            if match is None:
                raise NotFoundError("the address of a queue is /queues/TOPIC/NUMBER")
            return {"topic": match[1], "queue_id": int(match[2])}
        found = dict(request.path_params)
        if found.get("phy_offset", 0) > INT64_MAX:
            raise NotFoundError(f"phy offset {found['phy_offset']} is out of range")
        if self.path.endswith("/queues/{name}"):
            found["name"] = _raw_path(request).partition("/queues/")[2]
        return found


def _raw_path(request: Request) -> str:
    # The path below the console's root; stray bytes are surrogates, as in file names.
    raw = request.scope.get("raw_path")
    if raw is None:
        path: str = request.scope["path"]
    else:
        path = urllib.parse.unquote(raw.decode("latin-1").partition("?")[0], errors="surrogateescape")
    return path.removeprefix(request.scope.get("root_path", ""))


def _sort(columns: Iterable[str], name: str = "sort") -> Choice:
    allowed = sort_choices(columns)
    return Choice(name, f"Sort by this column; a minus sorts in descending order. Default: {allowed[0]}", allowed)


_TIME = "ISO 8601 (by default in the server's time zone), ms since epoch, or relative, like '2h ago'"
_TOPIC = Text("topic", "Only this topic")
_NUM = Number("max_num", "Maximum number of rows", 50, 1, _MAX_NUM)
_MANY = Number("max_num", "Maximum number of rows", _MAX_NUM, 1, _MAX_NUM)
_FIRST = Number("first", "Number of rows to skip", 0)
_IN_PATH = {
    each.name: each
    for each in (
        Text("topic", "The topic, percent-encoded"),
        Number("queue_id", "The queue's number", None, -(2**31), 2**31 - 1),
        Number("phy_offset", "Position of the record in the commit log, in bytes"),
        Number("number", "The vhost's number in the list", None, 0, 2**31 - 1),
        Text("name", "The name of the file or queue, percent-encoded"),
    )
}

QUESTIONS = (
    Question(
        "/overview", "overview",
        "The store as a whole: log, health, and a page of its topics. `messages` and `sums` cover the queues read so far "
        "(`queues_looked_at` of `queues`); `log_bytes` is the size of a topic's records in the log, exact if "
        "`log_bytes_exact`; `unread` lists folders of queues that cannot be read.",
        (Text("topic", "Only topics whose name contains this text"), _sort(TOPIC_COLUMNS), _FIRST, _MANY),
        page_rows=100,
    ),
    Question(
        "/timeline", "timeline",
        "Messages and bytes by store time: exact up to 32 MiB of log, otherwise estimated from at most 256 samples of it.",
        (Number("bins", "Number of time intervals, all of the same length", 60, 2, 500),),
    ),
    Question("/largest", "largest", "The topics with the most bytes in the log."),
    Question(
        "/queues", "queues",
        "A page of queues; `sums` cover the queues read so far (`looked_at`), `unread` lists folders of queues that cannot be "
        "read.",
        (_TOPIC, _sort(QUEUE_COLUMNS), _FIRST, _MANY),
        page_rows=200,
    ),
    Question(
        "/queues/{topic}/{queue_id}", "queue",
        "A queue and a page of its messages, by default the newest; `lost` lists ranges of the log whose segments are missing.",
        (Number("from", "First queue offset"), _NUM),
        page_rows=50,
    ),
    Question(
        "/messages", "messages",
        "A page of messages by key, id or store time; `next_cursor` leads to the next page. If `stopped`, the search paused "
        "before the page was full. `uncovered` lists ranges of the log that are not indexed and were not searched; `unread` "
        "lists queues that cannot be read; `lost` lists ranges of the log whose segments are missing.",
        (
            _TOPIC,
            Text("key", "A key, a unique key, or a tag; requires topic"),
            Choice("type", "Type of key; any is a key or a unique key", tuple(KEY_TYPES)),
            Text("id", "An offset message id or a unique key, instead of key"),
            Time("begin", f"Stored at or after: {_TIME}"),
            Time("end", f"Stored at or before: {_TIME}"),
            Choice("order", "Order by store time, without key or id", ("newest", "oldest")),
            Text("cursor", "next_cursor of the previous page"),
            _NUM,
        ),
        page_rows=50,
        page_parameters=(Number("offset", "A phy offset, instead of key"),),
    ),
    Question(
        "/message/{phy_offset}", "message",
        "A message: properties, body, and its structures on disk: record, queue units, index entries and their chains.",
        (Choice("body", "Encoding of the body; text is UTF-8 if valid, else base64", ("text", "none", "base64", "hex")),),
        page_rows=0,
        page_parameters=(
            Choice("body", "View of the body", ("", "text", "json", "hex")),
            Number("from", "First byte of the body to show", 0),
        ),
    ),
    Question(
        "/index", "index", "The index files, by default oldest first; `problems` lists files that cannot be read.",
        (_sort(INDEX_COLUMNS),),
        page_rows=200,
        page_parameters=(Choice("sort", "Sort by this column", ("-name", *sort_choices(INDEX_COLUMNS))), _FIRST),
    ),
    Question("/index/{name}", "index_file", "An index file: header, fill, chain lengths.", page_rows=0),
    Question(
        "/consumers", "consumers",
        "A page of the progress and lag of consumer groups by queue; `queue_offset` is consumed next, -1 if unknown.",
        (Text("group", "Only this group"), _TOPIC, _sort(CONSUMER_COLUMNS), _FIRST, _MANY),
        page_rows=200,
        page_parameters=(_sort(GROUP_COLUMNS, "groups"),),
    ),
    Question(
        "/groups", "groups", "A page of consumer groups, with sums over their queues.",
        (_sort(GROUP_COLUMNS), _FIRST, _MANY),
    ),
    Question(
        "/settings", "settings",
        "Topics, subscription groups, consumer offsets or pop records, and the files or databases that contain them.",
        (
            Choice("what", "List to return", tuple(SETTINGS_COLUMNS)),
            Text("name", "Only rows whose topic or group contains this text"),
            Text("sort", "Sort by a column of the list; a minus sorts in descending order"),
            _FIRST,
            _NUM,
        ),
        page_rows=200,
    ),
    Question(
        "/pending", "pending",
        "Pending messages: totals, messages by kind and due time, the places that were read, and problems.",
        (Choice("kind", "Only this kind", ("", *PENDING_KINDS)), _TOPIC, _FIRST, _NUM),
        page_rows=200,
    ),
    Question("/verify", "verify", "The verify run: state, progress, findings.", (_FIRST, _NUM), page_rows=200),
    Question("/verify/start", "verify_start", "Start a verify run, unless one is running.", page_rows=0, method="POST"),
    Question("/verify/stop", "verify_stop", "Stop the verify run.", page_rows=0, method="POST"),
    Question("/rabbitmq", "rabbitmq", "The RabbitMQ vhosts that the server shows.", page_rows=200),
    Question(
        "/rabbitmq/{number}", "rabbitmq_vhost", "A vhost and its queues.",
        page_rows=200,
        page_parameters=(_sort(RABBITMQ_COLUMNS), _FIRST),
    ),
    Question(
        "/rabbitmq/{number}/queues/{name}", "rabbitmq_queue", "A queue of a vhost and its messages, oldest first.",
        (_FIRST, _NUM),
        page_rows=50,
        page_parameters=(Number("message", "Only the message at this place in the queue"),),
    ),
    Question("/openapi.json", "openapi", "This document."),
)  # fmt: skip

_ERRORS = {
    "400": "Bad request: a parameter has a wrong value",
    "401": "Unauthorized: the token is missing or wrong",
    "403": "Forbidden: the request comes from another site, or is a POST without Origin",
    "404": "Not found: the store has no such object",
    "500": "Internal server error",
    "503": "Service unavailable: the store is missing or cannot be read now",
}


def openapi_document(root: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the API, for a console at the address `root` of its server."""
    paths: dict[str, Any] = {}
    for question in QUESTIONS:
        in_path = [_IN_PATH[name] for name in re.findall("{([^}]*)}", question.path)]
        problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        paths[f"/api{question.path}"] = {
            question.method.lower(): {
                "operationId": question.name,
                "summary": question.summary,
                "parameters": [
                    {
                        "name": each.name,
                        "in": "path" if each in in_path else "query",
                        "required": each in in_path,
                        "description": each.text,
                        "schema": each.schema(),
                    }
                    for each in (*in_path, *question.parameters)
                ],
                "responses": {
                    "200" if question.method == "GET" else "202": {
                        "description": question.summary,
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    },
                    **{status: {"description": text, "content": problem} for status, text in _ERRORS.items()},
                },
            }
        }
    error = {"error": {"type": "string"}, "status": {"type": "integer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rmqstore console",
            "version": __version__,
            "description": "Read-only access to a RocketMQ store on disk. Times are ms since epoch, sizes are bytes.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": {"Error": {"type": "object", "required": list(error), "properties": error}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
