"""The build that libFuzzer sees: a branch behind a branch in compiled code is found by what the one before it told.

Owns the proof that ci/fuzz/coverage.c tells edges.  The planted function compares six bytes, each only where the one before was
right, and no comparison is told (no trace-cmp): chance alone would need some 2^48 inputs.  The same function, built without the
edges, is not found within as many.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS = 4_000_000

PLANTED = r"""
#include <stddef.h>
int planted(const unsigned char *bytes, size_t size) {
    if (size < 6) return 0;
    if (bytes[0] == 0xDA) if (bytes[1] == 0xA3) if (bytes[2] == 0x20)
    if (bytes[3] == 0xA7) if (bytes[4] == 0x52) if (bytes[5] == 0x43) return 1;
    return 0;
}
"""

TARGET = r"""
import ctypes, sys
import atheris
planted = ctypes.CDLL(sys.argv.pop(1)).planted
planted.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
def judge(data):
    if planted(data, len(data)):
        raise AssertionError("the planted branch was taken")
atheris.Setup(sys.argv, judge)
atheris.Fuzz()
"""


def fuzz(tmp_path, name, *flags):
    atheris = pytest.importorskip("atheris", reason="there is no atheris; `make fuzz` installs it where it can be had")
    (tmp_path / "planted.c").write_text(PLANTED)
    (tmp_path / "target.py").write_text(TARGET)
    library = tmp_path / f"{name}.so"
    # Not optimised: the branches are to stay branches.
    build = ["gcc", "-O0", "-shared", "-fPIC", *flags, "planted.c", "-o", library]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=240)
    return subprocess.run(
        [sys.executable, "target.py", library, f"-runs={RUNS}", "-seed=1", "-max_len=16", "-len_control=0"],
        cwd=tmp_path,
        env={**os.environ, "LD_PRELOAD": os.path.join(atheris.path(), "ubsan_with_fuzzer.so")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_branches_of_compiled_code_are_found_by_their_edges(tmp_path):
    seen = fuzz(tmp_path, "seen", "-fsanitize-coverage=trace-pc", str(ROOT / "ci" / "fuzz" / "coverage.c"))
    assert "the planted branch was taken" in seen.stderr + seen.stdout and seen.returncode != 0
    # Each of the branches was an edge of its own.
    assert max(int(number) for number in re.findall(r"\bcov: (\d+)", seen.stderr)) >= 6
    unseen = fuzz(tmp_path, "unseen")
    assert "the planted branch was taken" not in unseen.stderr + unseen.stdout
    assert unseen.returncode == 0 and f"Done {RUNS} runs" in unseen.stderr
