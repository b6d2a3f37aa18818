"""What figures depend on: the machine and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def described() -> dict[str, Any]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    memory = 0
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, StopIteration, ValueError):
        pass
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that was measured, with a mark when the tree differs from it."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
