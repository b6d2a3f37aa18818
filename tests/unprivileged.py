"""Lets a test that runs as root meet closed folders as everybody else does: no tests.

Only what this thread may do now changes, and the threads that it starts; it gets everything back at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

import pytest

_VERSION_3 = 0x20080522
# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: to read and search whatever its mode says.
_READING_ALL = 1 << 1 | 1 << 2


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def _set(data):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), ctypes.byref(data)):
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def unprivileged():
    """Meanwhile the modes of files and folders count for this thread, be it root's or not."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root may read everything here")
    data = (_Data * 2)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(ctypes.byref(_Header(_VERSION_3, 0)), ctypes.byref(data)):
        pytest.skip("what root may do cannot be asked here")
    before = data[0].effective
    data[0].effective = before & ~_READING_ALL
    _set(data)
    try:
        yield
    finally:
        data[0].effective = before
        _set(data)


@contextlib.contextmanager
def closed(folder, mode=0):
    """Meanwhile the folder has this mode, and nobody is above it."""
    folder.chmod(mode)
    try:
        with unprivileged():
            yield
    finally:
        folder.chmod(0o755)
