"""Simulated lives of a vhost: they end well, and they find faults that are planted in the package."""

from __future__ import annotations

import pytest
from vhost_life import LifeFailed, live, main
from vhost_planted import PLANTED

# The first seed from 1 on that finds it.
FOUND_BY = {
    "ack-passed-over": 1,
    "removed-too-early": 7,
    "sync-left-out": 1,
    "damage-unsaid": 2,
    "repair-loses-one": 1,
    "verify-blind-to-lost-messages": 11,
}


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_life(seed):
    life = live(seed, 60)
    assert life.steps >= 60


FAILED_ONCE = (79, 1029, 1137, 1178, 1324, 1388, 1477, 1479, 1534, 1580, 2257, 2299, 2831)


@pytest.mark.parametrize("seed", [*FAILED_ONCE, *range(6, 31)])
def test_another_life(seed):
    # The first two found that damage to a journal went unsaid, and that a repair ended at an odd time; 1137 and 1580
    # that what power left of an entry hid a whole one, 1477 that a message was lost or not as another one was read
    # before.  Of the others model or oracle knew too little.
    live(seed, 60)


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_is_found(name):
    # A fault that stops the simulator itself is not found.
    with PLANTED[name](), pytest.raises(LifeFailed, match="\nAssertionError: "):
        # Another Python may ask the dice in another order.
        for seed in range(FOUND_BY[name], FOUND_BY[name] + 10):
            live(seed, 60)
    live(FOUND_BY[name], 60)


def test_the_command_says_how_to_see_it_again(capsys):
    assert main(["--seed", "1", "--plant", "sync-left-out"]) == 1
    assert "again: python -m tests.rabbitmq.vhost_life --seed 1 --plant sync-left-out" in capsys.readouterr().out
    assert main(["--seed", "3"]) == 0
    assert "seeds 3 to 3: 1 lives, " in capsys.readouterr().out
