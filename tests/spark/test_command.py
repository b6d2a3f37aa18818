"""``rmqstore spark …``: answers, exit codes, errors in one sentence, and the same through spark-submit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import golden
import pytest
from click.testing import CliRunner
from spark_setting import JAVA_OPTIONS, spark_environment
from stores import make_store, overwrite, scanned
from test_cli import DOCUMENT, run_document

from rmqstore.cli import main


def run(*arguments):
    result = CliRunner().invoke(main, ["spark", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answers(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_help_needs_neither_pyspark_nor_pyarrow():
    program = (
        "import sys\nfrom rmqstore.cli import main\n"
        "try:\n    main(['spark', 'export', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'pyspark', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Write messages into files" in done.stdout


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_without_a_library_it_says_how_to_install_it(monkeypatch, missing, tmp_path):
    if missing == "pyarrow":
        pytest.importorskip("pyspark")
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    result = run("count", tmp_path)
    assert result.exit_code == 3
    assert f"this needs {missing}" in result.stderr and "pip install 'rmqstore[spark]'" in result.stderr


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("command") / "store")


@pytest.mark.spark
@pytest.mark.java
def test_counting(spark, path):
    assert run("count", path).stdout == "400\n"
    by_topic = answers("count", path, "--by", "topic", "--by", "day", "--tags", "EU")
    assert [each["topic"] for each in by_topic] == ["Stock"] and by_topic[0]["day"] == "2023-11-14"
    table = run("count", path, "--by", "topic", "--topic", "Orders", "--partition-bytes", "8k")
    assert re.search(r"(?m)^  Orders +266$", table.stdout)
    assert run("count", path, "--topic", "None").exit_code == 1
    assert run("count", path, "--by", "body").exit_code == 2
    assert run("count", path, "--conf", "wrong").exit_code == 2


@pytest.mark.spark
@pytest.mark.java
def test_exporting(spark, path, tmp_path):
    done = run("export", path, tmp_path / "json", "--format", "json", "--partition-by", "none", "--columns", "body")
    assert done.stdout == f"wrote 400 messages as json into {tmp_path / 'json'}\n"
    lines = [line for file in (tmp_path / "json").glob("*.json") for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["body"].encode() for line in lines) == sorted(row["body"] for row in scanned(path))
    again = run("export", path, tmp_path / "json", "--format", "json")
    assert again.exit_code == 3 and "already exists" in again.stderr and "Exception" not in again.stderr
    assert run("export", path, tmp_path / "out", "--columns", "none").exit_code == 3


@pytest.mark.spark
@pytest.mark.java
def test_rebuilding(spark, path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    refused = run("rebuild", copy)
    assert refused.exit_code == 2 and "--yes" in refused.stderr
    before = {file.name: file.read_bytes() for file in (copy / "consumequeue" / "Orders" / "0").iterdir()}
    shutil.rmtree(copy / "consumequeue" / "Orders")
    (said,) = answers("rebuild", copy, "--what", "consumequeue", "--yes")
    assert said["records"] == said["units"] == 400
    assert {file.name: file.read_bytes() for file in (copy / "consumequeue" / "Orders" / "0").iterdir()} == before


@pytest.mark.spark
@pytest.mark.java
def test_errors_are_one_sentence_with_file_and_position(spark, path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    offset = scanned(path, ["phy_offset"])[3]["phy_offset"]
    overwrite(copy, offset, b"????")
    result = run("export", copy, tmp_path / "out")
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: no whole record begins at phy offset") and f"{0:020d}, position {offset}" in line
    nowhere = run("count", tmp_path / "nowhere")
    assert nowhere.exit_code == 3 and len(nowhere.stderr.splitlines()) == 1 and "does not exist" in nowhere.stderr
    assert "there is no store here" in run("count", tmp_path).stderr


@pytest.mark.spark
@pytest.mark.java
def test_spark_submit_runs_it(spark, path, tmp_path):
    import pyspark

    import rmqstore.spark.command

    home = os.path.dirname(pyspark.__file__)
    # The system takes no long path for a socket.
    sockets = tempfile.mkdtemp()
    done = subprocess.run(
        [
            os.path.join(home, "bin", "spark-submit"), "--master", "local[1]", "--driver-memory", "1g",
            # As docs/spark.md recommends.
            "--conf", "spark.python.unix.domain.socket.enabled=true", "--conf", f"spark.python.unix.domain.socket.dir={sockets}",
            "--conf", "spark.ui.enabled=false", "--conf", f"spark.driver.extraJavaOptions={JAVA_OPTIONS}",
            rmqstore.spark.command.__file__, "count", str(path), "--by", "topic", "--json",
        ],
        cwd=tmp_path,
        env={**spark_environment(), "SPARK_HOME": home},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    shutil.rmtree(sockets)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == [
        {"type": "count", "topic": "Orders", "messages": 266},
        {"type": "count", "topic": "Stock", "messages": 134},
    ]


@pytest.mark.spark
@pytest.mark.java
def test_documented_commands_answer_as_shown(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        golden.unpack("sample", tmp_path)
        (shown,) = re.findall(r"```console spark\n.*?```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
        text = shown.replace("```console spark", "```console")
        assert len(re.findall(r"(?m)^\$ rmqstore spark", text)) >= 4
        assert run_document(text, tmp_path) == text
    finally:
        monkeypatch.undo()
        time.tzset()


def test_documented_options_are_those_of_the_source():
    from rmqstore.spark.options import _COMMON, _READ, ReadOptions

    text = (DOCUMENT.parent / "spark.md").read_text(encoding="utf-8")
    # In a table, or in a list where a row of it would be too long: - `name` (default): meaning.
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|", text)
    rows += re.findall(r"(?m)^- (`\w+`(?:, `\w+`)*)(?: \(([^)]*)\))?:", text)
    documented = {name: default.strip() for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(documented) >= _COMMON | _READ
    plain = ReadOptions("x")
    for name in ("mode", "corrupt", "starting_offset"):
        assert documented[name] == f"`{getattr(plain, name)}`"
    for name in ("decode_body", "fail_on_data_loss"):
        assert documented[name] == f"`{str(getattr(plain, name)).lower()}`"
    assert plain.partition_bytes == 128 * 2**20 and documented["partition_bytes"] == "`128m`"
