"""The plain loops in C (c/*.c), which are the limit: compiled and run as processes of their own.

Owns only that; what a loop does says its source, and what its answer means says who runs it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "c"


def compile_loop(folder: str, name: str) -> str:
    """Compile the loop `name` into `folder`; why that was not possible, else nothing."""
    compiler = os.environ.get("CC", "cc")
    source = SOURCES / f"{name}.c"
    try:
        subprocess.run(
            [
                compiler,
                "-O3",
                "-std=gnu11",
                "-Wall",
                "-Werror",
                "-pthread",
                "-o",
                os.path.join(folder, name),
                str(source),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
    except OSError:
        return f"there is no C compiler {compiler}"
    except subprocess.CalledProcessError as error:
        return f"{compiler} refused {source.name}: {error.stderr}"
    return ""


def crc_of(folder: str, name: str) -> str:
    """How a compiled loop computes a CRC on this machine."""
    said = subprocess.run([os.path.join(folder, name), "--crc"], check=True, capture_output=True, text=True)
    return said.stdout.strip()


def compiled(folder: str, name: str) -> tuple[str, str]:
    """Compile the loop `name`: what its title in tables ends with, the kind of its CRC, and why it cannot run, else nothing."""
    why_not = compile_loop(folder, name)
    return "" if why_not else f", CRC by {crc_of(folder, name)}", why_not


def run_loop(folder: str, name: str, *arguments: object) -> list[int]:
    """Run a compiled loop; the numbers that it prints, nanoseconds first."""
    command = [os.path.join(folder, name), *map(str, arguments)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(number) for number in result.stdout.split()]
