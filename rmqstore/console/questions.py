"""The questions that the console answers: the one table behind routes, parameters and the OpenAPI document.

Owns `QUESTIONS`, the checks of parameters, and the document.  A question has an address below ``/api`` for programs and, where
`page_rows` is set, the same address without it for people.  A wrong parameter is a `BadQueryError`, which becomes status 400.
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
from rmqstore.console.rows import BadQueryError, NotFoundError, sort_choices
from rmqstore.selection import INT64_MAX
from rmqstore.texts import parse_time

__all__ = ["KEY_TYPES", "PENDING_KINDS", "QUESTIONS", "Number", "Question", "check_choice", "openapi_document"]

KEY_TYPES = {"any": None, "unique": "U", "key": "K", "tag": "T"}
PENDING_KINDS = ("delayed", "timer", "transaction", "retry", "dlq")
_MAX_NUM = 1000


@dataclass(frozen=True)
class Text:
    """A parameter that is text; `read` makes a value of what the query has for it."""

    name: str
    text: str

    @property
    def schema(self) -> dict[str, Any]:
        """dict: its JSON schema."""
        return {"type": "string"}

    def read(self, given: str) -> Any:
        """The value; raises `BadQueryError` for text that is none."""
        return given


@dataclass(frozen=True)
class Number(Text):
    """A whole number; `default` where it is missing or empty."""

    default: int | None = None
    low: int = 0
    high: int = INT64_MAX

    @property
    def schema(self) -> dict[str, Any]:
        """dict: its JSON schema."""
        schema: dict[str, Any] = {"type": "integer", "format": "int64", "minimum": self.low, "maximum": self.high}
        return schema if self.default is None else {**schema, "default": self.default}

    def read(self, given: str) -> int | None:
        """int or None: the number."""
        text = given.strip()
        if not text:
            return self.default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and self.low <= int(text) <= self.high):
            raise BadQueryError(f"{self.name} is {text[:40]!r}: give a whole number from {self.low} to {self.high}")
        return int(text)


@dataclass(frozen=True)
class Choice(Text):
    """One of `choices`, the first of them by default."""

    choices: tuple[str, ...] = ()

    @property
    def schema(self) -> dict[str, Any]:
        """dict: its JSON schema."""
        return {"type": "string", "enum": [each for each in self.choices if each]}

    def read(self, given: str) -> str:
        """str: the choice."""
        return check_choice(self.name, given, self.choices)


@dataclass(frozen=True)
class Time(Text):
    """A time."""

    def read(self, given: str) -> int | None:
        """int or None: ms since epoch."""
        if not given.strip():
            return None
        try:
            value = parse_time(given.strip()[:100])
        except ValueError as error:
            raise BadQueryError(f"{self.name}: {error}") from None
        if not -INT64_MAX <= value <= INT64_MAX:
            raise BadQueryError(f"{self.name} is out of range")
        return value


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> str:
    """str: `given`, or the first of `choices` where it is empty; raises `BadQueryError` for any other text."""
    value = given or choices[0]
    if value not in choices:
        raise BadQueryError(f"{name} is {value[:40]!r}: give one of {', '.join(each for each in choices if each)}")
    return value


@dataclass(frozen=True)
class Question:
    """A question: its address, its parameters, and what is answered.

    Attributes
    ----------
    path : str
        Parameters of the path in braces.
    name : str
        Of the method of `Console` with the answer, and of the page's template.
    page_rows : int, optional
        Default of ``max_num`` on the page; None for a question without a page.
    page_parameters : tuple of Text
        Parameters of the page alone, or other values of some of `parameters` there.
    """

    path: str
    name: str
    summary: str
    parameters: tuple[Text, ...] = ()
    page_rows: int | None = None
    page_parameters: tuple[Text, ...] = ()
    method: str = "GET"

    def path_parameters(self) -> list[Text]:
        """list of Text: those that the path has in braces."""
        return [_IN_PATH[name] for name in re.findall("{([^}]*)}", self.path)]

    def read(self, request: Request, *, page: bool) -> dict[str, Any]:
        """dict: by name the value of each parameter of a request.

        Raises
        ------
        BadQueryError
            One has a wrong value.
        NotFoundError
            The path has one that nothing can have.
        """
        expected = {each.name: each for each in (*self.parameters, *(self.page_parameters if page else ()))}
        asked = {name: each.read(request.query_params.get(name, "")) for name, each in expected.items()}
        if page and "max_num" in asked and not request.query_params.get("max_num", "").strip():
            asked["max_num"] = self.page_rows
        return asked | self._read_path(request)

    def _read_path(self, request: Request) -> dict[str, Any]:
        if "{queue_id}" in self.path:
            match = re.fullmatch("(?:/api)?/queues/(.+)/(-?[0-9]{1,10})", _raw_path(request), re.DOTALL)
            if match is None:
                raise NotFoundError("a queue's address is its topic and its number")
            return {"topic": match[1], "queue_id": int(match[2])}
        found = dict(request.path_params)
        if found.get("phy_offset", 0) > INT64_MAX:
            raise NotFoundError("no log is that long")
        if self.path.endswith("/queues/{name}"):
            found["name"] = _raw_path(request).partition("/queues/")[2]
        return found


def _raw_path(request: Request) -> str:
    # The path below the console's root, with stray bytes kept as file names have them.
    raw = request.scope.get("raw_path")
    if raw is None:
        path: str = request.scope["path"]
    else:
        path = urllib.parse.unquote(raw.decode("latin-1").partition("?")[0], errors="surrogateescape")
    return path.removeprefix(request.scope.get("root_path", ""))


def _sort(columns: Iterable[str], name: str = "sort") -> Choice:
    allowed = sort_choices(columns)
    return Choice(name, f"By this column, with a minus descending; by default {allowed[0]}", allowed)


_TIME = "ISO 8601 (the server's zone if it names none), ms since epoch, or as '2h ago'"
_TOPIC = Text("topic", "Only this topic")
_NUM = Number("max_num", "At most this number of rows", 50, 1, _MAX_NUM)
_MANY = Number("max_num", "At most this number of rows", _MAX_NUM, 1, _MAX_NUM)
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
        "The store as a whole: log, health, and a page of its topics. `messages` and `sums` are of the queues that "
        "were looked at (`queues_looked_at` of `queues`: the others follow); `log_bytes` is what the records of a topic take "
        "in the log, exact where `log_bytes_exact`; `unread` are folders of queues that cannot be read.",
        (Text("topic", "Only topics that have this in their name"), _sort(TOPIC_COLUMNS), _FIRST, _MANY),
        page_rows=100,
    ),
    Question(
        "/timeline", "timeline",
        "Messages and bytes by store time: exact up to 32 MiB of log, above that estimated from at most 256 places of it.",
        (Number("bins", "Number of equally long times", 60, 2, 500),),
    ),
    Question("/largest", "largest", "The topics whose records take most of the log."),
    Question(
        "/queues", "queues",
        "A page of queues; `sums` are of the `looked_at` of them, `unread` are folders of queues that cannot be read.",
        (_TOPIC, _sort(QUEUE_COLUMNS), _FIRST, _MANY),
        page_rows=200,
    ),
    Question(
        "/queues/{topic}/{queue_id}", "queue",
        "A queue and its messages in order, by default the newest; `lost` are ranges of the log whose segments are gone.",
        (Number("from", "Queue offset to begin with"), _NUM),
        page_rows=50,
    ),
    Question(
        "/messages", "messages",
        "A page of messages by key, by id or by store time; follow `next_cursor`. `stopped`: the search paused before the "
        "page was full; `uncovered` are ranges of the log that neither the index covers nor the search read; `unread` are "
        "queues that cannot be read, `lost` ranges of the log whose segments are gone.",
        (
            _TOPIC,
            Text("key", "With topic: a key, a unique key, or a tag"),
            Choice("type", "What key is; any is key or unique key", tuple(KEY_TYPES)),
            Text("id", "Instead: an offset message id or a producer's unique key"),
            Time("begin", f"Stored at or after: {_TIME}"),
            Time("end", f"Stored at or before: {_TIME}"),
            Choice("order", "Without key or id: which come first", ("newest", "oldest")),
            Text("cursor", "next_cursor of the page before"),
            _NUM,
        ),
        page_rows=50,
        page_parameters=(Number("offset", "Instead: a phy offset"),),
    ),
    Question(
        "/message/{phy_offset}", "message",
        "A message: properties, body, and its places on disk: record, queue units, index entries and their chains.",
        (Choice("body", "Encoding of the body; text is UTF-8 where it is, else base64", ("text", "none", "base64", "hex")),),
        page_rows=0,
        page_parameters=(
            Choice("body", "The view of the body", ("", "text", "json", "hex")),
            Number("from", "First byte of the body to show", 0),
        ),
    ),
    Question(
        "/index", "index", "The index files, by default oldest first, and the `problems` of those that cannot be read.",
        (_sort(INDEX_COLUMNS),),
        page_rows=200,
        page_parameters=(Choice("sort", "By this column", ("-name", *sort_choices(INDEX_COLUMNS))), _FIRST),
    ),
    Question("/index/{name}", "index_file", "An index file: header, fill, lengths of its chains.", page_rows=0),
    Question(
        "/consumers", "consumers",
        "A page of the progress and lag of the consumer groups in queues; `queue_offset` is consumed next, -1 for none.",
        (Text("group", "Only this group"), _TOPIC, _sort(CONSUMER_COLUMNS), _FIRST, _MANY),
        page_rows=200,
        page_parameters=(_sort(GROUP_COLUMNS, "groups"),),
    ),
    Question(
        "/groups", "groups", "A page of the consumer groups, with sums over their queues.",
        (_sort(GROUP_COLUMNS), _FIRST, _MANY),
    ),
    Question(
        "/settings", "settings",
        "Topics, subscription groups, offsets or pop records, and the places that they were read from.",
        (
            Choice("what", "The list", tuple(SETTINGS_COLUMNS)),
            Text("name", "Only rows that have this in the name of their topic or group"),
            Text("sort", "By a column of that list, with a minus descending"),
            _FIRST,
            _NUM,
        ),
        page_rows=200,
    ),
    Question(
        "/pending", "pending",
        "What still waits: totals, messages by kind and due time, what was looked at, what could not be read.",
        (Choice("kind", "Only this kind", ("", *PENDING_KINDS)), _TOPIC, _FIRST, _NUM),
        page_rows=200,
    ),
    Question("/verify", "verify", "The verify run: state, progress, findings.", (_FIRST, _NUM), page_rows=200),
    Question("/verify/start", "verify_start", "Begin a verify run; there is one at a time.", page_rows=0, method="POST"),
    Question("/verify/stop", "verify_stop", "End the verify run.", page_rows=0, method="POST"),
    Question("/rabbitmq", "rabbitmq", "The vhosts of RabbitMQ that the server was given.", page_rows=200),
    Question(
        "/rabbitmq/{number}", "rabbitmq_vhost", "A vhost and its queues.",
        page_rows=200,
        page_parameters=(_sort(RABBITMQ_COLUMNS), _FIRST),
    ),
    Question(
        "/rabbitmq/{number}/queues/{name}", "rabbitmq_queue", "A queue of a vhost and its messages, oldest first.",
        (_FIRST, _NUM),
        page_rows=50,
        page_parameters=(Number("message", "Only the message at this place of the queue"),),
    ),
    Question("/openapi.json", "openapi", "This document."),
)  # fmt: skip

_ERRORS = {
    "400": "A parameter has a wrong value",
    "401": "The token is missing",
    "403": "From another site, or a POST without a word of its origin",
    "404": "There is no such thing in this store",
    "500": "An error in rmqstore itself",
    "503": "The store is gone or cannot be read now",
}


def openapi_document(root: str = "") -> dict[str, Any]:
    """dict: the OpenAPI 3.1 document of the API, for a console at the address `root` of its server."""
    paths: dict[str, Any] = {}
    for question in QUESTIONS:
        in_path = question.path_parameters()
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
                        "schema": each.schema,
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
            "description": "A RocketMQ store on disk, read-only. Times are ms since epoch, sizes bytes.",
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
