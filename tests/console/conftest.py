"""Servers and the browser that the tests of the console share.

Owns starting and stopping them.  The console runs in a process of its own over the shared golden store, whose files are
compared at the end of the session: a console that writes makes the run fail.  A page records what it complains of and asks
for, and a test fails at its end if there was anything; screenshots go to build/ci/screenshots.  Where Chromium, Playwright
or the web libraries are missing a test is skipped with the reason; with CI=true it fails, since they must be there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import golden
import hostile_store
import pytest
from console_server import ConsoleServer

ROOT = Path(__file__).resolve().parent.parent.parent
SCREENSHOTS = ROOT / "build" / "ci" / "screenshots"
RABBITMQ_CASE = "13-clean-fanout-refcount"

# Runs in every page before anything of it: a violation of the policy is reported to the page only.
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    event => window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`));
"""


def pytest_collection_modifyitems(items):
    """Mark what takes the browser, so that a run without one can leave it out."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


def unavailable(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (required when CI=true)")
    pytest.skip(reason)


def need_web() -> None:
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        unavailable(f"the extra console is not installed: {error}")


def chromium() -> str | None:
    names = [os.environ["RMQSTORE_CHROMIUM"]] if os.environ.get("RMQSTORE_CHROMIUM") else [
        "chromium", "chromium-browser", "google-chrome"
    ]  # fmt: skip
    return next((found for found in map(shutil.which, names) if found), None)


@pytest.fixture(scope="session")
def rabbitmq_vhost(tmp_path_factory):
    import golden_rabbitmq

    return golden_rabbitmq.unpack(RABBITMQ_CASE, tmp_path_factory.mktemp("console-rabbitmq"))


@pytest.fixture(scope="session")
def console(broker, rabbitmq_vhost):
    """The console over the store of a real broker and the vhost of a real node."""
    need_web()
    before = golden.tree(rabbitmq_vhost)
    with ConsoleServer(
        broker, "-o", "messageDelayLevel=1s 2s 30m 1h", "--rabbitmq", rabbitmq_vhost
    ) as server:  # fmt: skip
        yield server
        server.check()
    assert golden.tree(rabbitmq_vhost) == before, "the console wrote into a vhost"


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """The store of `hostile_store`; do not write into it."""
    store = hostile_store.make(tmp_path_factory.mktemp("hostile") / "store")
    before = golden.tree(store.root)
    yield store
    assert golden.tree(store.root) == before, "the console wrote into its store"


@pytest.fixture(scope="session")
def hostile_console(hostile):
    """The console over a store whose every text is an attack."""
    need_web()
    with ConsoleServer(hostile.root) as server:
        yield server
        server.check()


@pytest.fixture
def start_console():
    """A function that starts a console with the given arguments; it ends with the test."""
    need_web()
    servers: list[ConsoleServer] = []

    def start(*arguments: Any, **options: Any) -> ConsoleServer:
        servers.append(ConsoleServer(*arguments, **options))
        servers[-1].ends_with_test = True
        return servers[-1]

    yield start
    try:
        for server in servers:
            server.check()
    finally:
        for server in servers:
            server.stop()


# Of a module and not of the session: Playwright keeps an event loop in this thread as long as it runs, which other tests' loops
# would meet.
@pytest.fixture(scope="module")
def browser():
    """The real browser, or a skip."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        unavailable(f"playwright is not installed: {error}")
    path = chromium()
    if path is None:
        unavailable("there is no Chromium; bash ci/browser.sh installs it")
    # Root may not use Chromium's sandbox; a container has little shared memory.
    arguments = ["--disable-dev-shm-usage"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=arguments)
        except Error as error:
            unavailable(f"{path} does not start: {error.message.splitlines()[0]}")
        yield started
        started.close()


class Watched:
    """A page of the browser and what it complained of.

    Attributes
    ----------
    page : playwright.sync_api.Page
    complaints : list of str
        Errors and warnings of the browser's console, uncaught errors, dialogs, requests that left the host or failed.
    expected : list of str
        Regular expressions of complaints that the test is about; each must occur.
    """

    def __init__(self, context: Any, server: ConsoleServer):
        self.server = server
        self.context = context
        self.complaints: list[str] = []
        self.expected: list[str] = []
        context.add_init_script(_WATCH)
        context.on("console", self._console)
        context.on("weberror", lambda error: self.complaints.append(f"uncaught: {error.error}"))
        context.on("dialog", self._dialog)
        context.on("request", self._request)
        context.on("requestfailed", self._failed)
        context.on("page", lambda page: None)
        self.page = context.new_page()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog {dialog.type}: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("http", "data", "blob") or (
            parts.scheme == "http" and (parts.hostname, parts.port) != (self.server.host, self.server.port)
        ):
            self.complaints.append(f"a request left the host: {request.url}")

    def _failed(self, request: Any) -> None:
        # A page that is left ends its own streams; a download is no page.
        if request.failure != "net::ERR_ABORTED":
            self.complaints.append(f"a request failed: {request.url}: {request.failure}")

    def open(self, target: str, status: int | None = 200) -> Any:
        """Go to a target of the server; return Playwright's response."""
        response = self.page.goto(self.server.url + target, wait_until="load")
        assert response is not None
        assert status is None or response.status == status, f"{target}: {response.status}: {response.text()[:300]}"
        return response

    def check(self) -> None:
        """Fail if the page complained of anything that was not expected, or ran a script of the store."""
        violations: list[str] = []
        for page in self.context.pages:
            violations += page.evaluate("window.violations || []")
            assert page.evaluate("window.pwned === undefined"), f"a script of the store ran in {page.url}"
        left = [
            text
            for text in self.complaints + violations
            if not any(re.search(pattern, text) for pattern in self.expected)
        ]
        assert not left, "\n".join(left)
        for pattern in self.expected:
            assert any(re.search(pattern, text) for text in self.complaints + violations), f"nothing was {pattern}"

    def shoot(self, name: str) -> None:
        """Keep a picture of the whole page as build/ci/screenshots/NAME.png."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@pytest.fixture(scope="module")
def windows(browser) -> Iterator[dict[Any, Watched]]:
    """Contexts by server and options: one that is there already shows a page for a third of what a new one costs."""
    kept: dict[Any, Watched] = {}
    yield kept
    for watched in kept.values():
        watched.context.close()


@pytest.fixture
def open_page(browser, windows) -> Iterator[Any]:
    """A function `open_page(server, **context options) -> Watched`; what a page complained of fails the test at its end.

    A context that had nothing to complain of is used again, with its page, unless its server ends with the test.
    """
    opened: dict[Any, Watched] = {}

    def opener(server: ConsoleServer, **options: Any) -> Watched:
        key = (server.url, repr(sorted(options.items())))
        if key not in opened:
            opened[key] = windows.pop(key, None) or Watched(browser.new_context(**options), server)
            opened[key].context.set_default_timeout(20_000)
        return opened[key]

    yield opener
    try:
        for key, watched in list(opened.items()):
            watched.check()
            if not watched.server.ends_with_test and not watched.expected and watched.context.pages == [watched.page]:
                watched.complaints.clear()
                windows[key] = opened.pop(key)
    finally:
        for watched in opened.values():
            watched.context.close()
