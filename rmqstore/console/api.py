"""The JSON API: the answers of the pages for programs, and the OpenAPI document that describes it.

Owns the table of operations, from which both the routes and the document are made: an operation that is there is
described.  Errors are JSON too: ``{"error": sentence, "status": number}``.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rmqstore._version import __version__
from rmqstore.console.consumer_answers import CONSUMER_COLUMNS, GROUP_COLUMNS, group_rows
from rmqstore.console.index_answers import INDEX_COLUMNS
from rmqstore.console.lists import choices, in_order
from rmqstore.console.overview_answers import QUEUE_COLUMNS, TOPIC_COLUMNS
from rmqstore.console.pages import PENDING_KINDS, Console, answering
from rmqstore.console.parameters import (
    INT64_MAX,
    asked_messages,
    choice,
    name_of,
    place_of,
    queue_of,
    some_number,
    whole_number,
)
from rmqstore.console.settings_answers import SETTINGS_COLUMNS
from rmqstore.store.pages import Page

__all__ = ["Api"]

_MAX_NUM = 1000
# A larger body is no JSON string that anybody wants.
_BODY_GIVEN = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class _Parameter:
    name: str
    text: str
    schema: dict[str, Any]
    where: str = "query"


@dataclasses.dataclass(frozen=True)
class _Operation:
    path: str
    name: str
    summary: str
    answer: str
    parameters: tuple[_Parameter, ...] = ()
    method: str = "GET"


def _integer(name: str, text: str, low: int = 0, high: int = INT64_MAX, default: int | None = None) -> _Parameter:
    schema: dict[str, Any] = {"type": "integer", "format": "int64", "minimum": low, "maximum": high}
    return _Parameter(name, text, schema if default is None else {**schema, "default": default})


def _text(name: str, text: str, *choices: str) -> _Parameter:
    return _Parameter(name, text, {"type": "string", "enum": list(choices)} if choices else {"type": "string"})


def _in_path(parameter: _Parameter) -> _Parameter:
    return dataclasses.replace(parameter, where="path")


_TIME = "ISO 8601 (the server's zone if it names none), ms since epoch, or as '2h ago'"
_TOPIC = _text("topic", "Only this topic")
_NUM = _integer("max_num", "At most so many", 1, _MAX_NUM, 50)
_PHY_OFFSET = _in_path(_integer("phy_offset", "Where the record begins in the commit log, in bytes"))
_VHOST = _in_path(_integer("number", "The vhost's number in the list", 0, 2**31 - 1))
_FIRST = _integer("first", "Pass over so many", default=0)
_MANY = _integer("max_num", "At most so many", 1, _MAX_NUM, _MAX_NUM)
_BINS = _integer("bins", "So many equally long times", 2, 500, 60)


def _sort(columns: Iterable[str], usual: str | None = None, name: str = "sort") -> _Parameter:
    allowed = choices(columns)
    text = f"By this column, with a minus the greatest first; by default {usual or allowed[0]}"
    return _text(name, text, *allowed)


_BODY = _text("body", "How bodies are given; text is UTF-8 where it is, else base64", "none", "text", "base64", "hex")

_OPERATIONS = (
    _Operation(
        "/api/overview",
        "overview",
        "The store as a whole: log, health, rates, and a page of its topics",
        "Overview",
        (_text("topic", "Only topics that have this in their name"), _sort(TOPIC_COLUMNS), _FIRST, _MANY),
    ),
    _Operation(
        "/api/timeline",
        "timeline",
        "Messages and bytes by store time: exact up to 32 MiB of log, above that concluded from at most 256 places of it",
        "Timeline",
        (_BINS,),
    ),
    _Operation("/api/largest", "largest", "The topics whose records take most of the log", "Largest"),
    _Operation("/api/queues", "queues", "A page of queues", "Queues", (_TOPIC, _sort(QUEUE_COLUMNS), _FIRST, _MANY)),
    _Operation(
        "/api/queues/{topic}/{queue_id}",
        "queue",
        "A queue and its messages in order; by default the newest",
        "Queue",
        (
            _in_path(_text("topic", "The topic, percent-encoded")),
            _in_path(_integer("queue_id", "The queue's number", -(2**31), 2**31 - 1)),
            _integer("from", "Queue offset to begin with"),
            _NUM,
        ),
    ),
    _Operation(
        "/api/messages",
        "messages",
        "Messages by key, by id or by store time, a page at a time; follow next_cursor for the others",
        "Messages",
        (
            _TOPIC,
            _text("key", "With topic: a key, a unique key, or a tag"),
            _text("type", "What key is; any is key or unique key", "any", "unique", "key", "tag"),
            _text("id", "Instead: an offset message id or a producer's unique key"),
            _text("begin", f"Stored at or after: {_TIME}"),
            _text("end", f"Stored at or before: {_TIME}"),
            _text("order", "Without key or id: which come first", "newest", "oldest"),
            _text("cursor", "next_cursor of the page before"),
            _NUM,
        ),
    ),
    _Operation(
        "/api/message/{phy_offset}",
        "message",
        "A message: properties, body, and where it lies: record, queue units, index entries and their chains",
        "Message",
        (_PHY_OFFSET, _BODY),
    ),
    _Operation("/api/index", "index", "The index files, oldest first", "IndexFiles", (_sort(INDEX_COLUMNS),)),
    _Operation(
        "/api/index/{name}",
        "index_file",
        "An index file: header, fill, lengths of its chains",
        "IndexFile",
        (_in_path(_text("name", "The file's name")),),
    ),
    _Operation(
        "/api/consumers",
        "consumers",
        "Progress and lag of the consumer groups, in every queue and summed up by group",
        "Consumers",
        (_sort(CONSUMER_COLUMNS), _sort(GROUP_COLUMNS, name="groups")),
    ),
    _Operation(
        "/api/settings",
        "settings",
        "Topics, subscription groups, offsets or pop records, and the places that they were read from",
        "Settings",
        (
            _text("what", "Which list", *SETTINGS_COLUMNS),
            _text("name", "Only rows that have this in the name of their topic or group"),
            _text("sort", "By a column of that list, with a minus the greatest first"),
            _FIRST,
            _NUM,
        ),
    ),
    _Operation(
        "/api/pending",
        "pending",
        "What still waits: totals, messages by kind and due time, what was looked at, what could not be read",
        "Pending",
        (_text("kind", "Only this kind", *PENDING_KINDS), _TOPIC, _FIRST, _NUM),
    ),
    _Operation(
        "/api/verify",
        "verify",
        "The verify run: state, progress, findings",
        "VerifyRun",
        (_FIRST, _NUM),
    ),
    _Operation(
        "/api/verify/start", "verify_start", "Begin a verify run; there is one at a time", "VerifyRun", method="POST"
    ),
    _Operation("/api/verify/stop", "verify_stop", "End the verify run", "VerifyRun", method="POST"),
    _Operation("/api/rabbitmq", "rabbitmq", "The vhosts of RabbitMQ that the server was given", "Vhosts"),
    _Operation("/api/rabbitmq/{number}", "rabbitmq_vhost", "A vhost and its queues", "Vhost", (_VHOST,)),
    _Operation(
        "/api/rabbitmq/{number}/queues/{name}",
        "rabbitmq_queue",
        "A queue of a vhost and its messages, oldest first",
        "RabbitmqQueue",
        (_VHOST, _in_path(_text("name", "The queue's name, percent-encoded")), _FIRST, _NUM),
    ),
    _Operation("/api/openapi.json", "openapi", "This document", "OpenApi"),
)


def _object(text: str, *required: str, **more: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": text,
        "required": list(required),
        "properties": {
            name: more.get(name, {}) for name in (*required, *(each for each in more if each not in required))
        },
    }


_WHOLE = {"type": "integer", "format": "int64"}
_ROWS = {"type": "array", "items": {"$ref": "#/components/schemas/MessageRow"}}
_LIST = {"type": "array", "items": {"type": "object"}}
_SPANS = {"type": "array", "items": {"type": "array", "items": _WHOLE}}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object("What went wrong", "error", "status", error={"type": "string"}, status=_WHOLE),
    "MessageRow": _object(
        "What a list shows of a message; times in ms since epoch",
        "topic", "queue_id", "queue_offset", "phy_offset", "size", "msg_id", "keys", "store_timestamp", "corrupt",
        topic={"type": "string"}, queue_id=_WHOLE, queue_offset=_WHOLE, phy_offset=_WHOLE, size=_WHOLE,
        msg_id={"type": "string"}, keys={"type": "array", "items": {"type": "string"}}, store_timestamp=_WHOLE,
        corrupt={"type": "boolean"}, damage={"type": ["string", "null"]}, tags={"type": ["string", "null"]},
        unique_key={"type": ["string", "null"]}, preview={"type": ["string", "null"]},
    ),
    "Overview": _object(
        "The store; `topics` is a page of the `topics_number` that were asked for, `messages` and `sums` are of the queues that "
        "were looked at (`queues_looked_at` of `queues`: of many the others follow soon), `log_bytes` is what the records of a "
        "topic take in the log, from the sizes in its units: of some of them where `log_bytes_exact` is false; `unread` are "
        "folders of queues, by path, that cannot be looked into, so that there may be more topics and queues",
        "path", "clean", "commit_log", "topics", "topics_number", "topics_first", "messages", "queues", "queues_looked_at",
        "sums", "index", "checkpoint", "rates", "health", "unread",
        path={"type": "string"}, clean={"type": "boolean"}, topics=_LIST, health=_LIST, messages=_WHOLE, queues=_WHOLE,
        queues_looked_at=_WHOLE, topics_number=_WHOLE, topics_first=_WHOLE, sums={"type": "object"}, unread=_LIST,
    ),
    "Timeline": _object(
        "What came when. Not `exact`: `places` of the log were read; between two of them bytes are taken to have come evenly",
        "bins", "exact", "places", bins=_LIST, exact={"type": "boolean"}, places=_WHOLE,
    ),
    "Largest": _object(
        "Topics by what their records take in the log", "topics", "others", "exact", "queues", "queues_looked_at",
        topics=_LIST, others={"type": "object"}, exact={"type": "boolean"}, queues=_WHOLE, queues_looked_at=_WHOLE,
    ),
    "Queues": _object(
        "A page of the `number` queues that were asked for; `sums` are of the `looked_at` that are known so far; `unread` are "
        "folders, by path, that cannot be looked into, so that there may be more queues",
        "queues", "number", "first", "looked_at", "complete", "unread", "sums",
        queues=_LIST, number=_WHOLE, first=_WHOLE, looked_at=_WHOLE, complete={"type": "boolean"}, sums={"type": "object"},
        unread=_LIST,
    ),
    "Queue": _object(
        "A queue; `lost` are parts of the log (begin and end, phy offsets) that are lost with their messages",
        "topic", "queue_id", "min_queue_offset", "max_queue_offset", "start", "rows", "lost",
        topic={"type": "string"}, queue_id=_WHOLE, min_queue_offset=_WHOLE, max_queue_offset=_WHOLE, start=_WHOLE, rows=_LIST,
        lost=_SPANS,
    ),
    "Messages": _object(
        "A page of messages; `stopped` says that the search paused before the page was full, `uncovered` which stretches "
        "of the log (begin and end, phy offsets) neither the index covers nor anybody looked at, `unread` which queues were left "
        "out because they cannot be read, `lost` which parts of the log (begin and end, phy offsets) are lost with their messages",
        "messages", "next_cursor", "stopped", "complete", "uncovered", "unread", "lost",
        messages=_ROWS, next_cursor={"type": ["string", "null"]}, stopped={"type": "boolean"}, complete={"type": "boolean"},
        uncovered=_SPANS, unread=_LIST, lost=_SPANS,
    ),
    "Message": {
        "allOf": [
            {"$ref": "#/components/schemas/MessageRow"},
            _object("More of it", "properties", "record", "units", "entries",
                    properties={"type": "object", "additionalProperties": {"type": "string"}},
                    record={"type": "object"}, units=_LIST, entries=_LIST),
        ]
    },
    "IndexFiles": _object(
        "Index files; `problems` are those that cannot be read, by path, or their folder", "files", "problems",
        files=_LIST, problems=_LIST,
    ),
    "IndexFile": _object("An index file", "name", "entries", "capacity", "slots", "chains", chains={"type": "object"}),
    "Consumers": _object(
        "Rows of group, topic and queue, and the sums by group: messages left, and since when the oldest of them waits",
        "consumers", "groups", consumers=_LIST, groups=_LIST,
    ),
    "Settings": _object(
        "One list of a broker's settings, as it has them when it starts; `numbers` says how many rows each list has",
        "what", "rows", "number", "first", "numbers", "sources", "reasons", "findings",
        what={"type": "string"}, rows=_LIST, number=_WHOLE, first=_WHOLE, numbers={"type": "object"}, sources=_LIST,
        reasons={"type": "object"}, findings=_LIST,
    ),
    "Pending": _object(
        "What waits; times in ms since epoch; `number` is how many messages there are of the kind and topic asked for",
        "now", "totals", "number", "first", "messages", "sources", "problems", "notes",
        now=_WHOLE, number=_WHOLE, first=_WHOLE, totals=_LIST, messages=_LIST, sources=_LIST, problems=_LIST,
        notes={"type": "array", "items": {"type": "string"}},
    ),
    "VerifyRun": _object(
        "The run", "state", "done", "total", "number", "kinds", "findings",
        state={"type": "string", "enum": ["idle", "running", "finished", "stopped", "failed"]},
        done=_WHOLE, total=_WHOLE, number=_WHOLE, kinds={"type": "object"}, findings=_LIST,
    ),
    "Vhosts": _object("Vhosts", "vhosts", vhosts=_LIST),
    "Vhost": _object("A vhost", "number", "name", "queue_list", queue_list=_LIST),
    "RabbitmqQueue": _object("A queue", "name", "depth", "rows", "lost", "lost_num", rows=_LIST, lost=_LIST, lost_num=_WHOLE),
    "OpenApi": {"type": "object"},
}  # fmt: skip


def openapi_document(root: str = "") -> dict[str, Any]:
    """dict: the OpenAPI 3.1 document of the API.

    Parameters
    ----------
    root : str
        Where the console lies on its server.
    """
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        paths.setdefault(operation.path, {})[operation.method.lower()] = {
            "operationId": operation.name,
            "summary": operation.summary,
            "parameters": [
                {
                    "name": each.name,
                    "in": each.where,
                    "required": each.where == "path",
                    "description": each.text,
                    "schema": each.schema,
                }
                for each in operation.parameters
            ],
            "responses": {
                "200" if operation.method == "GET" else "202": {
                    "description": operation.summary,
                    "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{operation.answer}"}}},
                },
                "400": {"description": "That cannot be asked", "content": problem},
                "401": {"description": "The token is missing", "content": problem},
                "403": {
                    "description": "From another site, or a POST that says nothing of where from",
                    "content": problem,
                },
                "404": {"description": "There is no such thing in this store", "content": problem},
                "500": {"description": "An error in rmqstore itself", "content": problem},
                "503": {"description": "The store is gone or cannot be read now", "content": problem},
            },
        }
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
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _json(value: Any, status: int = 200) -> Response:
    # ASCII only: whatever a text of a store holds, stray bytes included, is a JSON escape.
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


class Api:
    """The API of one store; every method is an endpoint, run in a thread."""

    def __init__(self, console: Console):
        self._console = console
        self._answers = console.answers

    @staticmethod
    def addresses() -> list[tuple[str, str, str]]:
        """(path of the route, method of this class, HTTP method) of every operation."""
        paths = {
            "/api/queues/{topic}/{queue_id}": "/api/queues/{place:rest}",
            "/api/message/{phy_offset}": "/api/message/{phy_offset:place}",
            "/api/rabbitmq/{number}": "/api/rabbitmq/{number:place}",
            "/api/rabbitmq/{number}/queues/{name}": "/api/rabbitmq/{number:place}/queues/{name:rest}",
        }
        return [(paths.get(each.path, each.path), each.name, each.method) for each in _OPERATIONS]

    @answering
    def overview(self, request: Request) -> Response:
        """The store as a whole."""
        first, sort = some_number(request, "first", 0, 0, INT64_MAX), choice(request, "sort", choices(TOPIC_COLUMNS))
        name = request.query_params.get("topic", "")
        with self._console.store.use() as store:
            return _json(self._answers.overview(store, first, _max_num(request, _MAX_NUM), sort, name))

    @answering
    def timeline(self, request: Request) -> Response:
        """Messages and bytes over time."""
        with self._console.store.use() as store:
            return _json(self._answers.timeline(store, some_number(request, "bins", 60, 2, 500)))

    @answering
    def largest(self, request: Request) -> Response:
        """Bytes by topic."""
        with self._console.store.use() as store:
            return _json(self._answers.bytes_by_topic(store))

    @answering
    def queues(self, request: Request) -> Response:
        """Queues of a topic, or all."""
        first, sort = some_number(request, "first", 0, 0, INT64_MAX), choice(request, "sort", choices(QUEUE_COLUMNS))
        topic = request.query_params.get("topic") or None
        with self._console.store.use() as store:
            return _json(self._answers.queues(store, topic, first, _max_num(request, _MAX_NUM), sort))

    @answering
    def queue(self, request: Request) -> Response:
        """One queue."""
        topic, queue_id = queue_of(request)
        start = whole_number(request, "from", None)
        with self._console.store.use() as store:
            return _json(self._answers.queue(store, topic, queue_id, start, _max_num(request)))

    @answering
    def messages(self, request: Request) -> Response:
        """Messages by key, id or time."""
        query = request.query_params
        topic = query.get("topic", "")
        asked = asked_messages(request, _max_num(request))
        order, cursor = choice(request, "order", ("newest", "oldest")), query.get("cursor") or None
        with self._console.store.use() as store:
            if query.get("id", "").strip():
                place = self._answers.place_of_id(store, query["id"], topic or None)
                return _page(Page([self._answers.row(store, place)], None))
            if asked.keys or not topic:
                return _page(self._answers.by_key(store, asked, cursor))
            return _page(self._answers.by_time(store, asked, cursor, newest_first=order == "newest"))

    @answering
    def message(self, request: Request) -> Response:
        """One message."""
        phy_offset = place_of(request)
        mode = choice(request, "body", ("text", "none", "base64", "hex"))
        with self._console.store.use() as store:
            with self._answers.few_at_once(store, phy_offset):
                value = self._answers.message(store, phy_offset)
                if mode != "none":
                    body, problem = self._answers.body(store, phy_offset)
                    value |= _body(body, mode) | problem
                return _json(value)

    @answering
    def index(self, request: Request) -> Response:
        """The index files."""
        sort = choice(request, "sort", choices(INDEX_COLUMNS))
        with self._console.store.use() as store:
            files = in_order(self._answers.index(store), sort)
            return _json({"files": files, "problems": self._answers.index_problems(store)})

    @answering
    def index_file(self, request: Request) -> Response:
        """One index file; `damage` is why not all of its items can be looked up."""
        with self._console.store.use() as store:
            return _json(self._answers.index_file(store, request.path_params["name"]))

    @answering
    def consumers(self, request: Request) -> Response:
        """Progress of the groups."""
        sort = choice(request, "sort", choices(CONSUMER_COLUMNS))
        group_sort = choice(request, "groups", choices(GROUP_COLUMNS))
        with self._console.store.use() as store:
            rows = self._answers.consumers(store, sort)
        # Its age is another one at every look; whoever has the time has it too.
        groups = [{name: each for name, each in row.items() if name != "age"} for row in group_rows(rows, group_sort)]
        return _json({"consumers": rows, "groups": groups})

    @answering
    def settings(self, request: Request) -> Response:
        """A broker's settings."""
        what = choice(request, "what", tuple(SETTINGS_COLUMNS))
        sort = choice(request, "sort", choices(SETTINGS_COLUMNS[what]))
        first = some_number(request, "first", 0, 0, INT64_MAX)
        name = request.query_params.get("name", "")
        return _json(self._answers.settings(what, first, _max_num(request), sort, name))

    @answering
    def pending(self, request: Request) -> Response:
        """What still waits."""
        kind = choice(request, "kind", ("", *PENDING_KINDS)) or None
        topic = request.query_params.get("topic") or None
        first = some_number(request, "first", 0, 0, INT64_MAX)
        with self._console.store.use() as store:
            return _json(self._answers.pending(store, kind, topic, first, _max_num(request)))

    @answering
    def verify(self, request: Request) -> Response:
        """The verify run."""
        return _json(
            self._console.verify_run.status(some_number(request, "first", 0, 0, 10_000_000), _max_num(request))
        )

    @answering
    def verify_start(self, request: Request) -> Response:
        """Begin one."""
        with self._console.store.use():
            self._console.verify_run.start()
        return _json(self._console.verify_run.status(), 202)

    @answering
    def verify_stop(self, request: Request) -> Response:
        """End it."""
        self._console.verify_run.stop(timeout=2)
        return _json(self._console.verify_run.status(), 202)

    @answering
    def rabbitmq(self, request: Request) -> Response:
        """The vhosts."""
        places = self._console.rabbitmq
        return _json({"vhosts": places.vhosts() if places.paths else []})

    @answering
    def rabbitmq_vhost(self, request: Request) -> Response:
        """One vhost."""
        return _json(self._console.rabbitmq.vhost(request.path_params["number"]))

    @answering
    def rabbitmq_queue(self, request: Request) -> Response:
        """One queue of a vhost."""
        first = some_number(request, "first", 0, 0, INT64_MAX)
        number = request.path_params["number"]
        return _json(self._console.rabbitmq.queue(number, name_of(request, "/queues/"), first, _max_num(request)))

    @answering
    def openapi(self, request: Request) -> Response:
        """The document."""
        return _json(openapi_document(request.scope.get("root_path", "")))


def _max_num(request: Request, default: int = 50) -> int:
    return some_number(request, "max_num", default, 1, _MAX_NUM)


def _page(page: Page) -> Response:
    return _json(
        {
            "messages": page.rows,
            "next_cursor": page.following,
            "stopped": page.stopped,
            "complete": not (page.uncovered or page.unread or page.lost),
            "uncovered": [list(stretch) for stretch in page.uncovered],
            "unread": page.unread,
            "lost": [list(part) for part in page.lost],
        }
    )


def _body(body: bytes, mode: str) -> dict[str, Any]:
    if len(body) > _BODY_GIVEN:
        error = f"the body has {len(body)} bytes: take it from /message/<phy offset>/body"
        return {"body": None, "body_encoding": None, "body_error": error}
    if mode == "text":
        try:
            return {"body": body.decode("utf-8"), "body_encoding": "utf-8"}
        except UnicodeDecodeError:
            mode = "base64"
    text = body.hex() if mode == "hex" else base64.b64encode(body).decode("ascii")
    return {"body": text, "body_encoding": mode}
