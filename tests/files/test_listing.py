"""Directories as they are listed: what is there, what is not, and what cannot be read."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from rmqstore.errors import DiskFullError
from rmqstore.files.listing import ask_again, is_empty, listing
from rmqstore.files.os_errors import is_missing, is_unreadable, naming_errors, says_full


def refused(number, path="there"):
    return OSError(number, os.strerror(number), path)


def test_entries_are_sorted_and_chosen(tmp_path):
    for name in ("b", "a", "10", "9"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    found = listing(tmp_path)
    assert found.names == ["10", "9", "a", "b", "folder", "link"]
    assert found.paths == [str(tmp_path / name) for name in found.names]
    assert found.error is None and found.checked() is found and len(found) == 6 and found
    # A link to a directory is one.
    assert listing(tmp_path, os.DirEntry.is_dir).names == ["folder", "link"]
    assert not listing(tmp_path / "folder") and is_empty(tmp_path / "folder") and not is_empty(tmp_path)


@pytest.mark.parametrize("below", ["nothing", "file", "file/below"])
def test_what_is_missing(tmp_path, below):
    (tmp_path / "file").write_bytes(b"")
    found = listing(tmp_path / below)
    assert found.error is not None and is_missing(found.error) and not found.names
    assert found.existing() is found and found.existing(unreadable=True) is found
    # A file in the place of a directory is something that is there.
    assert (found.problem is None) == (below == "nothing")
    with pytest.raises(type(found.error)):
        found.checked(is_unreadable)
    with pytest.raises(type(found.error)):
        is_empty(tmp_path / below)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ELOOP, errno.EMFILE])
def test_what_cannot_be_read(tmp_path, monkeypatch, number):
    def refuse(path):
        raise refused(number, path)

    monkeypatch.setattr("rmqstore.files.listing.os.scandir", refuse)
    found = listing(tmp_path)
    of_the_file = number != errno.EMFILE
    assert is_unreadable(found.error) == of_the_file
    assert found.problem is found.error and found.unreadable is (found.error if of_the_file else None)
    for passing in [{}, {"unreadable": True}]:
        if passing and of_the_file:
            assert found.existing(**passing) is found
        else:
            with pytest.raises(OSError) as caught:
                found.existing(**passing)
            assert caught.value is found.error


def test_an_error_about_an_entry_is_one_of_the_listing(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    found = listing(tmp_path, os.DirEntry.is_dir)
    assert found.unreadable is not None and not found.entries


def test_errors_are_named_once():
    with pytest.raises(OSError) as caught, naming_errors("there"):
        raise OSError(errno.EIO, "broken")
    assert (caught.value.filename, caught.value.errno, caught.value.strerror) == ("there", errno.EIO, "broken")
    for filename in (None, "named"):
        with pytest.raises(DiskFullError, match="No space left on device: free space") as caught, naming_errors("there"):
            raise OSError(errno.ENOSPC, "no room", filename)
        assert caught.value.filename == caught.value.path == (filename or "there") and caught.value.errno == errno.ENOSPC
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.filename, copy.errno) == (str(caught.value), caught.value.filename, errno.ENOSPC)
    own = refused(errno.EIO)
    with pytest.raises(OSError) as caught, naming_errors("elsewhere"):
        raise own
    assert caught.value is own
    assert says_full("IO error: No space left on device") and says_full(f"(os error {errno.EDQUOT})") and not says_full("damaged")


@pytest.mark.parametrize("tries", [0, 2])
def test_the_last_error_is_raised(tries):
    calls, told, refreshed = [], [], []

    def ask():
        calls.append(1)
        raise FileNotFoundError(len(calls))

    with pytest.raises(FileNotFoundError) as caught:
        ask_again(ask, lambda: refreshed.append(1), FileNotFoundError, tries, lambda number, error: told.append(number))
    assert caught.value.args == (tries + 1,)
    assert (len(calls), len(refreshed), told) == (tries + 1, tries, list(range(1, tries + 2)))


def test_other_errors_are_not_asked_again():
    with pytest.raises(ValueError):
        ask_again(lambda: int("x"), lambda: pytest.fail("refreshed"), FileNotFoundError)
