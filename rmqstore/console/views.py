"""One store as the console shows it: the answer to each question of `QUESTIONS`, and the values of its page.

The API sends an answer as JSON.  A page shows the answer too; a method named like the question, with ``_page`` appended,
returns other values for the template, or a response.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rmqstore.config import StoreConfig
from rmqstore.console.answers import Answers
from rmqstore.console.followed_store import FollowedStore, VerifyRun
from rmqstore.console.list_answers import ConsumerAnswers, IndexAnswers, SettingsAnswers
from rmqstore.console.overview_answers import OverviewAnswers
from rmqstore.console.rabbitmq_answers import RabbitmqAnswers
from rmqstore.console.rendering import JSON_SHOWN, body_view, url
from rmqstore.console.rows import Asked, Kept
from rmqstore.errors import StoreError

__all__ = ["Console"]

_BINS = 60
_METRICS_KEPT = 1.0
_PENDING_KEPT = 10.0
# Options that a verify run depends on and files do not always record; the command line prints the same note.
_OFTEN_UNRECORDED = ("message_delay_level", "index_tags")


class Console:
    """The answers about one store, and about the RabbitMQ vhosts at or below the paths `rabbitmq`."""

    def __init__(self, path: str, config: StoreConfig | None, rabbitmq: Sequence[str]):
        self.path = path
        self.store = FollowedStore(path, config)
        self.verify_run = VerifyRun(path, config)
        self.answers = Answers()
        self.overview_answers = OverviewAnswers(self.store.use)
        self.rabbitmq_answers = RabbitmqAnswers(rabbitmq)
        self._consumer_answers = ConsumerAnswers()
        self._metrics: Kept[bytes] = Kept()
        index = IndexAnswers()
        # By name of the question.
        self._of_store: dict[str, Callable[..., Any]] = {
            "overview": self.overview_answers.overview,
            "timeline": self.overview_answers.timeline,
            "largest": self.overview_answers.largest,
            "queues": self.overview_answers.queues,
            "queue": self.answers.queue,
            "messages": self.answers.messages,
            "message": self.answers.message,
            "index": index.index,
            "index_file": index.index_file,
            "consumers": self._consumer_answers.consumers,
            "groups": self._consumer_answers.groups,
            "pending": self.answers.pending,
        }
        self._others: dict[str, Callable[[Asked], dict[str, Any]]] = {
            "settings": SettingsAnswers(path).settings,
            "verify": lambda asked: self.verify_run.status(asked["first"], asked["max_num"]),
            "verify_start": self._verify_start,
            "verify_stop": self._verify_stop,
            "rabbitmq": self.rabbitmq_answers.vhosts,
            "rabbitmq_vhost": self.rabbitmq_answers.vhost,
            "rabbitmq_queue": self.rabbitmq_answers.queue,
        }

    def close(self) -> None:
        """Stop the verify run and the survey, and close the store."""
        self.verify_run.stop(timeout=5)
        self.overview_answers.survey.close()
        self.store.close()

    def answer(self, name: str, asked: Asked) -> dict[str, Any]:
        """Return the answer to the question `name` with the parameters `asked`."""
        if name in self._others:
            return self._others[name](asked)
        with self.store.use() as store:
            value: dict[str, Any] = self._of_store[name](store, asked)
            return value

    def _verify_start(self, asked: Asked) -> dict[str, Any]:
        with self.store.use():
            self.verify_run.start()
        return self.verify_run.status()

    def _verify_stop(self, asked: Asked) -> dict[str, Any]:
        self.verify_run.stop(timeout=2)
        return self.verify_run.status()

    def body(self, phy_offset: int) -> bytes:
        """Return the body of a message."""
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            return self.answers.body(store, phy_offset)[0]

    def record(self, phy_offset: int) -> bytes:
        """Return the record of a message."""
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            return self.answers.record(store, phy_offset)

    def metrics(self, with_pending: bool, topics: tuple[str, ...], top: int) -> bytes:
        """Return the metrics of the store and of the last verify run in Prometheus's format."""
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

    # ------------------------------------------------------------------------------------------------------------------- pages

    def overview_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add both charts."""
        with self.store.use():
            return {
                "value": self.answer("overview", asked),
                "line": self.answer("timeline", {"bins": _BINS}),
                "largest": self.answer("largest", {}),
            }

    def messages_page(self, asked: Asked, request: Request) -> dict[str, Any] | Response:
        """Return the forms and a page of results; redirect an id or a phy offset to the page of its message."""
        root = request.scope.get("root_path", "")
        place, page = asked["offset"], None
        with self.store.use() as store:
            if asked["id"].strip():
                place = self.answers.place_of_id(store, asked)
            if place is not None:
                return RedirectResponse(url(root, "message", place), 303)
            topics = store.topics()
            if asked["topic"] or asked["key"]:
                page = self.answers.found(store, asked)
        form = {name: request.query_params.get(name, "") for name in ("topic", "key", "type", "begin", "end", "order")}
        # '2h ago' would be another time on the next page.
        same = {**form, "begin": asked["begin"], "end": asked["end"], "max_num": asked["max_num"]}
        following = None
        if page is not None and page.following is not None:
            following = url(root, "messages", **same, cursor=page.following)
        return {
            "form": form, "page": page, "following": following, "start": url(root, "messages", **same),
            "topics": topics[:1000],
        }  # fmt: skip

    def message_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add a part of the body."""
        phy_offset = asked["phy_offset"]
        with self.store.use() as store, self.answers.few_at_once(store, phy_offset):
            value = self.answers.anatomy(store, phy_offset)
            body, problem = self.answers.body(store, phy_offset)
            return {"value": value | problem, **body_view(body, asked["body"], asked["from"])}

    def index_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add whether the index is in RocksDB."""
        with self.store.use() as store:
            return {"value": self.answer("index", asked), "in_database": store.database_index.is_used()}

    def index_file_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add the bars of the chart."""
        value = self.answer("index_file", asked)
        drawn = [
            {
                "lengths": str(each["from"]) if each["from"] == each["to"] else f"{each['from']} to {each['to']}",
                "slots": each["slots"],
            }
            for each in value["chains"]["bins"]
        ]
        return {"value": value, "drawn": drawn}

    def consumers_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add the sums of all groups, or of the group asked for."""
        with self.store.use() as store:
            return {
                "value": self.answer("consumers", asked),
                "groups": self._consumer_answers.sums(store, asked["group"], asked["groups"]),
                "all_groups": sorted({group for group, _ in store.consumer_offsets.list()})[:1000],
            }

    def verify_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Add the assumed options; show the findings even if the store cannot be opened now."""
        assumed: dict[str, Any] = {}
        with contextlib.suppress(StoreError, OSError), self.store.use() as store:
            assumed = {name: getattr(store.config, name) for name in _OFTEN_UNRECORDED if name in store.config.assumed}
        return {"value": self.answer("verify", asked), "assumed": assumed}

    def rabbitmq_queue_page(self, asked: Asked, _: Request) -> dict[str, Any]:
        """Return a page of the messages, or one message."""
        if asked["message"] is None:
            return {"value": self.answer("rabbitmq_queue", asked)}
        value = self.rabbitmq_answers.message(asked["number"], asked["name"], asked["message"])
        return {"value": value, "text": json.dumps(value, ensure_ascii=False, indent=2)[:JSON_SHOWN]}
