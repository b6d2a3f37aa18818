"""Every command and every Python block of the documents runs as it is shown, or says why it cannot and is listed here.

Owns the running of ``console`` blocks (commands with their output), ``sh`` blocks (commands whose output is not shown) and
``python`` blocks (programs), and the account of every fenced block there is: a kind of block that no test runs is a fault,
and so is one that is marked as not run without being in `NOT_RUN`.  ``pycon`` blocks are run by tests/project/test_docs.py;
blocks whose info string ends with ``spark`` by tests/spark/test_spark_docs.py.

A page's blocks run in order in one folder, where lie `store`, the sample store of a real broker, `cold`, one with its tiered
storage, `vhost`, that of a real RabbitMQ node that was killed, and the `examples` of the project.  Run as a program it
writes the outputs that commands have now into the pages that it is given, for a writer to read over.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

# As a program this is not given the folders that pytest is given.
sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "cli", "rabbitmq")]

import golden
import golden_rabbitmq
import pytest
import tiered_oracle
from documents import ROOT, fences_of, markdown_files, run_python, run_shell, with_paths_below
from test_cli import run, run_document

# Blocks that show something to read.
NOT_CODE = {"text", "hexdump", "json", "yaml", "toml", "ini", "promql", "properties", "crontab"}
# A command without shell syntax, a remark behind it: it runs in this process, which is quicker than another Python.
PLAIN = re.compile(r"rmqstore [^|;&><$'\"`*\\#]+(?:#.*)?")
# Where blocks are run that this file leaves to others, by document ("" for any) and info string.
ELSEWHERE = {
    ("", "pycon"): "tests/project/test_docs.py::test_session_runs_as_shown",
    ("", "python spark"): "tests/spark/test_spark_docs.py::test_blocks_run",
    ("docs/cli.md", "console"): "tests/cli/test_cli.py::test_documented_commands_answer_as_shown",
    (
        "docs/cli.md",
        "console rabbitmq",
    ): "tests/rabbitmq/test_rabbitmq_docs.py::test_documented_commands_answer_as_shown",
}
# Every block that is marked as not run: its document, the beginning of its first line, and the reason it gives.
NOT_RUN = {
    ("CONTRIBUTING.md", "make venv"): "continuous integration runs these as steps of their own (ci/run.sh)",
    ("docs/testing.md", "make sanitize"): "builds take minutes, and the tests run many times as long in them",
    ("README.md", "make demo"): "continuous integration runs both as steps of their own (ci/run.sh)",
    ("tests/interop/rocketmq/README.md", "bash ci/java.sh"): "ci/steps.sh runs the first, `make test` the second",
    ("docs/start.md", "python -m venv"): (
        "the package is on no index yet; ci/checks.sh installs the wheel and runs the session below"
    ),
    ("docs/tasks/spark-cluster.md", "python -m venv"): (
        "it fetches packages; tests/spark/test_cluster.py does it with this tree's wheel"
    ),
    ("docs/tasks/broker-does-not-start.md", "truncate -s"): "the sample's segments are whole",
    ("docs/cli.md", "rmqstore tail -f"): "it goes on until it is interrupted; tests/cli/test_cli_tail.py follows stores",
    (
        "docs/cli.md",
        "rmqstore serve",
    ): "it goes on until it is interrupted; docs/console.md runs one, tests/console asks it",
    ("docs/cli.md", "eval"): (
        "these lines belong into start-up files; tests/cli/test_cli_newcomer.py gives the scripts to the shells"
    ),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def account(path: Path) -> dict[str, list]:
    """The blocks of a document by how they are dealt with; "fault" holds what nobody runs."""
    dealt: dict[str, list] = {"here": [], "elsewhere": [], "not code": [], "not run": [], "fault": []}
    for fence in fences_of(path):
        kind = fence.info.partition(" ")[0]
        if fence.not_run:
            dealt["not run"].append(fence)
        elif ("", fence.info) in ELSEWHERE or (name_of(path), fence.info) in ELSEWHERE:
            dealt["elsewhere"].append(fence)
        elif fence.info in ("console", "python", "sh"):
            dealt["here"].append(fence)
        else:
            dealt["not code" if kind in NOT_CODE else "fault"].append(fence)
    return dealt


def documents_that_run() -> list[Path]:
    """The documents that have blocks which this file runs."""
    return [path for path in markdown_files() if account(path)["here"]]


def prepare(folder: Path) -> None:
    """Put there what documents may take for granted."""
    golden.unpack("sample", folder)
    tiered_oracle.unpack("store", folder / "cold")
    golden_rabbitmq.unpack("02-kill9-segment-plus-journal", folder / "unpacked").rename(folder / "vhost")
    (folder / "unpacked").rmdir()
    # The same vhost where a node has it.
    shutil.copytree(folder / "vhost", folder / "node" / "msg_stores" / "vhosts" / "628WB79CIFDYO9LJI6DKMI09L")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "data").mkdir()
    # One that an import finds is small; one that it makes has the default sizes, 1.4 GB.
    shutil.copytree(golden.unpack("sample", folder / "unpacked"), folder / "tmp" / "copy")
    shutil.rmtree(folder / "unpacked")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


def test_every_block_is_accounted_for():
    dealt = {path: account(path) for path in markdown_files()}
    assert [f"{name_of(path)}:{fence.number}: {fence.info!r}" for path in dealt for fence in dealt[path]["fault"]] == []
    not_run = [(name_of(path), fence) for path in dealt for fence in dealt[path]["not run"]]
    listed = {
        (name, begin): fence.not_run
        for name, fence in not_run
        for where, begin in NOT_RUN
        if where == name and fence.lines[0].startswith(begin)
    }
    assert listed == NOT_RUN and len(not_run) == len(NOT_RUN)
    for reason in NOT_RUN.values():
        for name in re.findall(r"(?:tests|ci|docs)/[\w/]*\w+(?:\.\w+)?", reason):
            assert (ROOT / name).exists(), reason
    assert sum(len(each["here"]) for each in dealt.values()) >= 15


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_run_the_others_exist(where):
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", documents_that_run(), ids=name_of)
def test_blocks_run_as_shown(path, folder):
    names: dict[str, object] = {}
    for fence in account(path)["here"]:
        where = f"{name_of(path)}:{fence.number}"
        if fence.info == "console":
            block = f"```console\n{fence.text}```"
            assert run_document(block, folder) == block, where
        elif fence.info == "sh" and all(PLAIN.fullmatch(line) or line.startswith("#") for line in fence.lines):
            for line in with_paths_below(fence.text, folder).splitlines():
                if line.startswith("#"):
                    continue
                done = run(*shlex.split(line, comments=True)[1:])
                assert done.exit_code == 0, f"{where}: exit code {done.exit_code}\n{line}\n{done.output}"
        elif fence.info == "sh":
            done = run_shell(fence.text, folder)
            assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}"
        else:
            names = run_python(path, [fence], folder, names)


def test_a_block_that_is_wrong_fails(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n<!-- not run: no reason -->\n```sh\nfalse\n```\n```python\nassert a == 2\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    dealt = account(page)
    assert [fence.not_run for fence in dealt["not run"]] == ["no reason"]
    with pytest.raises(AssertionError) as caught:
        run_python(page, dealt["here"], tmp_path, {})
    assert caught.traceback[-1].lineno == 8  # counted from 0
    assert run_shell(dealt["not run"][0].text + "echo unreached", tmp_path).stdout == ""
    page.write_text("```\nx\n```\n```rust\nx\n```\n", encoding="utf-8")
    assert [fence.info for fence in account(page)["fault"]] == ["", "rust"]


if __name__ == "__main__":
    import os
    import tempfile

    os.environ["TZ"] = "UTC"
    time.tzset()
    for page in [Path(argument).resolve() for argument in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as scratch:
            prepare(Path(scratch))
            os.chdir(scratch)
            if (name_of(page), "console") in ELSEWHERE:
                page.write_text(run_document(page.read_text(encoding="utf-8"), Path(scratch)), encoding="utf-8")
                os.chdir("/")
                continue
            lines = page.read_text(encoding="utf-8").split("\n")
            there: dict[str, object] = {}
            done = []
            for fence in account(page)["here"]:
                if fence.info == "console":
                    done.append((fence, run_document(f"```console\n{fence.text}```", Path(scratch)).split("\n")[1:-1]))
                elif fence.info == "sh":
                    print(run_shell(fence.text, Path(scratch)).stdout)
                else:
                    there = run_python(page, [fence], Path(scratch), there)
            for fence, shown in reversed(done):
                lines[fence.number - 1 : fence.number - 1 + len(fence.lines)] = shown
            page.write_text("\n".join(lines), encoding="utf-8")
            os.chdir("/")
