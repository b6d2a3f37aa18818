"""The answer to each question of the table `QUESTIONS`, and what its page shows besides.

Owns `Console`: one store, its answers, and the verify run.  A method named as the question returns the answer, which the API sends
as JSON; the method with ``_page`` appended, where there is one, returns the values of the page's template, or a response.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rmqstore.config import StoreConfig
from rmqstore.console.answers import Answers
from rmqstore.console.followed_store import FollowedStore, VerifyRun
from rmqstore.console.list_answers import SETTINGS_COLUMNS, ConsumerAnswers, IndexAnswers, SettingsAnswers
from rmqstore.console.overview_answers import OverviewAnswers
from rmqstore.console.questions import KEY_TYPES, PENDING_KINDS, check_choice
from rmqstore.console.rabbitmq_answers import RabbitmqAnswers
from rmqstore.console.rendering import JSON_SHOWN, body_view, url
from rmqstore.console.rows import Kept, in_order, sort_choices
from rmqstore.errors import StoreError
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore
from rmqstore.store.pages import Page

__all__ = ["Asked", "Console"]

Asked = dict[str, Any]
"""The parameters of a request, by name."""

# A longer body is no JSON string that anybody wants.
_BODY_GIVEN = 4 * 1024 * 1024
_BINS = 60
_METRICS_KEPT = 1.0
_PENDING_KEPT = 10.0
# Options that a verify run depends on and files do not always tell; the command line notes the same.
_TOLD_BY_NO_FILE = ("message_delay_level", "index_tags")


class Console:
    """The answers about one store, and about vhosts of RabbitMQ at or below the paths `rabbitmq`."""

    def __init__(self, path: str, config: StoreConfig | None, rabbitmq: Sequence[str]):
        self.path = path
        self.store = FollowedStore(path, config)
        self.verify_run = VerifyRun(path, config)
        self.answers = Answers()
        self.overview_answers = OverviewAnswers(self.store.use)
        self.rabbitmq_answers = RabbitmqAnswers(rabbitmq)
        self._consumer_answers = ConsumerAnswers()
        self._index_answers = IndexAnswers()
        self._settings_answers = SettingsAnswers(path)
        self._metrics: Kept[bytes] = Kept()

    def close(self) -> None:
        """End a verify run and the survey, and close the store."""
        self.verify_run.stop(timeout=5)
        self.overview_answers.survey.close()
        self.store.close()

    # ---------------------------------------------------------------------------------------------------- the store as a whole

    def overview(self, asked: Asked) -> dict[str, Any]:
        """The store as a whole."""
        with self.store.use() as store:
            return self.overview_answers.overview(store, asked["first"], asked["max_num"], asked["sort"], asked["topic"])

    def overview_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With both charts."""
        with self.store.use() as store:
            return {
                "value": self.overview(asked),
                "line": self.overview_answers.timeline(store, _BINS),
                "largest": self.overview_answers.bytes_by_topic(store),
            }

    def timeline(self, asked: Asked) -> dict[str, Any]:
        """Messages and bytes over time."""
        with self.store.use() as store:
            return self.overview_answers.timeline(store, asked["bins"])

    def largest(self, asked: Asked) -> dict[str, Any]:
        """Bytes by topic."""
        with self.store.use() as store:
            return self.overview_answers.bytes_by_topic(store)

    def queues(self, asked: Asked) -> dict[str, Any]:
        """Queues of a topic, or all."""
        with self.store.use() as store:
            return self.overview_answers.queues(
                store, asked["topic"] or None, asked["first"], asked["max_num"], asked["sort"]
            )

    def queue(self, asked: Asked) -> dict[str, Any]:
        """One queue."""
        with self.store.use() as store:
            return self.answers.queue(store, asked["topic"], asked["queue_id"], asked["from"], asked["max_num"])

    # ---------------------------------------------------------------------------------------------------------------- messages

    def messages(self, asked: Asked) -> dict[str, Any]:
        """Messages by key, id or time."""
        with self.store.use() as store:
            if asked["id"].strip():
                place = self.answers.place_of_id(store, asked["id"], asked["topic"] or None)
                page = Page([self.answers.row(store, place)], None)
            else:
                page = self._found(store, asked)
        return {
            "messages": page.rows,
            "next_cursor": page.following,
            "stopped": page.stopped,
            "complete": not (page.uncovered or page.unread or page.lost),
            "uncovered": [list(stretch) for stretch in page.uncovered],
            "unread": page.unread,
            "lost": [list(part) for part in page.lost],
        }

    def _found(self, store: MessageStore, asked: Asked) -> Page:
        selection = Selection(
            (asked["topic"],),
            keys=(asked["key"],) if asked["key"] else None,
            begin=asked["begin"],
            end=asked["end"],
            index_type=KEY_TYPES[asked["type"]],  # type: ignore[arg-type]
            max_num=asked["max_num"],
        )
        cursor = asked["cursor"] or None
        if selection.keys or not selection.topic:
            return self.answers.by_key(store, selection, cursor)
        return self.answers.by_time(store, selection, cursor, newest_first=asked["order"] == "newest")

    def messages_page(self, asked: Asked, request: Request) -> dict[str, Any] | Response:
        """The forms, and a page of what was searched; an id or a phy offset leads to the page of the message."""
        root = request.scope.get("root_path", "")
        place, page = asked["offset"], None
        with self.store.use() as store:
            if asked["id"].strip():
                place = self.answers.place_of_id(store, asked["id"], asked["topic"] or None)
            if place is not None:
                return RedirectResponse(url(root, "message", place), 303)
            topics = store.topics()
            if asked["topic"] or asked["key"]:
                page = self._found(store, asked)
        form = {name: request.query_params.get(name, "") for name in ("topic", "key", "type", "begin", "end", "order")}
        # A time as '2h ago' would be another one on the next page.
        same = {**form, "begin": asked["begin"], "end": asked["end"], "max_num": asked["max_num"]}
        following = None
        if page is not None and page.following is not None:
            following = url(root, "messages", **same, cursor=page.following)
        return {
            "form": form, "page": page, "following": following, "start": url(root, "messages", **same),
            "topics": topics[:1000],
        }  # fmt: skip

    def message(self, asked: Asked) -> dict[str, Any]:
        """One message."""
        phy_offset = asked["phy_offset"]
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            value = self.answers.message(store, phy_offset)
            if asked["body"] != "none":
                body, problem = self.answers.body(store, phy_offset)
                value |= _body_object(body, asked["body"]) | problem
            return value

    def message_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With a part of the body."""
        phy_offset = asked["phy_offset"]
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            value = self.answers.message(store, phy_offset)
            body, problem = self.answers.body(store, phy_offset)
            return {"value": value | problem, **body_view(body, asked["body"], asked["from"])}

    def body(self, phy_offset: int) -> bytes:
        """bytes: the body of a message."""
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            return self.answers.body(store, phy_offset)[0]

    def record(self, phy_offset: int) -> bytes:
        """bytes: the record of a message."""
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            return self.answers.record(store, phy_offset)

    # ----------------------------------------------------------------------------------------------------- index and consumers

    def index(self, asked: Asked) -> dict[str, Any]:
        """The index files."""
        with self.store.use() as store:
            files = in_order(self._index_answers.index(store), asked["sort"])
            return {"files": files, "problems": self._index_answers.problems(store)}

    def index_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With a note where the index is in RocksDB."""
        with self.store.use() as store:
            return {"value": self.index(asked), "in_database": store.database_index.is_used()}

    def index_file(self, asked: Asked) -> dict[str, Any]:
        """One index file."""
        with self.store.use() as store:
            return self._index_answers.index_file(store, asked["name"])

    def index_file_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With the bars of its chart."""
        value = self.index_file(asked)
        drawn = [
            {
                "lengths": str(each["from"]) if each["from"] == each["to"] else f"{each['from']} to {each['to']}",
                "slots": each["slots"],
            }
            for each in value["chains"]["bins"]
        ]
        return {"value": value, "drawn": drawn}

    def consumers(self, asked: Asked) -> dict[str, Any]:
        """A page of the progress of groups."""
        with self.store.use() as store:
            names = ("group", "topic", "first", "max_num", "sort")
            return self._consumer_answers.consumers(store, *(asked[name] for name in names))

    def groups(self, asked: Asked) -> dict[str, Any]:
        """A page of the sums of groups."""
        first = asked["first"]
        with self.store.use() as store:
            rows = self._consumer_answers.groups(store, "", asked["sort"])
        return {"groups": rows[first : first + asked["max_num"]], "number": len(rows), "first": first, "sort": asked["sort"]}

    def consumers_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With the sums of the groups, or of one group where it was asked for."""
        with self.store.use() as store:
            return {
                "value": self.consumers(asked),
                "groups": self._consumer_answers.groups(store, asked["group"], asked["groups"]),
                "all_groups": sorted({group for group, _ in store.consumer_offsets.list()})[:1000],
            }

    # ----------------------------------------------------------------------------------------- settings, pending, verify, metrics

    def settings(self, asked: Asked) -> dict[str, Any]:
        """A broker's settings, also where the log cannot be read."""
        what = asked["what"]
        sort = check_choice("sort", asked["sort"], sort_choices(SETTINGS_COLUMNS[what]))
        return self._settings_answers.settings(what, asked["first"], asked["max_num"], sort, asked["name"])

    def pending(self, asked: Asked) -> dict[str, Any]:
        """What still waits."""
        with self.store.use() as store:
            return self.answers.pending(
                store, asked["kind"] or None, asked["topic"] or None, asked["first"], asked["max_num"]
            )

    def pending_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With the kinds to choose from."""
        return {"value": self.pending(asked), "kinds": PENDING_KINDS}

    def verify(self, asked: Asked) -> dict[str, Any]:
        """The verify run."""
        return self.verify_run.status(asked["first"], asked["max_num"])

    def verify_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """With options that are assumed; findings are shown also while the store cannot be opened."""
        assumed: dict[str, Any] = {}
        with contextlib.suppress(StoreError, OSError), self.store.use() as store:
            assumed = {name: getattr(store.config, name) for name in _TOLD_BY_NO_FILE if name in store.config.assumed}
        return {"value": self.verify(asked), "assumed": assumed}

    def verify_start(self, asked: Asked) -> dict[str, Any]:
        """Begin a run."""
        with self.store.use():
            self.verify_run.start()
        return self.verify_run.status()

    def verify_start_page(self, asked: Asked, request: Request) -> Response:
        """Begin a run."""
        self.verify_start(asked)
        return RedirectResponse(url(request.scope.get("root_path", ""), "verify"), 303)

    def verify_stop(self, asked: Asked) -> dict[str, Any]:
        """End the run."""
        self.verify_run.stop(timeout=2)
        return self.verify_run.status()

    def verify_stop_page(self, asked: Asked, request: Request) -> Response:
        """End the run."""
        self.verify_stop(asked)
        return RedirectResponse(url(request.scope.get("root_path", ""), "verify"), 303)

    def metrics(self, with_pending: bool, topics: tuple[str, ...], top: int) -> bytes:
        """Return the metrics of the store and of the last verify run as Prometheus reads them, with what waits if asked."""
        # An optional library.
        metrics = importlib.import_module("rmqstore.offline.metrics")
        with self.store.use() as store:

            def make() -> bytes:
                last = self.verify_run.last_finished()
                found = metrics.collect(
                    store,
                    findings=None if last is None else metrics.Findings(*last),
                    with_pending=with_pending,
                    topics=topics or None,
                    top=top,
                    refresh=False,
                )
                text: bytes = metrics.text(found)
                return text

            return self._metrics.get((with_pending, topics, top), make, _PENDING_KEPT if with_pending else _METRICS_KEPT)

    # ---------------------------------------------------------------------------------------------------------------- RabbitMQ

    def rabbitmq(self, asked: Asked) -> dict[str, Any]:
        """The vhosts."""
        return {"vhosts": self.rabbitmq_answers.vhosts()}

    def rabbitmq_vhost(self, asked: Asked) -> dict[str, Any]:
        """One vhost."""
        return self.rabbitmq_answers.vhost(asked["number"])

    def rabbitmq_queue(self, asked: Asked) -> dict[str, Any]:
        """One queue of a vhost."""
        return self.rabbitmq_answers.queue(asked["number"], asked["name"], asked["first"], asked["max_num"])

    def rabbitmq_queue_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """A page of its messages, or one of them."""
        if asked["message"] is None:
            return {"value": self.rabbitmq_queue(asked)}
        value = self.rabbitmq_answers.message(asked["number"], asked["name"], asked["message"])
        return {"value": value, "text": json.dumps(value, ensure_ascii=False, indent=2)[:JSON_SHOWN]}


def _body_object(body: bytes, mode: str) -> dict[str, Any]:
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
