"""What to say where the compiled core is missing beside this source code.

Owns one sentence and the names of the modules.  It imports nothing of the package, for nothing of it works then.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.machinery import PathFinder

COMPILED = tuple(
    f"rmqstore.{name}" for name in ("_core", "_dispatch", "_columns", "_rows", "message._read")
)


def explain(name: str) -> str:
    """Return the reason why the compiled module `name` is missing, and what to do."""
    here = os.path.dirname(os.path.abspath(__file__))
    top = os.path.dirname(here)
    text = (
        f"the compiled core ({name.replace('.', '/')}{sysconfig.get_config_var('EXT_SUFFIX')}) is not in {here}, "
        f"from where Python {sys.version_info.major}.{sys.version_info.minor} imports rmqstore. "
    )
    elsewhere = [path for path in sys.path if os.path.realpath(path or os.curdir) != os.path.realpath(top)]
    installed = PathFinder.find_spec("rmqstore", elsewhere)
    if installed is not None and installed.origin is not None:
        text += f"This source folder hides the package installed in {os.path.dirname(installed.origin)}: "
        return text + "start Python in another folder (or with -P), or build the core here with `make build`."
    return text + "Build it with `make build` in the checkout, or install the package with `pip install .`."
