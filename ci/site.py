"""Build the documents as a site in build/site: ``python ci/site.py``.

Zensical reads mkdocs.yml but runs no hooks, so this program copies the documents to build/docs, builds the site from the
copy, and adds to each session what its copy button copies: the commands, without prompts and answers.  Documents outside
docs/ (`OUTSIDE`) become pages too.  A link to a file of the tree that is no page (a test, a data file) becomes its text; any
other link that does not resolve fails the build.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
# Documents outside docs/, and their pages.
OUTSIDE = {
    **{name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md")},
    **{name: name for name in ("RELEASING.md", "SECURITY.md")},
    "LICENSE": "LICENSE.md",
    "README.md": "index.md",
    "asv_bench/FIGURES.md": "figures.md",
}
LINK = re.compile(r"(?<![\\!])\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
IMAGE = re.compile(r"(?<=\]\()(?:\.\./)+docs/(?=[^)\s]+\.(?:svg|png)\))")
# A session in a page, and its prompts.
SESSION = re.compile(
    r'<div class="(?P<classes>language-(?P<language>console|pycon) highlight)">(?P<code>.*?)</div>', re.DOTALL
)
PROMPTS = {"console": ("$ ",), "pycon": (">>> ", "... ")}
# Fences whose info string has a second word for the tests ("python spark").
INFO = re.compile(r"^(?P<mark>`{3,})(?P<language>\w+) [\w ]+$", re.MULTILINE)


def prepare() -> None:
    """Write the pages' sources to build/docs."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    places = {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix()
              for path in (ROOT / "docs").rglob("*.md")} | OUTSIDE  # fmt: skip
    for place, page in places.items():
        if place == "README.md":
            continue
        text = (ROOT / place).read_text(encoding="utf-8")
        if place == "LICENSE":
            text = f"# Licence\n\n```text\n{text.rstrip()}\n```\n"
        (SOURCE / page).write_text(page_of(text, place, places), encoding="utf-8")


def page_of(text: str, place: str, places: dict[str, str]) -> str:
    """Return the text of a document's page: links to pages, fences without the tests' words."""
    here = posixpath.dirname(places[place]) or "."

    def linked(found: re.Match[str]) -> str:
        name, mark, anchor = found["target"].partition("#")
        if not name or re.match(r"[a-zA-Z][\w+.-]*:", name):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), name))
        if path in places:
            return f"[{found['text']}]({posixpath.relpath(places[path], here)}{mark}{anchor})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]
        return found["text"]

    parts = re.split(r"(^ *`{3,}.*?^ *`{3,}$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [IMAGE.sub("", LINK.sub(linked, part)) for part in parts[::2]]
    return INFO.sub(r"\g<mark>\g<language>", "".join(parts))


def add_commands() -> int:
    """Give each session of the site the commands that its copy button copies; return the number of sessions."""

    def marked(found: re.Match[str]) -> str:
        commands = html.escape(commands_of(found["code"], found["language"]), quote=True)
        return f'<div class="{found["classes"]}" data-copy="{commands}">{found["code"]}</div>'

    sessions = 0
    for path in SITE.rglob("*.html"):
        text, number = SESSION.subn(marked, path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        sessions += number
    return sessions


def commands_of(code: str, language: str) -> str:
    """Return the typed lines of a session in HTML, without prompts."""
    typed = []
    for line in html.unescape(re.sub("<[^>]+>", "", code)).splitlines():
        for prompt in PROMPTS[language]:
            if line.startswith(prompt) or line == prompt.rstrip():
                typed.append(line[len(prompt) :])
                break
    return "\n".join(typed)


if __name__ == "__main__":
    prepare()
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if not add_commands():
        sys.exit("no session of the site was found: its pages have another form than ci/site.py expects")
