"""Special files in a vhost: no reader may wait or read forever.

Owns that every kind of file is opened as a regular one: a FIFO or an endless device in its place is an error of ours, or
a finding, in a moment.
"""

from __future__ import annotations

import os
import resource
import signal

import golden_rabbitmq
import pytest

from rmqstore import StoreError
from rmqstore.rabbitmq import QueueIndex, Vhost, repair, verify

CASES = {
    "02-kill9-segment-plus-journal": {"idx"},
    "03-kill9-consumer-unacked": {"journal.jif", "rdq", ".queue_name", ".vhost", ".config"},
    "13-clean-fanout-refcount": {"clean.dot", "file_summary.ets", "msg_store_index.ets", "recovery.dets"},
    "19-clean-v2": {"qi", "qs"},
}


class TooLongError(Exception):
    pass


@pytest.fixture
def bounded():
    """Twenty seconds and 4 GiB, so that what hangs or grows fails instead."""

    def stop(*_):
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # A sanitizer reserves terabytes of addresses.
    if not os.environ.get("RMQSTORE_SANITIZE"):
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, limits[1]))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", ["fifo", "zero"])
@pytest.mark.parametrize(("case", "wanted"), [(case, wanted) for case in CASES for wanted in sorted(CASES[case])])
def test_a_file_that_is_none_neither_hangs_nor_grows(tmp_path, bounded, case, wanted, kind):
    vhost = golden_rabbitmq.unpack(case, tmp_path)
    found = [path for path in sorted(vhost.rglob("*")) if path.name == wanted or path.suffix == f".{wanted}"]
    if not found:
        # A node writes the file only in some cases; a reader always tries to open it.
        assert wanted in (".config", ".vhost")
        found = [vhost / wanted]
    for path in found:
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    try:
        list(verify(vhost))
    except (StoreError, OSError) as error:
        assert str(error)
    try:
        with Vhost.open(vhost) as opened:
            for queue in opened.queues():
                for _ in queue.messages():
                    pass
    except (StoreError, OSError) as error:
        assert str(error)


@pytest.mark.parametrize(
    ("case", "name", "kind"),
    [
        ("03-kill9-consumer-unacked", "journal.jif", "unreadable"),
        ("13-clean-fanout-refcount", "clean.dot", "clean_state_ignored"),
        ("13-clean-fanout-refcount", "file_summary.ets", "clean_state_ignored"),
        ("13-clean-fanout-refcount", "recovery.dets", "bad_recovery_terms"),
        ("19-clean-v2", "0.qi", "beyond_range"),
    ],
)
def test_a_file_whose_size_is_damaged_takes_no_memory(tmp_path, bounded, case, name, kind):
    # Each was read whole, which ended every command with a MemoryError, or took the machine's memory.
    vhost = golden_rabbitmq.unpack(case, tmp_path / "vhost")
    with Vhost.open(vhost) as opened:
        wanted = [message.body for queue in opened.queues() for message in queue.messages()]
    found = sorted(vhost.rglob(name))
    for path in found:
        os.truncate(path, 8 << 30)
    findings = list(verify(vhost))
    assert {(finding.kind, finding.path) for finding in findings} >= {(kind, str(path)) for path in found}
    with Vhost.open(vhost) as opened:
        given = [message.body for queue in opened.queues() for message in queue.messages()]
    if name == "journal.jif":
        assert set(given) <= set(wanted)
        with pytest.raises(OSError, match="at most"):
            QueueIndex.open(found[0].parent)
        # It says no less than a journal that may not be read.
        with pytest.raises(StoreError, match="make it readable"):
            repair(vhost, tmp_path / "repaired")
    else:
        assert given == wanted
        assert repair(vhost, tmp_path / "repaired").lost == 0
