"""The documents against the code: layout tables, numbers, hex dumps, links, and the sessions that they show.

Owns the little grammars by which docs/formats.md can be read by a program (tables by their header row, fences by their
info string), and the running of sessions (``pycon`` blocks); every other block is run by tests/project/test_docs_run.py.
A document that lacks what a check is about fails it, so none passes over nothing.  It never writes below the project;
sessions run in a temporary directory.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import io
import re
from pathlib import Path

import oracle
import pytest
from documents import Fence, markdown_files, split_fences

from rmqstore import _core
from rmqstore._core import IndexRegion, Region
from rmqstore.config import StoreConfig
from rmqstore.message import SysFlag, host_from_bytes, parse_properties

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ROOT / "docs" / "formats.md"
# An image, or a link when the leading "!" is missing; an image within a link's text is taken out first.
LINK = re.compile(r"(?<!\\)\[[^\]\[]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
IMAGE = re.compile("!" + LINK.pattern.removeprefix(r"(?<!\\)"))
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s+.*)?$", re.MULTILINE)


# ---------------------------------------------------------------------------------------------------------------------
# Reading Markdown


def tables(text: str, *header: str) -> list[list[list[str]]]:
    """The rows of every table whose header row is, or begins with, `header`; cells without their backticks."""
    outside, _ = split_fences(text)
    found, rows, before = [], None, []
    for line in [*outside.splitlines(), ""]:
        if not line.startswith("|"):
            rows, before = None, []
            continue
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if rows is not None:
            rows.append(cells)
        elif all(re.fullmatch(":?-+:?", cell) for cell in cells):
            rows = []
            if tuple(before[: len(header)]) == header:
                found.append(rows)
        before = cells
    return found


def fences_with(text: str, info: str) -> list[Fence]:
    return [fence for fence in split_fences(text)[1] if fence.info == info]


@pytest.fixture(scope="module")
def formats() -> str:
    return FORMATS.read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Layout tables

# Constants that state a size; all others are the position of a field.
SIZES = {
    "RECORD_FIXED_SIZE",
    "RECORD_HOST_V6_EXTRA",
    "BLANK_SIZE",
    "PROP_CRC_SIZE",
    "UNIT_SIZE",
    "BATCH_UNIT_SIZE",
    "EXT_UNIT_MIN_SIZE",
    "INDEX_HEADER_SIZE",
    "SLOT_SIZE",
    "ENTRY_SIZE",
    "CHECKPOINT_SIZE",
}
# What the fields of a table add up to; the record's are followed by fields that move, the checkpoint's by zeros.
ADD_UP_TO = {"UNIT_SIZE", "BATCH_UNIT_SIZE", "EXT_UNIT_MIN_SIZE", "INDEX_HEADER_SIZE", "ENTRY_SIZE"}


def layout_constants() -> dict[str, int]:
    layouts = [value for name, value in vars(_core).items() if name.endswith("Layout")]
    assert len(layouts) >= 6
    return {name: int(value) for layout in layouts for name, value in layout.__members__.items()}


def special_numbers() -> dict[str, int]:
    """Public numbers of the core that are in no enum."""
    enums = set(layout_constants()) | set(_core.Verdict.__members__)
    return {
        name: value
        for name, value in vars(_core).items()
        if re.fullmatch("[A-Z][A-Z0-9_]*", name) and type(value) is int and name not in enums
    }


def test_layout_tables_hold_every_constant_of_the_core(formats):
    documented: dict[str, int] = {}
    for rows in tables(formats, "constant", "offset", "size", "field"):
        for name, offset, size, *_ in rows:
            assert name not in documented, f"{name} is documented twice"
            assert (offset == "–") == (name in SIZES), f"{name}: a size has no offset, a field has one"
            documented[name] = int(size if name in SIZES else offset)
    assert documented == layout_constants()


def test_fields_of_a_layout_lie_side_by_side(formats):
    checked = set()
    for rows in tables(formats, "constant", "offset", "size", "field"):
        at = 0
        for name, offset, size, *_ in rows:
            if name in SIZES:
                if name in ADD_UP_TO:
                    assert at == int(size), f"the fields before {name} take {at} bytes"
                    checked.add(name)
                continue
            assert int(offset) == at, f"{name} stands at {offset}, the field before it ends at {at}"
            at += int(size)
    assert checked == ADD_UP_TO


def test_special_numbers_agree_with_the_core(formats):
    (rows,) = tables(formats, "constant", "value", "meaning")
    documented = {name: int(value, 0) for name, value, _ in rows}
    core = special_numbers()
    assert documented.keys() == core.keys()
    for name, value in documented.items():
        # The magics are written as they look in a dump and kept as signed numbers.
        assert (value - core[name]) % 2**32 == 0 if name.startswith("MAGIC") else value == core[name], name
        if name.startswith("MAGIC"):
            assert 0 <= value < 2**32 and -(2**31) <= core[name] < 2**31


def test_sys_flag_table_agrees_with_the_enum(formats):
    (rows,) = tables(formats, "SysFlag", "mask", "meaning")
    assert {name: int(mask, 0) for name, mask, _ in rows} == {
        name: int(value) for name, value in SysFlag.__members__.items()
    }


def test_default_sizes_agree_with_the_config(formats):
    (rows,) = tables(formats, "option", "default", "gives")
    assert len(rows) >= 6
    defaults = StoreConfig()
    for name, value, _ in rows:
        assert getattr(defaults, name) == int(value), name
    assert f"{defaults.index_file_size:,}".replace(",", " ") in formats


def expression(text: str, lengths: dict[str, int]) -> int:
    """The value of a sum of numbers and names of lengths."""
    total = 0
    for part in text.split("+"):
        part = part.strip()
        total += int(part) if part.isdigit() else lengths[part]
    return total


@pytest.mark.parametrize("key", ["T3", "T4", "T5", "T6"])
def test_moving_fields_are_where_the_table_says(formats, vectors, key):
    (rows,) = tables(formats, "moving field", "offset", "size")
    raw = bytes.fromhex(vectors[key]["hex"])
    fields = vectors[key]["fields"]
    record = oracle.decode_record(raw)
    topic = record.topic.encode()
    lengths = {
        "b": 20 if record.sys_flag & SysFlag.BORN_HOST_V6 else 8,
        "s": 20 if record.sys_flag & SysFlag.STORE_HOST_V6 else 8,
        "t": fields["version"],
        "body": len(record.body),
        "topic": len(topic),
        "properties": len(record.properties_raw),
    }
    expected = {
        "store timestamp": fields["store_timestamp"],
        "store host": fields["store_host"],
        "reconsume times": fields["reconsume_times"],
        "prepared transaction offset": fields["prepared_transaction_offset"],
        "body length": len(record.body),
        "body": record.body,
        "topic length": len(topic),
        "topic": topic,
        "properties length": len(record.properties_raw),
        "properties": record.properties_raw,
    }
    assert [row[0] for row in rows] == list(expected)
    at = _core.RecordLayout.RECORD_BORN_HOST + lengths["b"]
    for name, offset, size, *_ in rows:
        assert expression(offset, lengths) == at, name
        piece = raw[at : at + expression(size, lengths)]
        value = expected[name]
        if isinstance(value, int):
            assert int.from_bytes(piece, "big", signed=True) == value, name
        elif isinstance(value, str):
            assert host_from_bytes(piece) == value
        else:
            assert piece == value, name
        at += len(piece)
    assert at == len(raw)


# ---------------------------------------------------------------------------------------------------------------------
# Hex dumps

DUMP_LINE = re.compile(r"([0-9a-f]{2})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?: {2,}(\S.*?) = (.*))?$")


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump: (position, bytes) of every annotated field, and the annotations."""

    pieces: dict[str, tuple[int, bytes]]
    values: dict[str, str]

    @property
    def data(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces.values())


def read_dump(text: str, kind: str, *, gaps: bool = False) -> Dump:
    (fence,) = fences_with(text, f"hexdump {kind}")
    pieces: dict[str, tuple[int, bytes]] = {}
    values: dict[str, str] = {}
    start, end, unfinished = 0, 0, b""
    for line in fence.lines:
        found = DUMP_LINE.match(line)
        assert found, f"hexdump {kind}: {line!r} is no line of a dump"
        at, data = int(found[1], 16), bytes.fromhex(found[2])
        assert at == end or (gaps and at > end and not unfinished), (
            f"hexdump {kind}: {line!r} does not begin at {end:#x}"
        )
        if not unfinished:
            start = at
        unfinished += data
        end = at + len(data)
        if found[3] is not None:
            assert found[3] not in pieces, found[3]
            pieces[found[3]], values[found[3]] = (start, unfinished), found[4]
            unfinished = b""
    assert not unfinished and pieces
    return Dump(pieces, values)


@pytest.fixture
def region_of(tmp_path):
    """A function `region_of(data) -> Region` over a file with these bytes."""
    regions = []

    def made(data):
        path = tmp_path / f"region-{len(regions)}"
        path.write_bytes(data)
        with path.open("rb") as file:
            regions.append(Region.map(file.fileno(), len(data)))
        return regions[-1]

    yield made
    for region in regions:
        region.close()


def test_dump_of_a_record(formats, vectors, region_of):
    dump = read_dump(formats, "record")
    assert dump.data.hex() == vectors["T8"]["records"][0]["hex"]

    record = oracle.decode_record(dump.data)
    names = ["size", "version", "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag"]
    names += ["born_timestamp", "born_host", "store_timestamp", "store_host", "reconsume_times"]
    names += ["prepared_transaction_offset"]
    by_oracle = {name.replace("physical", "phy"): getattr(record, name) for name in names}
    by_oracle |= {"body": record.body.decode(), "topic": record.topic, **record.properties}
    by_oracle |= {"body_length": len(record.body), "topic_length": len(record.topic.encode())}
    by_oracle |= {"properties_length": len(record.properties_raw)}
    assert dump.values == {name: str(value) for name, value in by_oracle.items()}

    (size, version, body_crc, queue_id, flag, queue_offset, phy_offset, sys_flag, born, born_host, stored, store_host,
     reconsume_times, prepared, body, topic, properties, crc_ok) = _core.decode_record(region_of(dump.data), 0)  # fmt: skip
    by_core = {
        "size": size, "version": version, "body_crc": body_crc, "queue_id": queue_id, "flag": flag,
        "queue_offset": queue_offset, "phy_offset": phy_offset, "sys_flag": sys_flag, "born_timestamp": born,
        "born_host": host_from_bytes(born_host), "store_timestamp": stored, "store_host": host_from_bytes(store_host),
        "reconsume_times": reconsume_times, "prepared_transaction_offset": prepared, "body_length": len(body),
        "body": body.decode(), "topic_length": len(topic.encode()), "topic": topic,
        "properties_length": len(properties), **parse_properties(properties),
    }  # fmt: skip
    assert crc_ok
    assert dump.values == {name: str(value) for name, value in by_core.items()}

    # Every number stands at its line: its bytes are the value.
    for name, value in dump.values.items():
        piece = dump.pieces[name][1]
        if value.isdigit() and name != "version":
            assert int.from_bytes(piece, "big") == int(value), name
        elif name in ("body", "topic"):
            assert piece == value.encode()
        elif name.endswith("host"):
            assert host_from_bytes(piece) == value
        elif name.isupper():
            assert piece == f"{name}\x01{value}\x02".encode()
    for name, position in layout_constants().items():
        field = name.removeprefix("RECORD_").lower().replace("total_size", "size")
        if name.startswith("RECORD_") and name not in SIZES and name != "RECORD_MAGIC":
            assert dump.pieces[field][0] == position, name
    assert oracle.offset_message_id(record.store_host, 0) in formats


def test_dump_of_a_unit(formats, vectors, region_of):
    dump = read_dump(formats, "unit")
    assert dump.data.hex() == vectors["T9"]["units"][0]["hex"]
    unit = oracle.decode_unit(dump.data)
    assert dump.values == {name: str(value) for name, value in dataclasses.asdict(unit).items()}
    assert [int(value) for value in dump.values.values()] == list(_core.read_unit(region_of(dump.data), 0))
    layout = _core.UnitLayout
    assert [at for at, _ in dump.pieces.values()] == [
        layout.UNIT_PHY_OFFSET, layout.UNIT_RECORD_SIZE, layout.UNIT_TAGS_CODE
    ]  # fmt: skip


def index_region(region_of, data: bytes, slots: int) -> IndexRegion:
    places = (len(data) - _core.IndexLayout.INDEX_HEADER_SIZE - 4 * slots) // _core.IndexLayout.ENTRY_SIZE
    index = IndexRegion()
    index.attach(region_of(data), slots, places)
    return index


def test_dump_of_an_index_entry(formats, vectors, region_of):
    dump = read_dump(formats, "entry")
    head = vectors["T10"]["base_first_file"]
    assert dump.data.hex() == head["entries"]["2"]
    data = bytes.fromhex(head["header"] + head["slots"] + 20 * "00" + head["entries"]["1"] + head["entries"]["2"])
    entry = tuple(int(value) for value in dump.values.values())
    assert list(dump.values) == ["key_hash", "phy_offset", "time_diff", "prev_index"]
    assert entry == oracle.IndexOracle(10, 3, data).entry(2)
    assert entry == index_region(region_of, data, 10).read_entry(2)
    assert entry[0] == oracle.index_hash("TopicTest#k1") == _core.index_key_hash("TopicTest", "k1")
    layout = _core.IndexLayout
    assert [at for at, _ in dump.pieces.values()] == [
        layout.ENTRY_KEY_HASH, layout.ENTRY_PHY_OFFSET, layout.ENTRY_TIME_DIFF, layout.ENTRY_PREV_INDEX
    ]  # fmt: skip


def test_dump_of_an_index_file(formats, vectors, region_of):
    dump = read_dump(formats, "index", gaps=True)
    vector = vectors["T10"]
    data = bytes.fromhex(vector["header"] + vector["slots"] + "".join(vector["entries"])).ljust(
        vector["file_size"], b"\0"
    )
    for name, (at, piece) in dump.pieces.items():
        assert data[at : at + len(piece)] == piece, name

    model = oracle.IndexOracle(10, 20, data)
    index = index_region(region_of, data, 10)
    header = {name: int(value) for name, value in dump.values.items() if " " not in name}
    assert header == dataclasses.asdict(model.header)
    assert tuple(header.values()) == index.read_header()
    rest = {name.split()[0]: 0 for name in dump.values if " " in name}
    assert rest.keys() == {"slot", "entry"}
    layout = _core.IndexLayout
    for name, value in dump.values.items():
        kind, _, number = name.partition(" ")
        at, n = dump.pieces[name][0], int(number or 0)
        if kind == "slot":
            assert int(value) == model.slot_value(n) == index.read_slot(n)
            assert at == layout.INDEX_HEADER_SIZE + layout.SLOT_SIZE * n
        elif kind == "entry":
            assert ast.literal_eval(value) == model.entry(n) == index.read_entry(n)
            assert at == layout.INDEX_HEADER_SIZE + layout.SLOT_SIZE * 10 + layout.ENTRY_SIZE * n
    # The chain that the text beside it tells of.
    chain, n = [], index.read_slot(4)
    while n:
        chain.append(n)
        n = index.read_entry(n)[3]
    assert chain == [4, 3, 1] and "slot 4 leads to entry 4, that to 3, that to 1" in " ".join(formats.split())
    for _, phy_offset, timestamp in vector["puts"][3:4]:
        assert index.read_entry(4)[1] == phy_offset and timestamp < header["begin_timestamp"]


# ---------------------------------------------------------------------------------------------------------------------
# Links


def slugs(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    outside, _ = split_fences(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for line in outside.splitlines():
        heading = re.match(r"#{1,6} +(.*?)[ #]*$", line)
        if not heading:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
        slug = re.sub(r"[^\w\- ]", "", text.replace("`", "").lower()).replace(" ", "-")
        number = 1
        unique = slug
        while unique in found:
            unique, number = f"{slug}-{number}", number + 1
        found.add(unique)
    return found


def links(path: Path) -> list[str]:
    outside, _ = split_fences(path.read_text(encoding="utf-8"))
    outside = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda code: "x" * len(code[0]), outside)
    images = IMAGE.findall(outside)
    outside = IMAGE.sub("image", outside)
    return images + LINK.findall(outside) + REFERENCE.findall(outside)


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in links(path):
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", link) or link.startswith("//"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        inside = target == ROOT or ROOT in target.parents
        if not inside or not target.exists() or (anchor and (target.suffix != ".md" or anchor not in slugs(target))):
            broken.append(link)
    return broken


def test_relative_links_resolve():
    files = markdown_files()
    assert {path.relative_to(ROOT).as_posix(): broken for path in files if (broken := broken_links(path))} == {}
    # docs/formats.md and docs/mmap.md point at each other, so the pattern finds links.
    assert "mmap.md" in links(FORMATS)


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n[ok](#a-b-c) [bad](#nowhere) [gone](gone.md) `[no](code.md)` [up](../x.md) [web](https://x.test/a)\n"
        "[![badge](badge.svg)](page.md#A)\n```\n[in](fence.md)\n```\n[ref]: other.md 'Title'\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["badge.svg", "#nowhere", "gone.md", "../x.md", "page.md#A", "other.md"]


# ---------------------------------------------------------------------------------------------------------------------
# Promises


def test_every_promise_names_a_test():
    text = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    text = text.partition("## Promises\n")[2].partition("\n## ")[0]
    rows = tables(text, "failure") + tables(text, "promise")
    assert len(rows) == 2 and sum(map(len, rows)) >= 15
    for row in [row for rows_of_one in rows for row in rows_of_one]:
        folder, names = "", re.findall(r"(?:[\w/]+/)?test_\w+\.py", row[-1])
        assert names, row
        for name in names:
            # A second name has the folder of the first.
            folder = name.rpartition("/")[0] or folder
            assert (ROOT / "tests" / folder / name.rpartition("/")[2]).is_file(), name


# ---------------------------------------------------------------------------------------------------------------------
# Size


def test_the_pages_stay_few_and_short():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert len(pages) <= 35 and sum(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= 5000


def test_the_changelog_summarises_a_release():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, _, released = text.partition("\n## [Unreleased]\n")[2].partition("\n## ")
    # Every release says which layouts it reads and writes.
    for release in released.split("\n## "):
        assert "\nFormat: " in release, release.partition("\n")[0]
        assert len(release.splitlines()) <= 120
    assert released.startswith("0.1.0\n") or "\n## 0.1.0\n" in released
    assert not unreleased.strip() or unreleased.count("\n- ") >= 1


# ---------------------------------------------------------------------------------------------------------------------
# Width

WIDTH = 120


def too_long(text: str) -> list[int]:
    """The numbers of the lines that are over `WIDTH`, but those that commands answered in a block that is run."""
    answered = {
        number
        for fence in split_fences(text)[1]
        if fence.info.partition(" ")[0] in ("console", "pycon", "json", "text")
        for number, line in enumerate(fence.lines, fence.number)
        if not line.lstrip().startswith(("$ ", ">>> ", "... "))
    }
    return [number for number, line in enumerate(text.split("\n"), 1) if len(line) > WIDTH and number not in answered]


def test_no_line_of_a_document_is_over_120_characters():
    # Answers of commands stay as they are.
    found = {path.relative_to(ROOT).as_posix(): too_long(path.read_text(encoding="utf-8")) for path in markdown_files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_lines_that_are_too_long_are_found():
    long = "x" * 121
    text = f"{long}\n```console\n$ {long}\n{long}\n```\n```python\n{long}\n```\n| {long} |\n{'y' * 120}\n"
    assert too_long(text) == [1, 3, 7, 9]


# ---------------------------------------------------------------------------------------------------------------------
# Sessions

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def session_of(path: Path) -> doctest.DocTest | None:
    """All ``pycon`` blocks of a document as one doctest that cites the document's line numbers; None without one."""
    text = path.read_text(encoding="utf-8")
    blocks = fences_with(text, "pycon")
    if not blocks:
        return None
    lines = [""] * (len(text.splitlines()) + 1)
    parser = doctest.DocTestParser()
    for block in blocks:
        assert parser.get_examples("\n".join(block.lines) + "\n"), (
            f"{path.name}:{block.number}: a pycon block without >>>"
        )
        lines[block.number - 1 : block.number - 1 + len(block.lines)] = block.lines
    return parser.get_doctest("\n".join(lines) + "\n", {"__name__": "__main__"}, path.name, str(path), 0)


def run_session(test: doctest.DocTest) -> tuple[int, str]:
    """(failures, report) of running it in the current directory."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    runner.run(test, out=report.write)
    assert runner.tries > 0
    return runner.failures, report.getvalue()


def documents_with_sessions() -> list[Path]:
    # docs/start.md always: without a session it fails.
    docs = sorted((ROOT / "docs").rglob("*.md"))
    start = ROOT / "docs" / "start.md"
    return [start, *(path for path in docs if path != start and fences_with(path.read_text(encoding="utf-8"), "pycon"))]


@pytest.mark.parametrize("path", documents_with_sessions(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_session_runs_as_shown(path, tmp_path, monkeypatch):
    assert path.is_file(), f"{path.name} is missing"
    test = session_of(path)
    assert test is not None, f"{path.name} shows no session: it needs a ```pycon block"
    monkeypatch.chdir(tmp_path)
    failures, report = run_session(test)
    assert not failures, report


def test_a_session_that_is_wrong_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("Text\n```pycon\n>>> a = 1\n```\nthen\n```pycon\n>>> a\n1\n>>> a + 1\n3\n```\n", encoding="utf-8")
    test = session_of(page)
    assert [example.lineno + 1 for example in test.examples] == [3, 7, 9]
    failures, report = run_session(test)
    assert failures == 1 and "line 9" in report
    page.write_text("```python\n>>> 1\n2\n```\n", encoding="utf-8")
    assert session_of(page) is None
