"""The program ``rmqstore``, also as ``python -m rmqstore``; it reports missing libraries of the command line."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

__all__ = ["main"]

# Those of the extra `cli`.
_LIBRARIES = ("click", "rich")
_CANNOT_OPEN = 3
_INTERRUPTED = 128 + 2


def main(name: str | None = None) -> None:
    """Run the command line as the program `name`; exit with 3 and a line on stderr if its libraries are missing."""
    absent = [library for library in _LIBRARIES if find_spec(library) is None]
    if absent:
        print(
            f"rmqstore: the command line requires {' and '.join(absent)}: install with pip install 'rmqstore[cli]'",
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
