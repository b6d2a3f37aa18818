"""What a call costs in Python at least: an extension in C that does nothing (`asv_bench/constant.c`).

Owns its compiling and loading.  It has the store's calls with one key by their names, so that the same loop runs over both.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from ..instructions import build_constant

CONSTANT = "an extension in C that does nothing, one call"


def constant_of(folder: str, answer: object) -> Any:
    """An object whose calls give `answer` and do nothing, compiled below `folder`."""
    path = os.path.join(folder, "constant.so")
    if not os.path.exists(path):
        build_constant(Path(folder))
    spec = importlib.util.spec_from_file_location("constant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Constant(answer)
