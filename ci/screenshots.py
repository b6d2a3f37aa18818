"""Pictures of five pages of the web console for the documents, made by the browser that the tests use (ci/browser.sh).

Run from the root of a checkout with the extras console and browser, it writes docs/images/console-*.png, 1280 px wide and light:

    python ci/screenshots.py [--store STORE]

With `--check` it makes them elsewhere and compares: each picture of the documents must be there, as wide, as high and about as
heavy as the one that the pages give now, or be made again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "console")]

import golden  # noqa: E402
from console_server import ConsoleServer  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH = 1280
#: Bytes that a picture may have: they are in the repository, and on the first page that somebody sees.
LARGEST = 150_000
#: By picture: what is asked for; what must be on the page; which part of it the picture begins with; and its height in px.
PICTURES: dict[str, tuple[str, str, str, int]] = {
    "overview": ("/", "What came when", "header", 900),
    "topic": ("/queues?topic=Orders&sort=-messages", "In the log", "header", 520),
    "message": ("/message/484", "On disk: the record", "#record", 900),
    "groups": ("/consumers", "Lag by group", "header", 900),
    "index": ("/index/{index}", "Lengths of chains", "header", 1090),
}


def chromium() -> str:
    """The browser's program; the program ends where there is none."""
    named = os.environ.get("RMQSTORE_CHROMIUM")
    for name in [named] if named else ["chromium", "chromium-browser", "google-chrome"]:
        found = shutil.which(name)
        if found:
            return found
    sys.exit("screenshots.py: there is no Chromium; bash ci/browser.sh installs it")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height in the head of a PNG file."""
    head = path.read_bytes()[:24]
    if head[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{path} is no PNG file")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@contextmanager
def served(store: Path | None) -> Iterator[ConsoleServer]:
    """The console over a store that is called `store`, whatever this machine calls it."""
    with tempfile.TemporaryDirectory(prefix="rmqstore-screenshots-") as folder:
        place = Path(folder) / "store"
        if store is None:
            os.rename(golden.unpack(golden.SAMPLE, Path(folder) / "unpacked"), place)
        else:
            shutil.copytree(store, place)
        before = Path.cwd()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        os.chdir(folder)
        try:
            with ConsoleServer("store", "-o", "messageDelayLevel=1s 2s 30m 1h") as server:
                yield server
        finally:
            os.chdir(before)


def take(target: Path, store: Path | None = None) -> list[Path]:
    """Make the pictures in folder `target`; their paths."""
    from playwright.sync_api import sync_playwright

    target.mkdir(parents=True, exist_ok=True)
    made = []
    # Root may not use Chromium's sandbox; a container has little shared memory.
    arguments = ["--disable-dev-shm-usage"] + (["--no-sandbox"] if os.geteuid() == 0 else [])
    with served(store) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        context = browser.new_context(
            viewport={"width": WIDTH, "height": 900},
            color_scheme="light",
            device_scale_factor=1,
            reduced_motion="reduce",
        )
        page = context.new_page()
        # What arrives is known from the second look on.
        server.get("/")
        index = server.get("/api/index").json()["files"][0]["name"]
        for name, (address, words, begin, height) in PICTURES.items():
            page.goto(server.url + address.format(index=index), wait_until="load")
            if words not in page.locator("main").inner_text():
                sys.exit(f"screenshots.py: {address} does not show {words!r}")
            made.append(target / f"console-{name}.png")
            _shoot(page, made[-1], begin, height)
        browser.close()
    return made


def _shoot(page: Any, path: Path, begin: str, height: int) -> None:
    top = page.locator(begin).first.bounding_box()["y"] - (0 if begin == "header" else 16)
    end = page.evaluate("document.documentElement.scrollHeight")
    page.screenshot(
        path=path, full_page=True, clip={"x": 0, "y": top, "width": WIDTH, "height": min(height, end - top)}
    )


def faults(made: Path) -> list[str]:
    """What is wrong with the pictures of the documents, beside those that were made in folder `made` now."""
    found = []
    for name in PICTURES:
        kept, new = IMAGES / f"console-{name}.png", made / f"console-{name}.png"
        if not kept.exists():
            found.append(f"{kept} is missing")
            continue
        if size_of(kept) != size_of(new):
            found.append(f"{kept} has {size_of(kept)} px, the page now {size_of(new)}")
        for path in (kept, new):
            if path.stat().st_size > LARGEST:
                found.append(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}")
        # Sizes of disks and ages differ; another page differs by much more.
        if not 0.7 < kept.stat().st_size / new.stat().st_size < 1.4:
            found.append(
                f"{kept} has {kept.stat().st_size} bytes, the page now {new.stat().st_size}: it shows something else"
            )
    return found


def main() -> None:
    """Make the pictures, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="the store that is shown; by default the sample of the package")
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are those of the pages now")
    options = parser.parse_args()
    if options.check:
        with tempfile.TemporaryDirectory(prefix="rmqstore-screenshots-") as folder:
            take(Path(folder), options.store)
            wrong = faults(Path(folder))
        for each in wrong:
            print(each)
        sys.exit(1 if wrong else 0)
    for path in take(IMAGES, options.store):
        small = shutil.which("optipng")
        if small:
            subprocess.run([small, "-quiet", str(path)], check=True)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes, {'x'.join(map(str, size_of(path)))} px")


if __name__ == "__main__":
    main()
