"""The comparison of instruction counts: what it lets through, what it fails on, what it refuses to compare.

Owns no measurement and starts no valgrind: the figures are given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTING = {"compiler": "gcc 12", "python": "CPython 3.11", "numpy": "2.4"}
KNOWN = {"put_key": 1000.0, "crc32 64 B": 50.0}


@pytest.fixture
def instructions(monkeypatch):
    # Behind everything else, so that the package under test stays the one that is installed.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from asv_bench import instructions

    return instructions


@pytest.fixture
def check(instructions, monkeypatch, tmp_path):
    """Run the whole command on given counts; answers its exit code."""
    figures = tmp_path / "instructions.json"
    figures.write_text(json.dumps({"setting": SETTING, "kernels": KNOWN}), encoding="utf-8")
    monkeypatch.setattr(instructions, "FIGURES", figures)
    monkeypatch.setattr(instructions, "ROOT", tmp_path)
    monkeypatch.setattr(instructions.shutil, "which", lambda name: f"/usr/bin/{name}")

    def check(now, *arguments, before=None, setting=SETTING, missing=None):
        counts = {tmp_path: instructions.Counted(dict(now), dict(setting), missing or {})}
        if before is not None:
            counts[tmp_path / "before"] = before
        monkeypatch.setattr(instructions, "count", lambda tree, scratch: counts[tree])
        monkeypatch.setattr(instructions, "built", lambda revision: tmp_path / "before")
        monkeypatch.setattr(instructions, "commit_before", lambda: "HEAD")
        return instructions.main(list(arguments))

    check.figures = figures
    return check


@pytest.mark.parametrize("part, code", [(0.5, 0), (1.0, 0), (1.09, 0), (1.10, 0), (1.11, 1), (3.0, 1)])
def test_over_ten_per_cent_more_fail(check, capsys, part, code):
    assert check({**KNOWN, "put_key": 1000 * part}) == code
    assert ("TOO MANY" in capsys.readouterr().out) == bool(code)


def test_fewer_instructions_elsewhere_do_not_make_up_for_it(check, capsys):
    assert check({"put_key": 1, "crc32 64 B": 55.5}) == 1
    assert "crc32 64 B" in capsys.readouterr().out.splitlines()[-1]


def test_a_kernel_without_an_older_figure_is_an_error(check, capsys):
    assert check({**KNOWN, "scan": 5}) == 1
    assert "no older figures of scan" in capsys.readouterr().err


def test_a_kernel_that_was_not_counted_is_an_error(check, capsys):
    assert check({"put_key": 1000}) == 1
    assert "crc32 64 B" in capsys.readouterr().err


@pytest.mark.parametrize("figure", [0, -1, float("nan"), float("inf"), None, "1000", True])
def test_what_is_no_number_of_instructions_is_an_error(check, figure):
    assert check({**KNOWN, "put_key": figure}) == 1


@pytest.mark.parametrize("figure", [0, "many", None])
def test_a_committed_figure_that_is_no_number_is_an_error(check, figure):
    check.figures.write_text(json.dumps({"setting": SETTING, "kernels": {**KNOWN, "put_key": figure}}))
    assert check(KNOWN) == 1


def test_kernels_that_could_not_run_are_an_error(check, capsys):
    assert check(KNOWN, missing={"read": "AttributeError('scan')"}) == 1
    assert "AttributeError" in capsys.readouterr().err


def test_with_other_versions_the_commit_before_decides(check, instructions, capsys):
    other = {**SETTING, "compiler": "clang 17"}
    before = instructions.Counted({"put_key": 2000.0, "crc32 64 B": 50.0}, other, {})
    assert check({**KNOWN, "put_key": 2180, "new": 7}, before=before, setting=other) == 0
    assert "gcc 12" in capsys.readouterr().out
    assert check({**KNOWN, "put_key": 2220}, before=before, setting=other) == 1
    # Counts of two different settings are never compared.
    assert check(KNOWN, before=before._replace(setting=SETTING), setting=other) == 1


def test_against_another_commit_the_file_does_not_count(check, instructions):
    before = instructions.Counted({"put_key": 500.0, "crc32 64 B": 50.0}, SETTING, {})
    assert check(KNOWN, before=before) == 0
    assert check(KNOWN, "--against", "HEAD~3", before=before) == 1
    # A kernel that the other commit had and this one has not is no success.
    before.kernels["gone"] = 5.0
    assert check({"put_key": 500.0, "crc32 64 B": 50.0}, "--against", "HEAD~3", before=before) == 1


def test_update_writes_what_is_compared_with(check):
    assert check({**KNOWN, "put_key": 5000.0}, "--update") == 0
    assert check({**KNOWN, "put_key": 5400.0}) == 0
    assert check({**KNOWN, "put_key": 5600.0}) == 1


def test_update_keeps_the_old_figures_when_a_kernel_could_not_run(check):
    before = check.figures.read_bytes()
    assert check(KNOWN, "--update", missing={"read": "ImportError"}) == 1
    assert check.figures.read_bytes() == before


def test_without_valgrind_there_is_no_success(check, instructions, monkeypatch, capsys):
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert check(KNOWN) == 1
    assert "apt-get install valgrind" in capsys.readouterr().err


def test_the_work_of_n_is_the_difference_between_2n_and_n(instructions):
    assert instructions.per_operation({"put_key|100": 5_500, "put_key|200": 10_500}, {"put_key": 100}) == {
        "put_key": 50.0
    }
    with pytest.raises(instructions.IncomparableError, match=r"put_key\|200"):
        instructions.per_operation({"put_key|100": 5_500}, {"put_key": 100})
    with pytest.raises(instructions.IncomparableError, match="instructions for 100 operations"):
        instructions.per_operation({"put_key|100": 5_500, "put_key|200": 5_500}, {"put_key": 100})


def test_totals_are_read_by_their_mark(instructions, tmp_path):
    head = "# callgrind format\nversion: 1\npid: 7\ncmd: python\npart: 1\n\n"
    end = "events: Ir\nsummary: 12\n\n\ntotals: 12\n"
    (tmp_path / "callgrind.1").write_text(f"{head}desc: Trigger: Client Request: put key|100\n\n{end}")
    (tmp_path / "callgrind.2").write_text(f"{head}desc: Trigger: Program termination\n\n{end}")
    assert instructions.read_dumps(tmp_path) == {"put key|100": 12}


def test_the_committed_figures_are_whole():
    known = json.loads((ROOT / "asv_bench" / "instructions.json").read_text(encoding="utf-8"))
    assert known["setting"].keys() == {"compiler", "python", "numpy", "pyarrow", "machine", "crc32"}
    assert len(known["kernels"]) >= 20
    assert all(figure > 0 for figure in known["kernels"].values())
