"""The harness beside the peers: turns, statistics, the refusal of different work, the table in the document.

Owns no measurement: nothing here depends on how long anything takes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from rmqstore import MessageStore, StoreConfig, verify

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def project_on_path(monkeypatch):
    # Behind everything else, so that the package under test stays the one that is installed.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


@pytest.fixture
def rounds():
    from asv_bench.peers import rounds

    return rounds


def work(rounds, contenders, **options):
    return rounds.Work("part", "work", "keys", 100, contenders, **options)


def scripted(rounds, seconds, answer=None, log=None, name=""):
    """A contender that takes the given seconds in turn."""
    left = iter(seconds)

    def contender():
        if log is not None:
            log.append(name)
        return rounds.Outcome(next(left), answer or {})

    return contender


def test_everyone_takes_turns_and_begins_in_turn(rounds):
    log = []
    contenders = {name: scripted(rounds, [1] * 4, log=log, name=name) for name in "abc"}
    result = rounds.run(work(rounds, contenders, base="a"), 3)
    assert log == list("abc" + "bca" + "cab" + "abc")
    # The first round is for warming up.
    assert result["seconds"] == {name: [1, 1, 1] for name in "abc"}


def test_a_ratio_is_taken_within_a_round_and_then_the_median(rounds):
    # The machine became ten times slower in the second round: that must not change the ratio.
    contenders = {"ours": scripted(rounds, [9, 1, 10, 4]), "Java": scripted(rounds, [9, 2, 20, 4])}
    result = rounds.run(work(rounds, contenders, goals={"ours": 2}), 3)
    ours, java = rounds.rows([result])
    assert ours.ratio == rounds.Spread(2, 1, 2)
    assert ours.rate == rounds.Spread(25, 10, 100)
    assert (rounds.verdict(ours), rounds.verdict(java)) == ("reached", "")
    assert (ours.ours, java.ours, java.remark, java.ratio) == (True, False, "base", None)


def test_of_several_bases_the_fastest_counts(rounds):
    contenders = {
        "ours": scripted(rounds, [1, 1]),
        "LMDB": scripted(rounds, [5, 5]),
        "SQLite": scripted(rounds, [3, 3]),
    }
    result = rounds.run(work(rounds, contenders, base=("LMDB", "SQLite", "rocksdict"), goals={"ours": 3.5}), 1)
    by_name = {row.who: row for row in rounds.rows([result])}
    assert rounds.base_of(result) == "SQLite"
    assert by_name["ours"].ratio.median == 3 and rounds.verdict(by_name["ours"]) == "missed"
    assert by_name["LMDB"].ratio.median == pytest.approx(0.6) and not by_name["LMDB"].ours


def test_different_work_is_refused(rounds):
    contenders = {
        "ours": scripted(rounds, [1, 1], {"found": 10}),
        "Java": scripted(rounds, [1, 1], {"found": 11, "sum": 5}),
    }
    with pytest.raises(rounds.DifferentWorkError, match=r"found is 10 of ours, but 11 of Java"):
        rounds.run(work(rounds, contenders), 1)


def test_what_only_one_of_them_says_is_no_difference(rounds):
    contenders = {"ours": scripted(rounds, [1], {"found": 10}), "Java": scripted(rounds, [1], {"found": 10, "sum": 5})}
    rounds.run(work(rounds, contenders, warm_up=0), 1)


def test_who_cannot_take_part_is_in_the_table_with_the_reason(rounds):
    result = rounds.run(
        work(rounds, {"ours": scripted(rounds, [1], {})}, warm_up=0, skipped={"Java": "Java is not installed"}), 1
    )
    ours, java = rounds.rows([result])
    assert ours.ratio is None and rounds.cells(ours)[4:7] == ["", "", ""]
    assert rounds.cells(java) == ["work", "Java", "", "", "", "", "", "Java is not installed"]


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1.234, "1.23"), (45.67, "45.7"), (999, "999"), (1234, "1.23 k"), (5e7, "50.0 M"), (2.5e9, "2.50 G")],
)
def test_rates_have_three_digits(rounds, rate, text):
    assert rounds.rate_text(rate) == text


def test_a_result_survives_json(rounds):
    result = rounds.run(work(rounds, {"ours": scripted(rounds, [1, 2]), "Java": scripted(rounds, [2, 3])}), 1)
    assert list(rounds.rows([json.loads(json.dumps(result))])) == list(rounds.rows([result]))


def test_blocks_of_a_document_are_replaced_alone():
    from asv_bench import document

    text = "before\n<!-- a: begin, by a program -->\nold\n<!-- a: end -->\nbetween\n<!-- b: begin -->\nb\n<!-- b: end -->\n"
    changed = document.with_block(text, "a", "new \\1\n")
    assert changed == text.replace("old\n", "new \\1\n")
    assert document.block_of(changed, "a") == "new \\1\n"
    for name in ("c", "A"):
        with pytest.raises(ValueError, match="0 blocks"):
            document.with_block(text, name, "")


def test_the_data_are_the_same_in_both_forms():
    pytest.importorskip("pyarrow")
    from asv_bench.peers import data

    n, size = 2500, 32
    keys, blob = data.keys(n), data.bodies(n, size)
    assert len(set(keys)) == n and {len(key) for key in keys} == {data.KEY_WIDTH}
    table = data.table(keys, blob, size).to_pylist()
    for row, message, queue_id in zip(table, data.messages(keys, blob, size), data.queue_ids(n).tolist()):
        assert row == {
            "queue_id": queue_id,
            "keys": message.keys,
            "tags": message.tags,
            "body": message.body,
        }


def test_the_documented_table_is_the_one_of_its_result():
    from asv_bench import document
    from asv_bench.peers import document as peers

    block = document.block_of(document.BENCHMARKS.read_text(encoding="utf-8"), "peers")
    if not peers.RESULT.exists():
        assert block == ""
        return
    result = json.loads(peers.RESULT.read_text(encoding="utf-8"))
    assert block == peers.markdown(result)
    assert max(map(len, block.splitlines())) <= 120
    # Nothing that was measured is left out, and a table is of one work.
    works = {(each["part"], each["name"]) for each in result["results"]}
    assert block.count("|---|") >= block.count("/s | rate |") == len(works)
    assert all(f"| {name}, " in block for _, name in works)
    for each in result["results"]:
        assert all(f"| {who} |" in block for who in (*each["seconds"], *each["skipped"])), each["name"]


def test_the_plot_is_the_one_of_its_result():
    from asv_bench import document
    from asv_bench.peers import document as peers
    from asv_bench.peers import rounds

    result = json.loads(peers.RESULT.read_text(encoding="utf-8"))
    svg = peers.PLOT.read_text(encoding="utf-8")
    assert svg == peers.plot(result), "python -m asv_bench.peers.document draws it again"
    root = xml.etree.ElementTree.fromstring(svg)
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    ours = [row for row in rounds.rows(result["results"]) if row.ours and row.ratio]
    assert len(dots) == len(ours) > 30
    # Where it stands is what it says: farther to the right is faster, and what is slower than the peer stands left of 1.
    places = sorted((float(dot.attrib["cx"]), float(dot[0].text.rpartition(" ")[2])) for dot in dots)
    assert [ratio for _, ratio in places] == sorted(ratio for _, ratio in places)
    assert all((x < peers.across(1)) == (ratio < 1) for x, ratio in places if ratio != 1)
    page = document.PERFORMANCE.read_text(encoding="utf-8")
    assert f"](images/{peers.PLOT.name})" in page and len(page.split()) < 900


def test_the_documented_key_stores_are_those_of_its_result():
    from asv_bench import document
    from asv_bench.peers import document as peers

    block = document.block_of(peers.WHY_NOT.read_text(encoding="utf-8"), peers.KEY_STORES)
    result = json.loads(peers.RESULT.read_text(encoding="utf-8"))
    assert block == peers.key_stores(result)
    assert {"LMDB", "rocksdict", "SQLite"} < {line.split("|")[1].strip() for line in block.splitlines() if "/s" in line}


def test_the_documented_axes_are_those_of_their_result():
    from asv_bench import document, growth

    rows = json.loads(growth.AXES_RESULT.read_text(encoding="utf-8"))
    assert list(dict.fromkeys(row["axis"] for row in rows)) == list(growth.AXES)
    block = document.block_of(document.PERFORMANCE.read_text(encoding="utf-8"), "axes")
    assert block == growth.table_of_axes(rows)


def test_the_documented_growth_is_that_of_its_result():
    from asv_bench import document, growth

    block = document.block_of(document.BENCHMARKS.read_text(encoding="utf-8"), "growth")
    if not growth.RESULT.exists():
        assert block == ""
        return
    result = json.loads(growth.RESULT.read_text(encoding="utf-8"))
    assert list(result["parts"]) == list(growth.PARTS)
    assert block == growth.markdown(result)
    for part in growth.PARTS:
        assert (growth.FOLDER / f"{part}.svg").stat().st_size < 200_000


@pytest.mark.parametrize(("make", "number"), [("make_queues", 25), ("make_segments", 7)])
def test_stores_that_are_made_without_the_store_are_sound(tmp_path, make, number):
    from asv_bench import growth

    path = str(tmp_path / "store")
    config = StoreConfig(
        mapped_file_size_commit_log=65536, mapped_file_size_consume_queue=4000, max_hash_slot_num=64, max_index_num=512
    )
    getattr(growth, make)(path, number, config)
    assert not list(verify(path, config))
    with MessageStore.open(path, config=config, read_only=True) as store:
        assert len(list(store.messages())) == number
        assert len(store.queues.keys()) == (number if make == "make_queues" else 1)
        assert len(store.commit_log.files) == (number if make == "make_segments" else 1)


def test_the_loop_in_c_writes_what_the_store_writes(tmp_path):
    from asv_bench.peers import data, loops, rebuild

    why_not = loops.compile_loop(str(tmp_path), "rebuild")
    if why_not.startswith("there is no C compiler"):
        pytest.skip(why_not)
    assert why_not == ""
    n, path, target = 5000, str(tmp_path / "store"), tmp_path / "loop"
    config = StoreConfig(
        mapped_file_size_commit_log=1 << 21,
        mapped_file_size_consume_queue=20 * n,
        max_hash_slot_num=3001,
        max_index_num=12000,
    )
    with MessageStore.open(path, config=config) as store:
        data.fill(store, data.keys(n), data.bodies(n, 100), 100)
        end = store.commit_log.max_offset
        (index,) = store.index_service.files()
        entries = index.index_count - 1
    target.mkdir()
    segment = f"{path}/commitlog/{0:020d}"
    outcome = rebuild.loop_over(str(tmp_path), segment, end, str(target), config, 20 * n)
    assert outcome.answer == {"units": n, "entries": entries}
    (name,) = (tmp_path / "store" / "index").iterdir()
    assert (target / "index").read_bytes() == name.read_bytes()
    queues = [(tmp_path / f"store/consumequeue/{data.TOPIC}/{i}/{0:020d}").read_bytes() for i in range(data.QUEUES)]
    found = [(target / f"queue{i}").read_bytes() for i in range(data.QUEUES)]
    # The loop numbers them as they come; each file is sized for all units.
    size = max(len(one.rstrip(b"\0")) for one in queues)
    assert sorted(one[:size] for one in found) == sorted(one[:size] for one in queues)


def test_the_extension_that_makes_the_objects_alone_finds_what_the_store_finds(tmp_path):
    # In a process of its own, as it ends where a record is not what it must be.
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler cc")
    script = """
import sys
sys.path.append(sys.argv[2])
from rmqstore import MessageStore
from asv_bench.peers import data, extensions
path, n = sys.argv[1] + "/store", 40_000
keys = data.keys(n)
with MessageStore.open(path) as store:
    data.fill(store, keys, data.bodies(n, 100), 100)
    extension, name = extensions.messages_of(sys.argv[1], path)
    def all_of(messages):
        return [(m.topic, m.body, m.keys, m.queue_offset) for m in messages]
    num = 0
    for queue_id in range(data.QUEUES):
        at = 0
        while True:
            ours, theirs = (asked.get_message(data.TOPIC, queue_id, at, max_num=32) for asked in (store, extension))
            assert all_of(ours.messages) == all_of(theirs.messages)
            assert not ours.messages or ours.next_queue_offset == theirs.next_queue_offset
            if not ours.messages:
                break
            num, at = num + len(ours.messages), ours.next_queue_offset
    assert num == n
    for key in [*keys[::7], "nobody's"]:
        assert all_of(store.query_message(data.TOPIC, key)) == all_of(extension.query_message(data.TOPIC, key)), key
print(name)
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("an extension in C that makes"), done.stderr


def test_the_loop_in_c_reads_what_a_scan_reads(tmp_path):
    from asv_bench.peers import data, loops

    why_not = loops.compile_loop(str(tmp_path), "scan")
    if why_not.startswith("there is no C compiler"):
        pytest.skip(why_not)
    assert why_not == ""
    n, path = 20_000, tmp_path / "store"
    with MessageStore.open(path, config=StoreConfig(mapped_file_size_commit_log=1 << 24)) as store:
        data.fill(store, data.keys(n), data.bodies(n, 100), 100)
        end = store.commit_log.max_offset
        messages = list(store.messages())
    total = sum(100 + message.queue_offset for message in messages)
    segment = path / "commitlog" / f"{0:020d}"
    for chosen in ("handful", "body", "all"):
        assert loops.run_loop(str(tmp_path), "scan", segment, end, chosen)[1:] == [n, total]
    with open(segment, "r+b") as file:
        in_a_body = messages[-1].phy_offset + 100
        file.seek(in_a_body)
        byte = file.read(1)
        file.seek(in_a_body)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(subprocess.CalledProcessError):
        loops.run_loop(str(tmp_path), "scan", segment, end, "all")


def test_the_decoder_in_python_reads_what_a_scan_reads(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from asv_bench.peers import data, spark

    n, path = 10_000, str(tmp_path / "store")
    with MessageStore.open(path, config=StoreConfig(mapped_file_size_commit_log=1 << 20)) as store:
        data.fill(store, data.keys(n), data.bodies(n, 64), 64)
        expected = pa.Table.from_batches(list(store.scan(list(spark.DECODED))))
    segments = [file.read_bytes() for file in sorted((tmp_path / "store" / "commitlog").iterdir())]
    assert len(segments) > 1
    columns = list(spark.DECODED)
    content = [pa.record_batch({"content": pa.array([segment], pa.binary())}) for segment in segments]
    found = pa.Table.from_batches(list(spark.decoder(columns)(iter(content))))
    assert found.cast(expected.schema).equals(expected)


def test_the_queue_that_a_node_is_to_recover_is_what_a_node_writes(tmp_path, monkeypatch):
    import classic_queue_oracle as oracle

    from asv_bench.peers import rabbitmq

    monkeypatch.setattr(rabbitmq, "SEGMENT_ENTRY_COUNT", 32)
    directory = rabbitmq.write_queue(str(tmp_path / "vhost"), 70)
    vhost = oracle.read_vhost(tmp_path / "vhost")
    queue = vhost.queues[directory]
    assert (vhost.segment_entry_count, vhost.crashes, queue.next_seq_id) == (32, False, 96)
    assert [entry.message.body for entry in queue.entries] == [b"%012d" % i for i in range(70)]
    # Written by the model of a node with the same messages, and flushed, every file is the same.
    model = oracle.IndexModel(32)
    for one in queue.entries:
        assert one.term == oracle.message_term(one.message.body, one.msg_id, routing_keys=[b"bench"], vhost=b"bench")
        model.enqueue(oracle.Publish(one.seq, one.msg_id, 0, rabbitmq.BODY, True, one.term))
    model.flush()
    folder = tmp_path / "vhost" / "queues" / directory
    assert model.files() == {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".queue_name"}


def test_every_timed_side_is_given_memory_right_before_its_clock_starts(monkeypatch):
    from asv_bench.peers import jvm, memory, setting

    steps = []
    monkeypatch.setattr(memory, "provide", lambda: steps.append("memory"))
    setting.timed(lambda: steps.append("ours"))
    java = jvm.Java.__new__(jvm.Java)
    monkeypatch.setattr(java, "ask", lambda op, **arguments: steps.append(op) or {"ns": 5}, raising=False)
    assert java.timed("put") == (5e-9, {})
    assert steps == ["memory", "ours", "memory", "put"]


@pytest.mark.parametrize(("state", "slept", "mapped"), [("touched", 0, 1), ("cold", 1, 0), ("as it is", 0, 0)])
def test_memory_is_put_into_the_chosen_state(monkeypatch, state, slept, mapped):
    from asv_bench.peers import memory

    made, waited = [], []
    real = memory.mmap.mmap
    monkeypatch.setattr(memory, "state", state)
    monkeypatch.setattr(memory, "_SIZE", 1 << 16)
    monkeypatch.setattr(memory.mmap, "mmap", lambda *args, **options: made.append(args) or real(*args, **options))
    monkeypatch.setattr(memory.time, "sleep", waited.append)
    memory.provide()
    assert (len(waited), len(made)) == (slept, mapped) and made == [(-1, 1 << 16)] * mapped
