"""From a long plan that fails to a short one: delta debugging (ddmin) over its operations.

Owns the order of attempts: first whole sessions are left out, then single operations.  It judges nothing; who calls it says
whether a plan fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .plan import ROT, Operation


def ddmin(parts: list, fails: Callable[[list], bool], until: float) -> list:
    """The shortest list of parts that was found to fail, none of which can be left out alone if the time was enough."""
    pieces = 2
    while len(parts) >= 2 and time.monotonic() < until:
        size = -(-len(parts) // pieces)
        for begin in range(0, len(parts), size):
            rest = parts[:begin] + parts[begin + size :]
            if time.monotonic() >= until:
                return parts
            if rest and fails(rest):
                parts, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                return parts
            pieces = min(pieces * 2, len(parts))
    return parts


def shrink(plan: list[Operation], fails: Callable[[list[Operation]], bool], seconds: float) -> list[Operation]:
    """A short plan that still fails, found within about so many seconds."""
    until = time.monotonic() + seconds
    head = [operation for operation in plan[:2] if operation[0] in ("mix", "store")]
    rest = plan[len(head) :]
    groups: list[list[Operation]] = []
    for operation in rest:
        if operation[0] in ("session", *ROT) or not groups:
            groups.append([])
        groups[-1].append(operation)

    def flat(parts: list[list[Operation]]) -> list[Operation]:
        return head + [operation for part in parts for operation in part]

    groups = ddmin(groups, lambda parts: fails(flat(parts)), until)
    operations = [operation for part in groups for operation in part]
    operations = ddmin(operations, lambda parts: fails(head + parts), until)
    return head + operations
