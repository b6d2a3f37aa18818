"""The fixtures that hand out the Java peers; shared by every test that compares with the real RocketMQ."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from peer import JavaBroker, JavaStore

# Its asserts say what differs, as those in the tests do.
pytest.register_assert_rewrite("answers")


@pytest.fixture(scope="session")
def java_store() -> Iterator[JavaStore]:
    """The Java store.  Without it a test is skipped with the reason; with CI=true it fails, since it must be there."""
    reason = JavaStore.unavailable_reason()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason} (required when CI=true)")
        pytest.skip(reason)
    with JavaStore() as store:
        yield store


@pytest.fixture(scope="session")
def java_broker(java_store) -> type[JavaBroker]:
    """The class `JavaBroker`, where it can be used; skipped or failed otherwise as `java_store` is."""
    return JavaBroker
