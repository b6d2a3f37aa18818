"""A store whose log lost a part: every answer says what it could not see, whichever way it was asked."""

from __future__ import annotations

import itertools

import pytest
from click.testing import CliRunner
from small_store import SMALL, options_of

from rmqstore import Message, MessageStore, StoreConfig, describe, pending, verify
from rmqstore.cli import main
from rmqstore.polars import scan_store

CONFIG = StoreConfig(**SMALL, index_tags=True)
SIZES = [*options_of(SMALL), "-o", "index_tags=true"]
COUNT = 60


@pytest.fixture(params=["middle", "newest", "all"])
def lost(request, tmp_path):
    """A store without some segments, and the phy offsets that they held."""
    path = tmp_path / "store"
    clock = itertools.count(1_700_000_000_000, 1000).__next__
    with MessageStore.open(path, config=CONFIG.replace(clock=clock)) as store:
        for number in range(COUNT):
            store.put_message(Message("T", bytes(300), keys=[f"K{number}"], tags="A"))
        end = store.commit_log.max_offset
    names = sorted((path / "commitlog").iterdir())
    gone = {"middle": names[2:4], "newest": names[-2:], "all": names}[request.param]
    for name in gone:
        name.unlink()
    begin = int(gone[0].name)
    return path, begin, begin + 2 * 4096 if request.param == "middle" else end


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "1000"})


def test_the_store_names_the_part(lost, caplog):
    path, begin, end = lost
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        ((first, last),) = store.lost_log
        # The index ends at the begin of the last record.
        assert first == begin and end - 500 < last <= end
        assert f"lacks phy offsets {begin} to {last}" in caplog.text
        told = [problem for problem in store.damaged_files() if f"lacks phy offsets {begin}" in problem.message]
        assert [problem.path for problem in told] == [str(path / "commitlog")]
        assert store.stats().damaged_files >= 1
    assert any(f"lacks phy offsets {begin}" in detail for _, detail in describe(path, CONFIG).damaged_files)
    assert any(f"lacks phy offsets {begin}" in problem.text for problem in pending(path, config=CONFIG).problems)


@pytest.mark.parametrize(
    "words",
    [
        ["info"], ["topics"], ["queues"], ["get", "T", "0"], ["query", "T", "K30"], ["tail", "-n", "100"], ["pending"],
        ["export", "--corrupt", "skip"], ["sql", "select count(*) from messages"], ["dump"],
    ],
)  # fmt: skip
def test_every_command_says_what_it_could_not_see(lost, caplog, words):
    path, begin, _ = lost
    done = run(words[0], path, *words[1:], *SIZES)
    # Log messages of the package are notes of the command if no other handler takes them.
    assert f"phy offsets {begin} to" in done.output + caplog.text and done.exit_code in (0, 1), done.output
    if words[0] == "query":
        assert done.exit_code == 1 and "may contain more" in done.stderr


def test_a_query_is_not_complete(lost):
    path, begin, _ = lost
    with MessageStore.open(path, config=CONFIG, read_only=True) as store:
        for key in ("K0", "K30", "nobody"):
            found = store.query_message("T", key)
            assert not found.complete and begin in [first for first, _ in found.uncovered]
    done = run("query", path, "T", "nobody", *SIZES, "--json")
    assert '"complete":false' in done.stdout and "in the part of the log that was searched" in done.stderr


def test_frames_warn(lost, caplog):
    path, begin, _ = lost
    scan_store(path, config=CONFIG).select("phy_offset").collect()
    assert f"phy offsets {begin} to" in caplog.text


def test_verify_counts_what_leads_there(lost):
    path, _, _ = lost
    found = [finding for finding in verify(path, CONFIG) if finding.kind == "missing_segment"]
    assert len(found) == 1


def test_a_whole_store_has_no_lost_part(tmp_path, caplog):
    path = tmp_path / "store"
    with MessageStore.open(path, config=CONFIG) as store:
        store.put_messages([Message("T", bytes(300), keys=["K"]) for _ in range(COUNT)])
        store.flush()
        with MessageStore.open(path, config=CONFIG, read_only=True) as reader:
            assert reader.lost_log == ()
    with MessageStore.open(path, config=CONFIG, read_only=True) as reader:
        assert reader.lost_log == () and reader.damaged_files() == []
    # The oldest segments go by retention.
    min((path / "commitlog").iterdir()).unlink()
    with MessageStore.open(path, config=CONFIG, read_only=True) as reader:
        assert reader.lost_log == ()
    assert "lacks" not in caplog.text


def test_a_table_passes_a_damaged_record_and_goes_on_to_its_rows(tmp_path):
    pytest.importorskip("pyarrow")
    clock = itertools.count(1_700_000_000_000, 1000).__next__
    with MessageStore.open(tmp_path / "s", config=CONFIG.replace(clock=clock)) as store:
        puts = [store.put_message(Message("T", b"%d" % number, tags="A")) for number in range(COUNT)]
    segment = tmp_path / "s" / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[puts[3].phy_offset + 4] ^= 1
    segment.write_bytes(data)
    with MessageStore.open(tmp_path / "s", config=CONFIG, read_only=True) as store:
        for tags in (None, "A"):
            table = store.get_table("T", 0, 0, 10, tags, columns=["queue_offset"])
            assert table["queue_offset"].to_pylist() == [0, 1, 2, *range(4, 11)]
