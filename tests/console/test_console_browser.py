"""The console in a real browser: every page, light and dark, wide and on a phone, by keyboard, without JavaScript.

Owns what only a browser can say: that nothing is asked of another host, that the content security policy is never violated,
that axe-core finds no serious fault, that the pages fit and can be used by keys alone.  Pictures go to build/ci/screenshots.
"""

from __future__ import annotations

import json
import re
import shutil
from urllib.parse import urlencode

import pytest

from rmqstore import MessageStore

KEY = {"topic": "Orders", "key": "ORD-100000"}
#: Name of the picture, target, words that the page must show.
PAGES = (
    ("overview", "/", ("Orders", "Payments")),
    ("messages-empty", "/messages", ("topic", "key")),
    ("messages-by-key", "/messages?" + urlencode(KEY), ("1348", "894", "484")),
    ("messages-nothing", "/messages?topic=Orders&key=ORD-absent", ("No message of topic Orders",)),
    ("messages-by-topic", "/messages?topic=Orders&max_num=10", ("ORD-",)),
    ("message", "/message/484", ("ORD-100000", "paid", "410")),
    ("queue", "/queues/Orders/0?max_num=10", ("Orders", "ORD-")),
    ("index", "/index", ("20261121053239614", "7999")),
    ("index-file", "/index/20261121053239614", ("7999", "952")),
    ("consumers", "/consumers", ("G-billing", "CID_RMQ_SYS_TRANS")),
    ("overview-sorted", "/?sort=-messages", ("Orders", "10003")),
    ("queues", "/queues", ("Orders/0", "11013")),
    ("consumers-sorted", "/consumers?sort=-lag&groups=-age", ("G-billing",)),
    ("pending", "/pending", ("Reminders", "TIM-5")),
    ("settings-topics", "/settings", ("Orders", "SINGLE_TAG", "config/topics.json")),
    ("settings-groups", "/settings?what=subscription_groups&sort=-retryMaxTimes", ("G-billing", "G-retry")),
    ("settings-offsets", "/settings?what=consumer_offsets&name=billing", ("G-billing", "2499")),
    ("settings-pop", "/settings?what=pop_records", ("This directory contains none",)),
    ("verify", "/verify", ()),
    ("rabbitmq", "/rabbitmq", ()),
    ("not-found", "/nowhere", ()),
    ("no-message", "/message/5", ()),
)
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "phone-dark": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}, "has_touch": True},
}


def axe_script() -> str:
    try:
        from axe_playwright_python.base import AXE_FILE_PATH
    except ImportError as error:
        from conftest import unavailable

        unavailable(f"axe-playwright-python is not installed: {error}")
    return AXE_FILE_PATH.read_text(encoding="utf-8")


def serious(page) -> list[str]:
    """What axe-core finds that keeps somebody from using the page."""
    page.evaluate(axe_script())
    result = page.evaluate("axe.run(document, {preload: false, resultTypes: ['violations', 'incomplete']})")
    assert len(result["passes"]) > 5, "axe looked at nothing"
    found = []
    for violation in result["violations"]:
        if violation["impact"] in ("serious", "critical") or violation["id"] in (
            "region",
            "landmark-one-main",
            "heading-order",
        ):
            nodes = [node["html"][:200] + " " + (node.get("failureSummary") or "") for node in violation["nodes"][:3]]
            found.append(f"{violation['id']} ({violation['impact']}): {violation['help']}: {nodes}")
    return found


def sticking_out(page) -> list[str]:
    """Texts that are wider than the box which they stand in, and would lie over what is beside it."""
    return page.evaluate(
        """() => [...document.querySelectorAll('main dd, main dt, main td, main th, main li, main p, main div, main time')]
            .filter(e => getComputedStyle(e).overflowX === 'visible' && getComputedStyle(e).display !== 'inline'
                         && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
            .map(e => `<${e.tagName} ${e.className}> ${e.scrollWidth} > ${e.clientWidth}: ${e.innerText.slice(0, 60)}`)"""
    )


def broken_words(page) -> list[str]:
    """Words in tables that go over two lines, but for what comes from a store: names, keys, bodies and paths."""
    return page.evaluate(
        """() => { const found = [];
            const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
            for (let node; (node = walker.nextNode());) {
                const cell = node.parentElement.closest('td, th');
                if (!cell || node.parentElement.closest('bdi, code, details:not([open])')) continue;
                for (const word of node.data.matchAll(/\\S+/g)) {
                    const range = document.createRange();
                    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
                    const tops = new Set([...range.getClientRects()].filter(r => r.width > 0).map(r => Math.round(r.top)));
                    if (tops.size > 1) found.push(word[0]);
                } }
            return found; }"""
    )


def tables_to_be_moved(page) -> list[str]:
    """Tables that do not fit beside each other with the page: a finger would have to move them."""
    return page.evaluate(
        """() => [...document.querySelectorAll('main .scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
            .map(e => `${e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')}: ${e.scrollWidth}`)"""
    )


def cells_without_a_label(page) -> list[str]:
    """Cells that say on a phone what they are by nothing: the heads of their columns are not shown there."""
    return page.evaluate(
        """() => [...document.querySelectorAll('main table tbody td')]
            .filter(e => e.innerText.trim() && !e.dataset.label).map(e => e.outerHTML.slice(0, 120))"""
    )


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("name", "target", "words"), PAGES, ids=[page[0] for page in PAGES])
def test_a_page(console, open_page, name, target, words, look):
    watched = open_page(console, **LOOKS[look])
    page = watched.page
    missing = name in ("not-found", "no-message")
    watched.open(target, status=404 if missing else 200)
    if missing:
        # The browser's console notes such a status as an error.
        watched.expected.append(r"status of 404")
    text = page.locator("main").inner_text()
    # Numbers may have separators.
    plain = re.sub(r"(?<=\d)[,\u202f\u00a0 '](?=\d{3})", "", text)
    for word in words:
        assert word.lower() in plain.lower() or page.locator(f"main [name={word}]").count(), word
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang")
    assert page.locator("main").count() == 1
    # From every page, an error's too, there is a way back.
    assert page.locator("header a[href='/']").count() >= 1
    assert not serious(page)
    width = page.viewport_size["width"]
    wide = page.evaluate("document.scrollingElement.scrollWidth")
    assert wide <= width, f"the page is {wide} px wide on {width} px"
    assert not sticking_out(page)
    # What is folded up is looked at too.
    page.evaluate("document.querySelectorAll('main details').forEach(each => each.open = true)")
    assert not broken_words(page)
    if look == "phone-dark":
        assert not tables_to_be_moved(page)
        assert not cells_without_a_label(page)
    assert not sticking_out(page)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('main details').forEach(each => each.open = false)")
    watched.shoot(f"{name}-{look}")


def test_rows_on_a_phone_are_short_cards(console, open_page):
    watched = open_page(console, **LOOKS["phone-dark"])
    page = watched.page
    watched.open("/queues")
    heights = page.evaluate(
        "[...document.querySelectorAll('main tbody tr')].map(e => [e.getBoundingClientRect().height, e.innerText])"
    )
    # A name of one line, and seven figures two beside each other; the time takes a line of its own.
    short = [height for height, text in heights if "Long_name" not in text]
    assert len(short) == 24 and max(short) < 200, heights
    assert page.evaluate("document.scrollingElement.scrollHeight") < 7000


def test_a_list_is_sorted_by_a_click_on_its_head(console, open_page):
    for options in ({"java_script_enabled": False}, {**LOOKS["phone-dark"], "java_script_enabled": False}):
        watched = open_page(console, **options)
        page = watched.page
        watched.open("/queues")
        for wanted in ("descending", "ascending"):
            with page.expect_navigation():
                page.locator("main thead a", has_text="Messages").click()
            assert page.locator("main thead th[aria-sort]").get_attribute("aria-sort") == wanted
            numbers = [int(text) for text in page.locator("main tbody td[data-label=Messages]").all_inner_texts()]
            assert len(numbers) == 28 and numbers == sorted(numbers, reverse=wanted == "descending")


def luminance(color: str) -> float:
    numbers = [float(number) for number in re.findall(r"[\d.]+", color)[:3]]
    return sum(numbers) / 3


def test_dark_is_dark_and_light_is_light(console, open_page):
    found = {}
    for scheme in ("light", "dark"):
        watched = open_page(console, color_scheme=scheme)
        watched.open("/")
        found[scheme] = watched.page.evaluate(
            """() => { for (const e of [document.body, document.documentElement]) {
                 const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } return 'rgb(255,255,255)' }"""
        )
    assert luminance(found["dark"]) < 80 < 180 < luminance(found["light"]), found


def test_every_page_fits_a_small_phone_and_large_type(console, open_page):
    # 320 px is what WCAG 1.4.10 asks for: a page of 1280 px at 400 %.
    watched = open_page(console, viewport={"width": 320, "height": 640})
    for name, target, _ in PAGES:
        watched.open(target, status=None)
        wide = watched.page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= 320, f"{name} is {wide} px wide"
    watched.complaints = [line for line in watched.complaints if "status of 404" not in line]


# ---------------------------------------------------------------------------------------------------------------------
# Keys alone


def focused(page):
    return page.evaluate(
        """() => { const e = document.activeElement; const s = getComputedStyle(e);
            return {tag: e.tagName,
            text: (e.innerText || e.value || e.name || '').trim().slice(0, 60), href: e.getAttribute('href'),
                    name: e.getAttribute('name'), id: e.id,
                    visible: (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0) || s.boxShadow !== 'none',
                    box: e.getBoundingClientRect().toJSON()}; }"""
    )


def test_the_first_key_leads_past_the_navigation(console, open_page):
    watched = open_page(console)
    watched.open("/")
    page = watched.page
    page.keyboard.press("Tab")
    first = focused(page)
    assert first["tag"] == "A" and (first["href"] or "").startswith("#"), first
    assert first["box"]["width"] > 10 and first["box"]["x"] >= 0 and first["box"]["y"] >= 0, (
        "the skip link stays hidden"
    )
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    inside = page.evaluate(
        "!!document.activeElement.closest('main, footer') || document.activeElement === document.body"
    )
    assert inside, focused(page)


def test_focus_is_always_seen_and_goes_everywhere(console, open_page):
    for target in ("/", "/messages?topic=Orders&max_num=5", "/message/484", "/verify"):
        watched = open_page(console)
        watched.open(target)
        page = watched.page
        wanted = page.evaluate(
            "[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex=\"0\"]')]"
            ".filter(e => !e.disabled && e.type !== 'hidden' && (e.checkVisibility ? e.checkVisibility() : true)).length"
        )
        seen = set()
        for _ in range(min(wanted + 10, 60)):
            page.keyboard.press("Tab")
            now = focused(page)
            if now["tag"] == "BODY":
                break
            assert now["visible"], f"{target}: nobody sees the focus on {now}"
            seen.add(json.dumps([now["tag"], now["href"], now["name"], now["text"], now["box"]["y"], now["box"]["x"]]))
        assert len(seen) >= min(wanted, 45) * 0.9, f"{target}: keys reach {len(seen)} of {wanted}"


def test_a_search_by_keys_alone(console, open_page):
    watched = open_page(console)
    watched.open("/messages")
    page = watched.page
    page.locator("[name=topic]").first.focus()
    page.keyboard.type("Orders")
    for _ in range(12):
        page.keyboard.press("Tab")
        if focused(page)["name"] == "key":
            break
    assert focused(page)["name"] == "key"
    page.keyboard.type("ORD-100000")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "key=ORD-100000" in page.url
    link = page.locator("main a[href*='/message/484']").first
    link.focus()
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "/message/484" in page.url
    assert "ORD-100000" in page.locator("main").inner_text()
    page.go_back()
    assert page.locator("[name=key]").first.input_value() == "ORD-100000"


def test_every_field_has_a_label(console, open_page):
    watched = open_page(console)
    for target in ("/messages", "/", "/verify", "/queues/Orders/0"):
        watched.open(target)
        unnamed = watched.page.evaluate(
            "[...document.querySelectorAll('input:not([type=hidden]):not([type=submit]), select, textarea')]"
            ".filter(e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label')).map(e => e.outerHTML)"
        )
        assert not unnamed, (target, unnamed)


# ---------------------------------------------------------------------------------------------------------------------
# What the pages say is true


def pages_of(page, limit: int = 60):
    """Go through the pages of a list by the link to the next one; yield the phy offsets that each shows."""
    for _ in range(limit):
        yield [
            int(found)
            for found in page.evaluate(
                "[...document.querySelectorAll('main a[href*=\"/message/\"]')]"
                ".map(a => (a.getAttribute('href').match(/\\/message\\/(\\d+)(?:$|[?#])/) || [])[1]).filter(Boolean)"
            )
        ]
        following = page.locator("main a[rel=next]")
        if following.count() == 0:
            return
        with page.expect_navigation():
            following.first.click()
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("script", [True, False], ids=["with-javascript", "without-javascript"])
def test_all_messages_of_a_key_beyond_the_broker_s_64(console, open_page, broker, script):
    with MessageStore.open(broker, read_only=True) as store:
        wanted = [message.phy_offset for message in store.query_message("Orders", "created", 100_000, index_type="T")]
    assert len(wanted) > 64
    wanted = wanted[:300]
    watched = open_page(console, java_script_enabled=script)
    page = watched.page
    watched.open("/messages?" + urlencode({"topic": "Orders", "key": "created", "type": "tag", "size": 50}))
    shown: list[int] = []
    for offsets in pages_of(page):
        shown += [offset for offset in dict.fromkeys(offsets) if offset not in shown]
        if len(shown) >= len(wanted):
            break
    assert shown[: len(wanted)] == wanted


def test_messages_of_a_time_range(console, open_page, broker):
    begin, end = 1795239159720, 1795239159731
    with MessageStore.open(broker, read_only=True) as store:
        wanted = [
            message.phy_offset
            for message in store.messages(0, 200_000)
            if message.topic == "Orders" and begin <= message.store_timestamp <= end
        ]
    assert 1 <= len(wanted) <= 50
    watched = open_page(console)
    watched.open("/messages?" + urlencode({"topic": "Orders", "begin": begin, "end": end}))
    shown = {offset for offsets in pages_of(watched.page) for offset in offsets}
    assert shown == set(wanted)


def test_the_bytes_of_a_record_are_those_of_the_file(console, open_page, broker):
    with MessageStore.open(broker, read_only=True) as store:
        message = store.message_at(484)
        size = message.size
    data = (broker / "commitlog" / f"{0:020d}").read_bytes()[484 : 484 + size]
    watched = open_page(console)
    watched.open("/message/484")
    text = re.sub(r"\s+", "", watched.page.locator("main").inner_text()).lower()
    # The first fields: length, magic, CRC, queue; each is a field of its own.
    for begin, length in ((0, 4), (4, 4), (8, 4), (12, 4), (20, 8), (28, 8)):
        assert data[begin : begin + length].hex() in text, (begin, length)
    for word in ("commitlog", "consumequeue", "indexentr"):
        assert word in text.replace("index entr", "indexentr"), word


def test_the_plot_of_chain_lengths_can_be_read_by_machines_and_people(console, open_page):
    watched = open_page(console)
    watched.open("/index/20261121053239614")
    plots = watched.page.locator("main svg")
    assert plots.count() >= 1
    plot = plots.first
    box = plot.bounding_box()
    assert box and box["width"] > 100 and box["height"] > 40
    named = plot.get_attribute("aria-label") or plot.get_attribute("aria-labelledby") or plot.locator("title").count()
    assert named or plot.get_attribute("aria-hidden") == "true", "the plot has no name"
    assert plot.locator("rect, path, polyline, line").count() >= 3
    # A table beside it says the same in numbers.
    assert watched.page.locator("main table").count() >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Verify


@pytest.fixture
def damaged(golden_copy):
    root = golden_copy("broker")
    with open(root / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(1000)
        file.write(b"X")
    shutil.rmtree(root / "consumequeue" / "Orders" / "1")
    return root


@pytest.mark.parametrize("script", [True, False], ids=["with-javascript", "without-javascript"])
def test_a_verify_is_started_and_shows_what_it_finds(damaged, start_console, open_page, script):
    server = start_console(damaged, "-o", "messageDelayLevel=1s 2s 30m 1h")
    watched = open_page(server, java_script_enabled=script, color_scheme="dark")
    page = watched.page
    watched.open("/verify")
    assert "bad_body_crc" not in page.locator("main").inner_text()
    with page.expect_navigation():
        page.locator("main form button").first.click()
    if script:
        # Live: nobody loads the page again.
        page.get_by_text("bad_body_crc").first.wait_for(timeout=60_000)
        page.get_by_text("missing_unit").first.wait_for(timeout=60_000)
        page.locator("#run[data-state=finished]").wait_for(timeout=60_000)
    else:
        for _ in range(100):
            if "missing_unit" in page.locator("main").inner_text():
                break
            page.wait_for_timeout(300)
            page.goto(server.url + "/verify")
    text = page.locator("main").inner_text()
    assert "bad_body_crc" in text and "missing_unit" in text
    watched.shoot(f"verify-findings-{'live' if script else 'plain'}-dark")
    if script:
        assert not serious(page)


# ---------------------------------------------------------------------------------------------------------------------
# The token


def test_a_browser_with_the_token_is_let_in_and_keeps_it_to_itself(broker, tmp_path, start_console, open_page):
    path = tmp_path / "token"
    path.write_text("correct-horse-battery-staple")
    server = start_console(broker, "--token-file", path)
    watched = open_page(server)
    page = watched.page
    response = watched.open("/messages", status=None)
    assert response.status == 401
    assert not serious(page)
    watched.shoot("token-light")
    watched.expected.append("status of 401")
    watched.open("/messages?token=correct-horse-battery-staple&topic=Orders")
    assert "token" not in page.url and "topic=Orders" in page.url
    # No script can read it.
    assert page.evaluate("document.cookie") == ""
    (cookie,) = watched.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and "correct-horse" not in cookie["value"]
    watched.open("/message/484")
    watched.open("/consumers")


def test_another_site_cannot_frame_or_post(console, open_page, start_console, broker):
    """A page of another origin (another port is one) that frames the console and posts to it."""
    import http.server
    import threading

    evil = (
        f"<!doctype html><html lang=en><title>x</title><body><iframe id=f src='{console.url}/'></iframe>"
        f"<form id=p method=post action='{console.url}/verify/start'></form></body>"
    ).encode()

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(evil)))
            self.end_headers()
            self.wfile.write(evil)

        def log_message(self, *args):
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        watched = open_page(console)
        page = watched.page
        page.goto(f"http://127.0.0.1:{site.server_address[1]}/")
        page.wait_for_timeout(500)
        framed = [frame for frame in page.frames if frame.url.startswith(console.url)]
        assert not [frame for frame in framed if "Orders" in (frame.content() or "")], (
            "the console let itself be framed"
        )
        with page.expect_navigation() as navigation:
            page.evaluate("document.getElementById('p').submit()")
        assert navigation.value.status == 403
        assert (
            page.evaluate(f"fetch('{console.url}/api/overview').then(r => r.text()).catch(e => 'refused')") is not None
        )
    finally:
        site.shutdown()
        site.server_close()
    assert console.get("/api/verify").json()["state"] in ("idle", "finished", "stopped")
    watched.complaints.clear()
    watched.page.goto(console.url + "/")
    watched.complaints.clear()
