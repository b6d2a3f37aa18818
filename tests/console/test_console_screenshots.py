"""The pictures of the console in the documents: there, embedded, light enough, and those of the pages as they are now.

Owns no picture: ci/screenshots.py makes them, and its check runs here.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci" / "screenshots.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("screenshots", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def test_the_pictures_are_there_and_in_the_documents(script):
    page = (ROOT / "docs" / "console.md").read_text(encoding="utf-8")
    embedded = re.findall(r"!\[([^\]]+)\]\(images/(console-[a-z]+\.png)\)", page)
    assert {name for _, name in embedded} == {f"console-{name}.png" for name in script.PICTURES}
    # What a picture shows is said for whoever does not see it.
    assert all(len(text) > 20 for text, _ in embedded)
    for name in script.PICTURES:
        path = script.IMAGES / f"console-{name}.png"
        width, height = script.size_of(path)
        assert width == script.WIDTH and height > 300
        # A page of one colour packs into two or three thousand bytes.
        assert 20_000 < path.stat().st_size <= script.LARGEST, path


def test_a_picture_that_is_another_one_is_found(script, tmp_path, monkeypatch):
    for name in script.PICTURES:
        (tmp_path / f"console-{name}.png").write_bytes((script.IMAGES / f"console-{name}.png").read_bytes())
    assert script.faults(tmp_path) == []
    (tmp_path / "console-index.png").write_bytes((script.IMAGES / "console-topic.png").read_bytes())
    assert any("console-index.png" in each for each in script.faults(tmp_path))
    (tmp_path / "console-index.png").write_bytes((script.IMAGES / "console-index.png").read_bytes())
    monkeypatch.setattr(script, "IMAGES", tmp_path / "nowhere")
    assert len(script.faults(tmp_path)) == len(script.PICTURES)


# `browser` for the skip where there is none; the script starts one of its own.
def test_the_pictures_are_those_of_the_pages_now(browser):
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
