"""The simulator itself: the same seed gives the same life, a plan can be replayed, and a failing one becomes short.

Owns nothing of what a store must be; that the simulator sees what is wrong with one is the matter of test_planted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def simulate(*arguments: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
    """The command, finished; the package that is tested stays the one that is imported."""
    if not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        assert not os.environ.get("CI"), "the simulator needs Linux and a C compiler, and CI must run it"
        pytest.skip("needs Linux (LD_PRELOAD) and a C compiler: install gcc or clang")
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def test_a_seed_gives_one_life():
    lives = []
    for _ in range(2):
        ran = simulate("--seed", "3", "--steps", "500", "--length", "300")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        # Seconds, and steps in each of them, are the only numbers that may differ.
        lives.append(re.sub(r"in [0-9.]+ s, [0-9]+ steps/s, [0-9.]+ s of a processor", "", ran.stdout.splitlines()[-1]))
    assert lives[0] == lives[1]
    assert "digest" in lives[0] and "killed" in lives[0]


def test_a_failing_seed_says_how_to_see_it_again_and_becomes_short(tmp_path):
    planted = ("--plant", "index-entry-to-the-wrong-offset")
    ran = simulate("--seed", "1", "--length", "300", "--steps", "3000", "--shrink", "20", *planted)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    again = re.search(r"^again: python -m tests.simulator (--seed \d+ --length 300) --plant \S+$", ran.stdout, re.M)
    assert again, ran.stdout
    short = re.search(r"^(\d+) operations became (\d+): python -m tests.simulator --replay (\S+)", ran.stdout, re.M)
    assert short, ran.stdout
    assert int(short[1]) >= 300 and int(short[2]) <= 20
    plan = json.loads((ROOT / short[3]).read_text())["plan"]
    assert len(plan) == int(short[2])
    # The plan alone fails with the fault, and is a life like any other without it.
    assert simulate("--replay", short[3], *planted).returncode == 1
    ran = simulate("--replay", short[3])
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_simulator_that_keeps_going_tells_of_each_seed_that_fails():
    planted = ("--plant", "index-entry-to-the-wrong-offset")
    ran = simulate("--seed", "1", "--length", "300", "--steps", "3000", "--shrink", "0", "--keep-going", *planted)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = re.findall(r"^seed (\d+) failed after", ran.stdout, re.M)
    assert len(failed) > 1 and f" lives ({len(failed)} failed), " in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "seed",
    "522 866 897 1341 1372 1403 1520 2164 2376 2638 3234 3265 10331 21618 22362".split(),
)
def test_a_seed_beyond_those_of_every_run_that_once_failed(seed):
    ran = simulate("--seed", seed, "--shrink", "0")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_model_does_not_know_the_package():
    text = (Path(__file__).parent / "model.py").read_text(encoding="utf-8") + (
        Path(__file__).parent / "plan.py"
    ).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) rmqstore", text, re.M)
