"""The session of docs/cli.md with RabbitMQ's queues runs as it is shown."""

from __future__ import annotations

import re

import golden_rabbitmq
from test_cli import DOCUMENT, run_document


def test_documented_commands_answer_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden_rabbitmq.unpack("02-kill9-segment-plus-journal", tmp_path / "unpacked").rename(tmp_path / "vhost")
    (shown,) = re.findall(r"```console rabbitmq\n.*?```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    text = shown.replace("```console rabbitmq", "```console")
    assert run_document(text, tmp_path) == text
    commands = set(re.findall(r"(?m)^\$ rmqstore rabbitmq (\w+)", text))
    assert commands == {"queues", "dump", "verify", "repair", "export", "import"}
