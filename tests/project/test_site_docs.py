"""The site of the documents: the sources of its pages, and the commands of its copy buttons (ci/site.py)."""

from __future__ import annotations

import importlib.util

import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_of_documents", ROOT / "ci" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_point_at_pages(site):
    places = {"docs/cli.md": "cli.md", "docs/tasks/a.md": "tasks/a.md", "ARCHITECTURE.md": "ARCHITECTURE.md"}
    text = "[a](../cli.md#x) [b](../../ARCHITECTURE.md) [c](../../Makefile) [d](https://x.test) [e](gone.md)"
    shown = site.page_of(text, "docs/tasks/a.md", places)
    assert shown == "[a](../cli.md#x) [b](../ARCHITECTURE.md) c [d](https://x.test) [e](gone.md)"


def test_fences_lose_the_words_of_the_tests(site):
    text = "```python spark\n[a](b.md)\n```\n```console rabbitmq\n$ x\n```\n"
    shown = site.page_of(text, "docs/a.md", {"docs/a.md": "a.md"})
    assert shown == "```python\n[a](b.md)\n```\n```console\n$ x\n```\n"


def test_a_copy_button_copies_commands_alone(site, tmp_path, monkeypatch):
    page = tmp_path / "a.html"
    page.write_text(
        '<div class="language-console highlight"><pre>$ <b>ls</b> "a"\na\n$ pwd\n</pre></div>', encoding="utf-8"
    )
    monkeypatch.setattr(site, "SITE", tmp_path)
    assert site.add_commands() == 1
    assert 'data-copy="ls &quot;a&quot;\npwd"' in page.read_text(encoding="utf-8")
    assert site.commands_of("&gt;&gt;&gt; a = 1\n... b\n1", "pycon") == "a = 1\nb"


def test_every_page_is_in_the_navigation(site):
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]

    def pages(node):
        if isinstance(node, str):
            return [node]
        return [page for each in (node.values() if isinstance(node, dict) else node) for page in pages(each)]

    listed = pages(yaml.safe_load("nav:" + text)["nav"])
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed)) and set(listed) == docs | set(site.OUTSIDE.values())
