"""Hostile content in the console, and stores that change, break or vanish while it shows them.

Owns two proofs: whatever a record, a name or a file of a store holds comes out as text (in the answers and in a real browser),
and whatever happens to the files the console answers with a page and a sentence, never with a traceback.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import threading
import time
from urllib.parse import quote, urlencode

import hostile_store
import oracle
import pytest
from console_load import MemoryWatch, message_query
from console_pages import answer_faults, invisible, parse, walk
from console_server import ask, connection

from rmqstore import Message, MessageStore, StoreConfig, rebuild

SMALL = StoreConfig(
    mapped_file_size_commit_log=65536,
    mapped_file_size_consume_queue=2000,
    max_hash_slot_num=100,
    max_index_num=400,
    clean_resource_interval=0,
)


def quoted(text: str) -> str:
    return quote(text, safe="")


def eventually(ask_once, wanted, limit: float = 15.0):
    """Ask until `wanted(answer)` holds; return that answer."""
    end = time.monotonic() + limit
    while True:
        answer = ask_once()
        if wanted(answer):
            return answer
        assert time.monotonic() < end, (answer.status, answer.body[:500])
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------------------
# Content


def test_the_whole_hostile_store_is_shown_as_text(hostile, hostile_console):
    routes, faults = walk(hostile_console, ("/", "/messages?topic=Texts", "/messages?topic=Bodies"), each=30, limit=250)
    assert not faults, "\n".join(faults[:20])
    assert len(routes) >= 8, routes


def test_every_hostile_message_has_its_page_and_its_json(hostile, hostile_console):
    link = connection(hostile_console.host, hostile_console.port)
    for name, where in hostile.offsets.items():
        for target in (f"/message/{where}", f"/api/message/{where}"):
            answer = ask(link, target)
            assert answer.status == 200, (name, target, answer.status, answer.body[:300])
            assert not answer_faults(answer), (name, target, answer_faults(answer))
            assert len(answer.body) < 4 << 20, f"{name}: {len(answer.body)} bytes"
    link.close()


def test_every_hostile_topic_has_its_queue(hostile, hostile_console):
    overview = hostile_console.get("/")
    shown = parse(overview.text)
    for topic in hostile.topics:
        if not hostile_store.fits_directory(topic):
            continue
        answer = hostile_console.get(f"/queues/{quoted(topic)}/0")
        assert answer.status == 200, (topic, answer.status, answer.body[:300])
        assert not answer_faults(answer), topic
        found = hostile_console.get("/api/messages?" + urlencode({"topic": topic}))
        assert found.status == 200 and topic in {row["topic"] for row in found.json()["messages"]}, topic
        # What can be seen is shown as it is.
        if topic.isprintable() and len(topic) < 60:
            assert topic in shown.text, topic


@pytest.mark.parametrize("kind", ["key", "id"])
def test_hostile_keys_find_their_messages(hostile, hostile_console, kind):
    texts = (*hostile_store.SCRIPTS, *hostile_store.INVISIBLE, *hostile_store.MEANINGFUL, *hostile_store.WITH_SLASH)
    for number, text in enumerate(texts):
        # Spaces separate keys: the one that counts is the number's.
        query = {"topic": "Texts", "key": f"text-{number}"} if kind == "key" else {"topic": "Texts", "id": text}
        answer = hostile_console.get("/messages?" + urlencode(query, errors="surrogatepass"))
        assert answer.status in (200, 302, 303, 307, 404), (text, answer.status)
        if answer.status in (200, 404):
            assert not answer_faults(answer), text
        if kind == "key":
            assert str(hostile.offsets[f"text-{number}"]) in answer.text.replace(",", "").replace(" ", ""), text


def test_no_body_is_changed_by_a_download(hostile, hostile_console):
    for name, (stored, flags) in hostile_store.BODIES.items():
        where = hostile.offsets[name]
        page = parse(hostile_console.get(f"/message/{where}").text)
        downloads = []
        for target in dict.fromkeys(page.links):
            if re.search(r"raw|download|body", target) and target.startswith(f"/message/{where}"):
                answer = hostile_console.get(target)
                if (answer.header("content-type") or "").startswith("application/octet-stream"):
                    downloads.append(answer)
        assert downloads, f"{name}: nothing to download among {page.links}"
        for answer in downloads:
            assert not answer_faults(answer)
            disposition = answer.header("content-disposition")
            assert re.fullmatch(r'attachment; *filename="?[A-Za-z0-9._-]+"?', disposition), disposition
        if not flags:
            assert stored in [answer.body for answer in downloads], name


def test_huge_bodies_cost_a_bounded_amount(hostile, hostile_console):
    names = ("body-huge-html", "body-huge-line", "body-bomb", "body-json-deep")
    failures: list[str] = []

    def look(name: str, times: int) -> None:
        link = connection(hostile_console.host, hostile_console.port)
        for _ in range(times):
            answer = ask(link, f"/message/{hostile.offsets[name]}")
            if answer.status != 200 or len(answer.body) > 2 << 20:
                failures.append(f"{name}: {answer.status}, {len(answer.body)} bytes")
            ask(link, "/messages?topic=Bodies")
        link.close()

    def peak(times: int) -> int:
        with MemoryWatch(hostile_console) as memory:
            threads = [threading.Thread(target=look, args=(name, times)) for name in names * 4]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()
        return max(memory.samples)

    before = hostile_console.anonymous_memory()
    peaks = [peak(3), peak(3)]
    after = hostile_console.anonymous_memory()
    measured = [number >> 20 for number in (before, *peaks, after)]
    assert not failures, failures
    # How many answers are made at the same time is chance.
    assert max(peaks) - before < 400 << 20, measured
    # What large bodies took went back to the system: nothing piles up, whatever was asked for at the same time.
    assert after - before < 60 << 20, measured


def test_consumer_groups_are_text(hostile_console):
    answer = hostile_console.get("/consumers")
    assert answer.status == 200 and not answer_faults(answer)
    text = parse(answer.text).text
    for group in hostile_store.GROUPS:
        if group and group.isprintable():
            assert group in text, group


def test_the_metrics_of_hostile_names_can_be_parsed(hostile_console):
    parser = pytest.importorskip("prometheus_client.parser")
    answer = hostile_console.get("/metrics")
    assert answer.status == 200
    families = list(parser.text_string_to_metric_families(answer.text))
    topics = {sample.labels.get("topic") for family in families for sample in family.samples}
    assert "<img src=x onerror=window.pwned=1>" in topics


def test_a_verify_of_the_hostile_store_shows_its_findings_as_text(hostile, hostile_console):
    started = hostile_console.get(
        "/verify/start", method="POST", body=b"",
        headers={"Origin": hostile_console.url, "Sec-Fetch-Site": "same-origin",
                 "Content-Type": "application/x-www-form-urlencoded"},
    )  # fmt: skip
    assert started.status in (200, 202, 302, 303), started.body[:300]
    answer = eventually(lambda: hostile_console.get("/verify"), lambda answer: "missing_unit" in answer.text)
    assert not answer_faults(answer)
    api = hostile_console.get("/api/verify")
    assert api.status == 200 and not answer_faults(api)


def test_the_log_of_the_server_stays_printable(hostile, hostile_console):
    for text in (*hostile_store.INVISIBLE, *hostile_store.SCRIPTS):
        hostile_console.get("/" + quoted(text))
        hostile_console.get(
            "/messages?topic=" + quoted(text), headers={"User-Agent": "\x1b[31m\x9b", "Referer": "\x1b]0;x\x07"}
        )
    time.sleep(0.2)
    odd = [line for line in hostile_console.log if invisible(line)]
    assert not odd, odd[:3]


# ---------------------------------------------------------------------------------------------------------------------
# The same in a browser


def hostile_targets(hostile) -> list[tuple[str, str]]:
    names = (
        "body-html", "body-huge-html", "body-huge-line", "body-json-script", "body-json-surrogate", "body-control",
        "body-not-compressed", "number-born-max", "text-0", "text-1", "text-2", "text-7", "many-properties", "long-property",
    )  # fmt: skip
    targets = [(name, f"/message/{hostile.offsets[name]}") for name in names]
    targets += [(f"topic {topic}", f"/queues/{quoted(topic)}/0") for topic in hostile_store.SCRIPTS[:5]]
    targets += [
        ("overview", "/"),
        ("messages", "/messages?topic=Texts"),
        ("bodies", "/messages?topic=Bodies"),
        ("consumers", "/consumers"),
        ("pending", "/pending"),
        ("verify", "/verify"),
    ]
    return targets


def test_no_script_of_the_store_runs_in_a_browser(hostile, hostile_console, open_page):
    watched = open_page(hostile_console)
    page = watched.page
    for name, target in hostile_targets(hostile):
        watched.open(target)
        assert page.evaluate("window.pwned === undefined"), f"{name}: a script ran"
        # An element that the store made: none has these attributes in our own pages.
        assert (
            page.locator("main [onerror], main [onload], main iframe, main script, main style, main [style]").count()
            == 0
        ), name
        assert page.title() != "stolen"
        watched.check()
    watched.open(f"/message/{hostile.offsets['body-html']}")
    watched.shoot("hostile-body-light")
    watched.open("/")
    watched.shoot("hostile-overview-light")


def test_hostile_pages_fit_a_phone(hostile, hostile_console, open_page):
    watched = open_page(hostile_console, viewport={"width": 390, "height": 844}, color_scheme="dark")
    for name, target in hostile_targets(hostile):
        watched.open(target)
        width = watched.page.evaluate("document.scrollingElement.scrollWidth")
        assert width <= 390, f"{name}: {width} px wide"
    watched.open("/messages?topic=Texts")
    watched.shoot("hostile-messages-phone-dark")


def test_text_of_the_store_in_a_form_is_given_back_and_runs_nowhere(hostile, hostile_console, open_page):
    watched = open_page(hostile_console)
    for text in (*hostile_store.SCRIPTS, hostile_store.INVISIBLE[0], hostile_store.WITH_SLASH[0]):
        watched.open("/messages?" + urlencode({"topic": text, "key": text}), status=None)
        assert watched.page.locator("input[name=key]").first.input_value() == text
    watched.expected = []
    watched.complaints = [line for line in watched.complaints if "404" not in line and "400" not in line]


# ---------------------------------------------------------------------------------------------------------------------
# Stores that change


@pytest.fixture
def living(tmp_path):
    """A small store with 300 messages and keys, closed."""
    root = tmp_path / "living"
    with MessageStore.open(root, config=SMALL) as store:
        put(store, 0, 300)
    return root


def put(store, first, count, topic="Orders"):
    numbers = range(first, first + count)
    store.put_messages(
        [Message(topic, b"body %d " % n + b"x" * 100, keys=[f"K{n}", "all"], tags="EU") for n in numbers],
        [n % 4 for n in numbers],
    )


def has(number):
    return lambda answer: answer.status == 200 and f"body {number} " in answer.text


def key_page(number, topic="Orders"):
    return "/messages?" + urlencode({"topic": topic, "key": f"K{number}"})


def test_what_is_put_meanwhile_is_found(living, start_console):
    server = start_console(living)
    assert has(7)(server.get(key_page(7)))
    with MessageStore.open(living, config=SMALL) as store:
        put(store, 300, 500)
        eventually(lambda: server.get(key_page(799)), has(799))
        put(store, 0, 3, topic="Later")
        eventually(lambda: server.get("/"), lambda answer: "Later" in answer.text)
        eventually(lambda: server.get(key_page(2, "Later")), has(2))
    eventually(lambda: server.get(key_page(799)), has(799))
    _, faults = walk(server, limit=60)
    assert not faults, faults[:5]


def test_a_rebuild_underneath(living, start_console):
    server = start_console(living)
    for target in ("/", key_page(5), "/index", "/queues/Orders/1"):
        assert server.get(target).status == 200
    done = threading.Event()
    bad: list[str] = []

    def look():
        link = connection(server.host, server.port)
        number = 0
        while not done.is_set():
            number = (number + 1) % 300
            for target in (key_page(number), "/", "/index", "/queues/Orders/1"):
                answer = ask(link, target)
                # Between the two renames there is no index, and a page may say so.
                if answer.status not in (200, 503) or answer_faults(answer):
                    bad.append(f"{target}: {answer.status} {answer.body[:200]!r}")
        link.close()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(3):
            shutil.rmtree(living / "index")
            report = rebuild(living, config=SMALL)
            assert report.records == 300
    finally:
        done.set()
        for looker in lookers:
            looker.join(240)
    assert not bad, bad[:5]
    for number in (0, 150, 299):
        eventually(lambda number=number: server.get(key_page(number)), has(number))


def test_the_index_goes(living, start_console):
    server = start_console(living)
    assert has(3)(server.get(key_page(3)))
    shutil.rmtree(living / "index")
    for target in (key_page(3), "/", "/index", "/messages?topic=Orders", "/queues/Orders/0", "/verify"):
        answer = eventually(lambda target=target: server.get(target), lambda answer: answer.status in (200, 503))
        assert not answer_faults(answer), target
    eventually(lambda: server.get("/"), lambda answer: re.search(r"no index", answer.text))


def test_old_segments_go(living, start_console):
    server = start_console(living)
    assert server.get("/message/0").status == 200
    oldest = min((living / "commitlog").iterdir())
    oldest.unlink()
    answer = eventually(lambda: server.get("/message/0"), lambda answer: answer.status != 200)
    assert answer.status in (404, 410, 503) and not answer_faults(answer)
    for target in ("/", key_page(0), "/messages?topic=Orders", "/queues/Orders/0", "/index", "/consumers", "/pending"):
        answer = eventually(lambda target=target: server.get(target), lambda answer: answer.status == 200)
        assert not answer_faults(answer), target
    assert "body 0 " not in server.get(key_page(0)).text
    eventually(lambda: server.get(key_page(299)), has(299))


SOME_TARGETS = (
    "/", "/messages", "/messages?topic=Orders&key=K5", "/messages?topic=Orders", "/message/0", "/queues/Orders/0", "/index",
    "/consumers", "/pending", "/verify", "/api/overview", "/api/messages?topic=Orders&key=K5", "/api/message/0", "/metrics",
    "/rabbitmq",
)  # fmt: skip


def check_unavailable(server, root):
    """Each page says that the store is not there, in words, as 503; those that need no store may go on."""
    unavailable = 0
    for target in SOME_TARGETS:
        answer = server.get(target)
        assert answer.status in (200, 404, 503), (target, answer.status, answer.body[:300])
        assert not answer_faults(answer), (target, answer_faults(answer))
        if answer.status == 503:
            unavailable += 1
            if "html" in answer.header("content-type"):
                assert len(parse(answer.text).text.split()) > 8, "no sentence"
            elif "json" in answer.header("content-type"):
                assert answer.json()
    assert unavailable >= 8, "pages show a store that is not there"
    assert server.get("/healthz").status in (200, 503)


def test_the_store_is_moved_away_and_comes_back(living, start_console):
    server = start_console(living)
    assert has(5)(server.get(key_page(5)))
    away = living.with_name("away")
    living.rename(away)
    check_unavailable(server, living)
    away.rename(living)
    eventually(lambda: server.get(key_page(5)), has(5))
    assert server.get("/").status == 200


def test_the_store_is_deleted_while_many_ask(living, start_console):
    server = start_console(living)
    done = threading.Event()
    bad: list[str] = []

    def look(number):
        link = connection(server.host, server.port)
        while not done.is_set():
            for target in SOME_TARGETS[number % 3 :: 3]:
                answer = ask(link, target)
                if answer.status not in (200, 404, 503) or answer_faults(answer):
                    bad.append(f"{target}: {answer.status} {answer.body[:300]!r} {answer_faults(answer)}")
        link.close()

    lookers = [threading.Thread(target=look, args=(number,)) for number in range(6)]
    for looker in lookers:
        looker.start()
    try:
        time.sleep(0.5)
        shutil.rmtree(living)
        time.sleep(0.5)
        check_unavailable(server, living)
        with MessageStore.open(living, config=SMALL) as store:
            put(store, 1000, 50)
        time.sleep(1)
    finally:
        done.set()
        for looker in lookers:
            looker.join(240)
    assert not bad, bad[:5]
    # Another store at the same place is another store.
    eventually(lambda: server.get(key_page(1007)), has(1007))
    assert "body 5 " not in server.get(key_page(5)).text
    deleted = [os.readlink(f"/proc/{server.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.process.pid}/fd")
               if os.path.lexists(f"/proc/{server.process.pid}/fd/{fd}")]  # fmt: skip
    assert not [path for path in deleted if path.endswith("(deleted)")], "files of the old store are still open"


def test_another_geometry_at_the_same_place(living, start_console):
    server = start_console(living)
    assert server.get("/").status == 200
    away = living.with_name("away")
    living.rename(away)
    other = StoreConfig(mapped_file_size_commit_log=131072, mapped_file_size_consume_queue=4000, max_hash_slot_num=10,
                        max_index_num=40, clean_resource_interval=0)  # fmt: skip
    with MessageStore.open(living, config=other) as store:
        put(store, 5000, 100)
    eventually(lambda: server.get(key_page(5042)), has(5042))
    _, faults = walk(server, limit=60)
    assert not faults, faults[:5]


def test_a_store_that_is_looked_at_while_it_is_made(living, start_console):
    """Its folders are there before its files, which then do not have the sizes that were assumed."""
    young = living.with_name("young")
    for folder in ("commitlog", "consumequeue", "index"):
        (young / folder).mkdir(parents=True)
    server = start_console(young)
    for target in ("/", key_page(5), "/messages?topic=Orders", "/index", "/queues/Orders/0"):
        assert server.get(target).status in (200, 404, 503)
    for folder in ("commitlog", "consumequeue", "index"):
        for path in sorted((living / folder).iterdir()):
            path.rename(young / folder / path.name)
            server.get("/")
            server.get(key_page(5))
    eventually(lambda: server.get(key_page(5)), has(5))
    _, faults = walk(server, limit=60)
    assert not faults, faults[:5]


def break_to_file(root):
    shutil.rmtree(root)
    root.write_bytes(b"no store")


def break_to_empty(root):
    shutil.rmtree(root)
    root.mkdir()


def break_log_names(root):
    log = root / "commitlog"
    log.rename(root / "kept")
    log.mkdir()
    (log / "<img src=x onerror=window.pwned=1>").write_bytes(b"x" * 65536)


def break_log_sizes(root):
    # By rename: shortening a mapped file ends any process that reads it, which docs/mmap.md says.
    for path in (root / "commitlog").iterdir():
        shorter = path.with_name("shorter")
        shorter.write_bytes(path.read_bytes()[:1000])
        shorter.rename(path)


def break_log_folder(root):
    shutil.rmtree(root / "commitlog")


@pytest.mark.parametrize("damage", [break_to_file, break_to_empty, break_log_names, break_log_sizes, break_log_folder])
def test_a_store_that_stops_being_one(living, start_console, damage):
    server = start_console(living)
    assert server.get("/").status == 200
    kept = shutil.copytree(living, living.with_name("kept"))
    damage(living)
    time.sleep(1)
    for target in SOME_TARGETS:
        answer = server.get(target)
        assert answer.status in (200, 404, 503), (target, answer.status, answer.body[:300])
        assert not answer_faults(answer), (target, answer_faults(answer))
    # An empty directory, or a log without files, is an empty store to a reader; none may show what was there.
    assert not has(5)(server.get(key_page(5))) or damage is break_log_sizes
    if living.is_dir():
        shutil.rmtree(living)
    else:
        living.unlink()
    kept.rename(living)
    eventually(lambda: server.get(key_page(5)), has(5))


@pytest.mark.parametrize("stride", [1321, pytest.param(331, marks=pytest.mark.slow)])
def test_damage_in_records_is_shown_and_breaks_nothing(living, start_console, stride):
    server = start_console(living)
    first = server.get("/message/0")
    assert first.status == 200
    size = oracle.decode_record((living / "commitlog" / f"{0:020d}").read_bytes()).size
    with open(living / "commitlog" / f"{0:020d}", "r+b") as file:
        for pos in range(size + 4, 60000, 997):
            file.seek(pos)
            file.write(os.urandom(7))
    with open(living / "consumequeue" / "Orders" / "0" / f"{0:020d}", "r+b") as file:
        file.write(os.urandom(400))
    for path in (living / "index").iterdir():
        with open(path, "r+b") as file:
            file.seek(40)
            file.write(os.urandom(400 + 2000))
    (living / "config").mkdir(exist_ok=True)
    (living / "config" / "consumerOffset.json").write_bytes(b'{"offsetTable": {"<img src=x onerror=window.pwned=1>": ')
    (living / "checkpoint").write_bytes(os.urandom(4096))
    where = range(0, 60000, stride)
    targets = [f"/message/{at}" for at in where] + [f"/api/message/{at}" for at in where]
    targets += [key_page(n) for n in range(0, 300, 17)] + list(SOME_TARGETS)
    targets += [f"/queues/Orders/{n}" for n in range(4)] + ["/messages?topic=Orders&key=all"]
    for target in targets:
        answer = server.get(target)
        assert answer.status in (200, 404, 503), (target, answer.status, answer.body[:300])
        assert not answer_faults(answer), (target, answer_faults(answer))
    # Each index file has its page, with chains that run wild.
    for link in parse(server.get("/index").text).links:
        if link.startswith("/index/"):
            answer = server.get(link)
            assert answer.status in (200, 404, 503), (link, answer.status, answer.body[:300])


def test_an_html_entity_is_shown_as_it_was_written(hostile, hostile_console):
    text = "&lt;img src=x onerror=window.pwned=1&gt;"
    answer = hostile_console.get("/")
    assert html.escape(text, quote=False) in answer.text or html.escape(text) in answer.text


def test_the_address_of_a_query_by_key(living, start_console):
    server = start_console(living)
    answer = server.get(message_query("K7"))
    assert answer.status == 200 and "body 7 " in answer.text
