"""The site of the documents in a real browser: at 1 280 pixels nothing that a terminal shows is cut.

Owns what only a browser can say of the pages; ci/site_check.py looks at their links.  The site is built once, into a
temporary directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1280
# A block that is wider inside than it is, by the pixels that it lacks; and a page that is wider than the window.
CUT = """() => [...document.querySelectorAll("pre, pre > code, .md-typeset__table, .md-content img")]
    .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
    .map(each => `${each.tagName} ${each.scrollWidth - each.clientWidth}: ${each.textContent.slice(0, 60)}`)
    .concat(document.documentElement.scrollWidth > window.innerWidth ? ["the page itself"] : [])"""


def unavailable(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (required when CI=true)")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        unavailable(f"playwright is not installed: {error}")
    names = (os.environ.get("RMQSTORE_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, filter(None, names))), None)
    if path is None:
        unavailable("there is no Chromium; bash ci/browser.sh installs it")
    arguments = ["--disable-dev-shm-usage"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=300,
    )  # fmt: skip
    return folder


@pytest.mark.timeout(600)
def test_no_block_is_cut_at_1280_pixels(site, browser):
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    cut, blocks = {}, 0
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        blocks += page.locator("pre > code").count()
        found = page.evaluate(CUT)
        if found:
            cut[path.relative_to(site).as_posix()] = found
    # A block that cannot wrap is found.
    page.set_content("<pre style='width: 300px; overflow: auto'><code>" + "x" * 200 + "</code></pre>")
    assert page.evaluate(CUT)
    page.close()
    assert blocks > 100
    assert cut == {}
