"""Hooks of mkdocs.yml: documents of the project's root are pages too, and links work in the site as they do in the tree.

The copy button of a session copies the commands, without prompts and answers.  A link to a file of the tree that is not a
page (a test, a data file) becomes its text; `mkdocs build --strict` fails on every other broken link.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Documents of the project's root, which become pages of the site's root.
BESIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "RELEASING.md", "SECURITY.md")
LINK = re.compile(r"(?<![\\!])\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")
# A session as a page shows it, and the marks before what somebody types.
SESSION = re.compile(
    r'<div class="(?P<classes>language-(?P<language>console|pycon) highlight)">(?P<code>.*?)</div>', re.DOTALL
)
PROMPTS = {"console": ("$ ",), "pycon": (">>> ", "... ")}
# Fences whose info string has a second word for the tests ("python spark") or names no language.
INFO = re.compile(r"^(?P<mark>`{3,})(?P<language>\w+) [\w ]+$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the documents of the project's root."""
    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8")
        if name == "LICENSE":
            name, text = "LICENSE.md", f"# Licence\n\n```text\n{text.rstrip()}\n```\n"
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at the site's pages; remove the tests' words from fences."""
    source = page.file.src_uri
    # The document's folder, relative to the project's root.
    folder = "" if source in BESIDE or source == "LICENSE.md" else posixpath.join("docs", posixpath.dirname(source))

    def linked(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        name, mark, anchor = target.partition("#")
        if not name or re.match(r"[a-zA-Z][\w+.-]*:", name):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, name))
        if path == "README.md":
            path = "docs/index.md"
        if path == "LICENSE":
            path = "LICENSE.md"
        page_name = path.removeprefix("docs/")
        if files.get_file_from_path(page_name) is None:
            return text if (ROOT / path).exists() else found[0]
        return f"[{text}]({posixpath.relpath(page_name, posixpath.dirname(source) or '.')}{mark}{anchor})"

    parts = re.split(r"(^ *`{3,}.*?^ *`{3,}$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(linked, part) for part in parts[::2]]
    return INFO.sub(r"\g<mark>\g<language>", "".join(parts))


def on_page_content(content: str, *, page: Any, config: Any, files: Files) -> str:
    """Set the text of each session's copy button: the theme prefers `data-copy` to the shown text."""

    def marked(found: re.Match[str]) -> str:
        commands = html.escape(commands_of(found["code"], found["language"]), quote=True)
        return f'<div class="{found["classes"]}" data-copy="{commands}">{found["code"]}</div>'

    return SESSION.sub(marked, content)


def commands_of(code: str, language: str) -> str:
    """Return the commands of a session that is shown as HTML: a line each, without prompts."""
    typed = []
    for line in html.unescape(re.sub("<[^>]+>", "", code)).splitlines():
        for prompt in PROMPTS[language]:
            if line.startswith(prompt) or line == prompt.rstrip():
                typed.append(line[len(prompt) :])
                break
    return "\n".join(typed)
