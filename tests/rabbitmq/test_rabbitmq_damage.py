"""The catalogue of damage itself: it plants what it says, says what the oracle finds afterwards, and repeats itself.

Needs no node and never imports rmqstore: the golden cases of a real node are what is broken here.
"""

from __future__ import annotations

import random
from pathlib import Path

import classic_queue_oracle as oracle
import damage
import golden
import golden_rabbitmq
import pytest

# For each kind of damage a golden case that has what it needs; 32 has several message files, 13 shares messages.
CASES = {
    "segments": ("02-kill9-segment-plus-journal", "30-kill9-default-2048-segments"),
    "journal": ("02-kill9-segment-plus-journal", "03-kill9-consumer-unacked", "20-clean-rdq-roll-16MiB"),
    "stored": ("32-kill9-gc-merged-files",),
    "clean": ("12-clean-msgstore", "15-clean-ttl"),
    "v2": ("19-clean-v2",),
    "": ("01-kill9-journal-only",),
}


def planted(each: damage.Damage, seed: int, folder: Path):
    """The first golden case that it can be planted in: path, files before, what is expected; None without one."""
    kinds = [kind for kind in CASES if kind in each.needs] or [""]
    for kind in kinds:
        for case in CASES[kind]:
            path = golden_rabbitmq.unpack(case, folder / case)
            before = states(path)
            try:
                return path, before, each.apply(path, random.Random(seed))
            except damage.Unsuitable:
                assert states(path) == before, "a directory that is not suitable was changed"
    return None


def states(path: Path):
    """What `golden.tree` says, and the permissions."""
    return golden.tree(path), {one: one.stat().st_mode for one in path.rglob("*")}


def test_the_catalogue_is_large_and_its_names_are_its_own():
    names = [each.name for each in damage.DAMAGES]
    assert len(names) == len(set(names)) >= 80
    assert all(each.what.endswith(".") for each in damage.DAMAGES)


def test_the_node_was_asked_about_all():
    outcomes = {"delivers", "loses", "more", "reorders", "queue fails", "hangs"}
    for each in damage.DAMAGES:
        assert each.node in outcomes or "user" in each.needs, each.name


@pytest.mark.parametrize("each", damage.DAMAGES, ids=lambda each: each.name)
def test_damage_changes_files_and_says_what_is_left(each, tmp_path):
    found = planted(each, 3, tmp_path)
    if found is None:
        pytest.skip("no golden case has what it needs; the vhosts of a node in tests/interop have")
    path, before, expected = found
    assert states(path) != before
    for name, entry in golden_rabbitmq.manifest(path.parent.name)["queues"].items():
        live = set(golden_rabbitmq.seqs(entry["expect_live_seqs"]))
        assert expected.live.get(entry["dir"], set()) == live, name
    for directory, lost in expected.lost.items():
        assert lost <= expected.live[directory]
    for directory, returned in expected.returned.items():
        assert not returned & expected.live.get(directory, set())
    if "user" in each.needs:
        return
    # The oracle is no repairer, but what it finds is never more than what there is at best.
    if not each.name.startswith(("config_", "segment_is", "segment_stray", "v2_", "terms_next", "terms_count")):
        try:
            after = oracle.read_vhost(path)
        except (oracle.TermError, AssertionError, ValueError, KeyError):
            return
        for directory, queue in after.queues.items():
            allowed = expected.best(directory) | expected.doubtful.get(directory, set())
            assert queue.seqs <= allowed, each.name


def test_damage_repeats_itself(tmp_path):
    for name in ("journal_torn", "segment_zero_tail", "store_bad_marker"):
        each = damage.by_name(name)
        (one, _, first), (other, _, second) = (planted(each, 5, tmp_path / name / str(i)) for i in range(2))
        assert first == second
        for path in one.rglob("*"):
            assert path.is_dir() or path.read_bytes() == (other / path.relative_to(one)).read_bytes()


def test_expectations_are_checked():
    expected = damage.Expected({"q": {1, 2, 3}}, {"q": {3}}, {"q": {9}}, {"q": {2}}, "")
    for good in ({1, 9}, {1, 2, 9}):
        expected.check({"q": good})
    for bad in ({1}, {9}, {1, 3, 9}, {1, 9, 10}):
        with pytest.raises(AssertionError):
            expected.check({"q": bad})
    with pytest.raises(AssertionError):
        expected.check({})
