"""The measure of the measure: each fault that is planted in the package is found within a bounded number of steps.

Owns which are planted, and how many steps they may take; docs/testing.md says how many they took.
"""

from __future__ import annotations

import re

import pytest

from .test_simulator import ROOT, simulate

#: Several times what any of them took.
STEPS = 15_000
#: Where a life from another seed finds it sooner.
FIRST_SEEDS = {"blank_believed": 5, "checkpoint_ahead_of_the_log": 18}
PLANTED = re.findall(
    r"^@planted\ndef (\w+)", (ROOT / "tests" / "simulator" / "planted.py").read_text(encoding="utf-8"), re.M
)


def test_enough_is_planted():
    assert len(PLANTED) >= 10
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert not [name for name in PLANTED if f"`{name.replace('_', '-')}`" not in text]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    seed = str(FIRST_SEEDS.get(name, 1))
    ran = simulate("--plant", name.replace("_", "-"), "--seed", seed, "--steps", str(STEPS), "--shrink", "0", timeout=1700)
    assert ran.returncode == 1, f"not found: {ran.stdout}{ran.stderr}"
    assert re.search(r"^seed \d+ failed after \d+ steps", ran.stdout, re.M), ran.stdout
    # Found is what the fault breaks, and not a fault that fits the package no more.
    assert not re.search(r"^(TypeError|AttributeError|NameError|ImportError)", ran.stdout, re.M), ran.stdout
    assert ran.stderr == ""
