"""The documents as a site: what a copy button copies of a session.  ci/site_check.py looks over the built pages."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def site():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "ci" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(site, content):
    """What the buttons of a page copy."""
    shown = site.on_page_content(content, page=None, config=None, files=None)
    assert re.sub(r' data-copy="[^"]*"', "", shown) == content
    import html

    return [html.unescape(text) for text in re.findall(r'data-copy="([^"]*)"', shown)]


def block(language, *lines):
    code = "\n".join(f'<a id="x"></a>{line}' for line in lines)
    return f'<div class="language-{language} highlight"><pre><span></span><code>{code}\n</code></pre></div>'


def test_only_what_is_typed_is_copied(site):
    session = block(
        "console",
        '<span class="gp">$ </span>rmqstore<span class="w"> </span>info store &gt; &quot;a file&quot;',
        '<span class="go">store  $ 5</span>',
        '<span class="gp">$ </span>ls &amp;&amp; true',
    )
    assert copied(site, session) == ['rmqstore info store > "a file"\nls && true']
    lines = ('<span class="gp">&gt;&gt;&gt; </span>for a in b:', '<span class="gp">... </span>    a', "1")
    python = block("pycon", *lines)
    assert copied(site, python) == ["for a in b:\n    a"]
    # A program, and commands without prompts, are copied as they are shown.
    assert copied(site, block("sh", "rm x") + block("python", "a = 1")) == []


def test_sessions_of_the_documents_have_commands(site):
    import markdown

    text = (ROOT / "docs" / "tasks" / "lost-index.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    made = markdown.Markdown(
        extensions=["pymdownx.highlight", "pymdownx.superfences"],
        extension_configs={"pymdownx.highlight": {"anchor_linenums": True, "pygments_lang_class": True}},
    ).convert(f"```console\n{first}```")
    (commands,) = copied(site, made)
    assert commands.splitlines() == re.findall(r"(?m)^\$ (.*)$", first)
    # The page begins with what helps, and folds the staging away.
    assert "rmqstore rebuild store --what index --yes" in first
    for page in ("lost-index.md", "broker-does-not-start.md"):
        text = (ROOT / "docs" / "tasks" / page).read_text(encoding="utf-8")
        outside = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
        assert "<summary>Try it on the sample" in text
        assert not re.search(r"\bdd of=|truncate -s 20|conv=notrunc", outside)
