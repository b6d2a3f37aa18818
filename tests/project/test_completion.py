"""What completion shows of the objects that users hold, and what the API pages list: the same names, each explained.

Owns the comparison in both directions, so that a new attribute is either documented or left out of completion, and
the rule that every public name of the package has its place on an API page.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import rmqstore
from rmqstore import IndexFile, Message, MessageStore, StoreConfig
from rmqstore import rabbitmq as rabbit

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("api.md", "api-rabbitmq.md", "api-spark.md")]
# What a class has from the sequence or the exception that it is.
OF_ITS_BASE = {name for kind in (tuple, list, str) for name in dir(kind) if not name.startswith("_")}


def directives() -> dict[str, list[str] | None]:
    """The objects that the API pages show, with the members that are picked, None where all are."""
    found: dict[str, list[str] | None] = {}
    for page in PAGES:
        for block in re.split(r"(?m)^(?=::: )", page.read_text(encoding="utf-8"))[1:]:
            name = block.split()[1]
            picked = re.search(r"(?ms)^      members: \[(.*?)\]", block)
            members = None if picked is None else re.findall(r"\w+", picked[1])
            # What is compiled has no docstring that the site can read: it is listed by hand below.
            by_hand = re.findall(r"`(\w+)(?:\([^`]*\))?`[,:]", block)
            found[name] = None if members is None else members + by_hand
    return found


def shown(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def attributes_in(kind: type) -> set[str]:
    """The names in the sections "Attributes" and "Parameters" of a class and of its bases."""
    names: set[str] = set()
    for each in kind.__mro__:
        text = inspect.cleandoc(vars(each).get("__doc__") or "")
        for section in re.findall(r"(?ms)^(?:Attributes|Parameters)\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)", text):
            for line in section.splitlines():
                if re.match(r"[\w, ]+( : |$)", line):
                    names |= set(re.findall(r"\w+", line.partition(" : ")[0]))
    return names


def explained(kind: type, name: str) -> bool:
    """Whether a name is in the class's docstring, or has one itself that says more than its signature."""
    if name in attributes_in(kind) or name in getattr(kind, "_fields", ()):
        return True
    value = inspect.getattr_static(kind, name, None)
    text = inspect.getdoc(getattr(value, "__func__", value)) if value is not None else None
    return bool(text) and not re.fullmatch(r"\w+: '?\w+'?", text)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Objects that users hold, by the name under which an API page shows their class."""
    root = tmp_path_factory.mktemp("completion")
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=2000, max_hash_slot_num=10, max_index_num=20
    )
    (root / "vhost" / "queues").mkdir(parents=True)
    (root / "vhost" / ".vhost").write_text("/")
    with (
        MessageStore.open(root / "store", config=config) as store,
        rabbit.QueueIndex.open(root / "queue", segment_entry_count=2048, create=True) as index,
        rabbit.MessageStore.open(root / "messages") as messages,
        rabbit.Vhost.open(root / "vhost") as vhost,
    ):
        put = store.put_message(Message("Orders", b"paid", keys=["k"], tags="EU"))
        index.publish_many([rabbit.Message(b"paid", routing_keys=["orders"])], deliver=True)
        got, hits = store.get_message("Orders"), store.query_message("Orders", "k")
        yield {
            "rmqstore.MessageStore": store,
            "rmqstore.commitlog.commit_log.CommitLog": store.commit_log,
            "rmqstore.consumequeue.consume_queue_store.ConsumeQueueStore": store.queues,
            "rmqstore.consumequeue.consume_queue.ConsumeQueue": store.queues.find("Orders", 0),
            "rmqstore.index.index_service.IndexService": store.index_service,
            "rmqstore.IndexFile": next(store.index_service.files()),
            "rmqstore.files.checkpoint.Checkpoint": store.checkpoint,
            "rmqstore.ConsumerOffsets": store.consumer_offsets,
            "rmqstore.Consumer": store.consume("Orders", "g"),
            "rmqstore.Message": Message("Orders", b"paid"),
            "rmqstore.MessageExt": got.messages[0],
            "rmqstore.GetMessageResult": got,
            "rmqstore.QueryResult": hits,
            "rmqstore.PutResult": put,
            "rmqstore.RecoveryReport": store.recovery_report,
            "rmqstore.StoreStats": store.stats(),
            "rmqstore.rabbitmq.QueueIndex": index,
            "rmqstore.rabbitmq.IndexEntry": next(iter(index)),
            "rmqstore.rabbitmq.MessageStore": messages,
            "rmqstore.rabbitmq.Vhost": vhost,
        }


NAMES = (
    "rmqstore.MessageStore", "rmqstore.commitlog.commit_log.CommitLog",
    "rmqstore.consumequeue.consume_queue_store.ConsumeQueueStore", "rmqstore.consumequeue.consume_queue.ConsumeQueue",
    "rmqstore.index.index_service.IndexService", "rmqstore.IndexFile", "rmqstore.files.checkpoint.Checkpoint",
    "rmqstore.ConsumerOffsets", "rmqstore.Consumer", "rmqstore.Message", "rmqstore.MessageExt",
    "rmqstore.GetMessageResult", "rmqstore.QueryResult", "rmqstore.PutResult", "rmqstore.RecoveryReport",
    "rmqstore.StoreStats", "rmqstore.rabbitmq.QueueIndex", "rmqstore.rabbitmq.IndexEntry",
    "rmqstore.rabbitmq.MessageStore", "rmqstore.rabbitmq.Vhost",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_completion_shows_what_the_documents_explain(held, name):
    assert set(held) == set(NAMES)
    thing, members = held[name], directives()[name]
    names = shown(thing) - (OF_ITS_BASE if isinstance(thing, (tuple, list)) else set())
    if members is not None:
        assert len(members) == len(set(members))
        assert names == set(members)
    # Whichever page shows it, each is explained, and nothing is explained that is not there.
    assert {each for each in names if not explained(type(thing), each)} == set()
    if members is None:
        assert attributes_in(type(thing)) & {each for each in dir(thing) if not each.startswith("_")} <= names


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_there(held, name):
    # A name that a list of shown ones has by mistake would be left out of completion silently.
    for each in directives()[name] or ():
        assert hasattr(held[name], each), each


def test_internals_are_there_and_not_shown(held):
    store = held["rmqstore.MessageStore"]
    assert not {"pool"} & set(dir(store)) and not hasattr(store, "pool")
    for thing, hidden in (
        (store.commit_log, ("files", "delays", "append_rows", "renew_lock")),
        (store.queues, ("pool", "lock", "renew_lock", "take_dirty")),
        (store.index_service, ("prepared", "renew_locks", "flush_on_roll")),
        (held["rmqstore.IndexFile"], ("region", "mapped_file", "attach")),
        (held["rmqstore.rabbitmq.Vhost"], ("open_store", "term_of")),
    ):
        for name in hidden:
            assert hasattr(thing, name) and name not in dir(thing)
        # Private names are where a debugger looks for them.
        assert any(name.startswith("_") for name in dir(thing))


def test_every_public_name_is_on_an_api_page():
    listed = {name.rpartition(".")[2] for name in directives()}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for module in ("rmqstore", "rmqstore.rabbitmq", "rmqstore.spark", "rmqstore.polars"):
        for name in importlib.import_module(module).__all__:
            assert name in listed or f"`{module}.{name}`" in text, f"{module}.{name}"
    for name in importlib.import_module("rmqstore.arguments").__all__:
        assert name in listed or f"`{name}`" in text, name


def test_what_the_pages_name_is_there_and_says_something():
    for name in directives():
        module, _, attribute = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except ImportError:
            # An extra that is not installed.
            continue
        assert inspect.getdoc(value), name
    assert IndexFile.put_key.__doc__ and rmqstore.__version__
