"""The program ``rmqstore``, also as ``python -m rmqstore``.

Owns what is said where the libraries of the command line are not installed: the package itself needs none of them.
"""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

__all__ = ["main"]

# What the extra `cli` brings.
_LIBRARIES = ("click", "rich")
# As `rmqstore.cli.group.CANNOT_OPEN`, which cannot be loaded then.
_CANNOT_OPEN = 3
_INTERRUPTED = 128 + 2


def main(name: str | None = None) -> None:
    """Run the command line; exit with 3 and one line that says what to install if its libraries are not there.

    Parameters
    ----------
    name : str, optional
        What the program is called in its help; by default as it was started.
    """
    absent = [library for library in _LIBRARIES if find_spec(library) is None]
    if absent:
        print(
            f"rmqstore: the command line needs {' and '.join(absent)}: install it with pip install 'rmqstore[cli]'",
            file=sys.stderr,
        )
        sys.exit(_CANNOT_OPEN)
    try:
        from rmqstore.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    # Answers of hundreds of thousands of rows contain no cycles; looking for some at the usual rate takes a fifth of the time.
    gc.set_threshold(100_000)
    command(prog_name=name)


if __name__ == "__main__":
    main("rmqstore")
