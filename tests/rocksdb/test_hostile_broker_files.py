"""Random bytes in place of the databases and files of a 5.x broker, with the target of the fuzzer."""

from __future__ import annotations

import pytest
from fuzz import broker_files
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("seed", broker_files.SEEDS, ids=range(len(broker_files.SEEDS)))
def test_seeds_are_what_they_are_for(seed):
    broker_files.judge(seed)
    for at in range(1, len(seed)):
        broker_files.judge(seed[:at])
        broker_files.judge(seed[:at] + bytes([seed[at] ^ 0x80]) + seed[at + 1 :])


def test_the_seeds_of_files_hold_one_entry_each():
    kinds = broker_files.KINDS
    assert {seed[0] for seed in broker_files.SEEDS} == set(range(len(kinds)))
    entries = broker_files.Entries(broker_files.SEEDS[0][1:])
    assert len(broker_files.waiting.read_timers(entries).timers) == 1
    (key, value), = broker_files.Entries(broker_files.SEEDS[2][1:]).entries.items()
    assert isinstance(broker_files.waiting._record(key, value), broker_files.waiting.PopRecord)
    (key, value), = broker_files.Entries(broker_files.SEEDS[3][1:]).entries.items()
    assert broker_files.index.parse_entry(key, value).phy_offset == 9


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(broker_files.KINDS) - 1), st.binary(max_size=400))
def test_any_bytes(kind, data):
    broker_files.judge(bytes([kind]) + data)
