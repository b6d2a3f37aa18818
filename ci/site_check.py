"""Looks over a site that mkdocs built: nothing is loaded from elsewhere, every link between its files leads somewhere,
and copy buttons copy the commands of a session alone.

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
        # What the button of each session copies; None where it would copy what is shown.
        self.sessions: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to."""
        given = dict(attrs)
        if tag == "div" and {"language-console", "language-pycon"} & set((given.get("class") or "").split()):
            self.sessions.append(given.get("data-copy"))
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
    sessions = [text for page in pages.values() for text in page.sessions]
    if not sessions:
        faults.append("no page has a session")
    # The attribute is the theme's: one that does not know it would copy prompts and answers.
    scripts = folder.glob("assets/javascripts/bundle*.js")
    if not any("data-copy" in path.read_text(encoding="utf-8") for path in scripts):
        faults.append("the theme knows no data-copy; copy buttons copy prompts and answers")
    for path, page in pages.items():
        here = path.relative_to(folder)
        for text in page.sessions:
            if not text or any(line.startswith(("$ ", ">>> ")) for line in text.splitlines()):
                faults.append(f"{here} has a session whose button copies {text!r}")
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
