"""The fixture that hands out the Java peer; shared by every test that compares with the real RocketMQ store."""

from __future__ import annotations

import os

import pytest
from peer import JavaStore


@pytest.fixture(scope="session")
def java_store() -> JavaStore:
    """The Java peer.  Without it a test is skipped with the reason; with CI=true it fails, since it must be there."""
    reason = JavaStore.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    return JavaStore()
