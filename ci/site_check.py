"""Looks over a site that mkdocs built: nothing is loaded from elsewhere, and every link between its files leads somewhere.

``site_check.py FOLDER``.  Owns no list of pages; at least those of docs/ must be there.
"""

from __future__ import annotations

import html.parser
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
# Elements and attributes by which a page loads something; a plain link may lead anywhere.
LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src")}


class Page(html.parser.HTMLParser):
    """The links, the loaded addresses and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to."""
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            if (tag, name) in LOADS and dict(attrs).get("rel") != "canonical":
                self.loads.append(value)
            if (tag, name) == ("a", "href"):
                self.links.append(value)


def faults_of(folder: Path) -> list[str]:
    """What is wrong with the site in `folder`."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    faults = []
    for source in (ROOT / "docs").rglob("*.md"):
        name = source.relative_to(ROOT / "docs").with_suffix(".html")
        if folder / name not in pages:
            faults.append(f"{name} is missing")
    for path, page in pages.items():
        here = path.relative_to(folder)
        for address in page.loads + page.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loads and parts.scheme != "data":
                    faults.append(f"{here} loads {address}")
                continue
            # The page for what is not found has addresses from the root.
            start = folder if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                faults.append(f"{here} leads to {address}, which is not there")
            elif (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors | {"__skip"}
            ):
                faults.append(f"{here} leads to {address}, and that page has no such place")
    return faults


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    found = faults_of(site)
    if found:
        sys.exit("\n".join(found))
    print(f"{len(list(site.rglob('*.html')))} pages, all links lead somewhere, nothing is loaded from elsewhere")
