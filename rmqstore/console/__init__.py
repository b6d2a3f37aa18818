"""The web console: pages, a JSON API and metrics over a store, read-only.

Owns `app`, which puts them together.  Nothing here writes to a store, and every response is one that a hostile message body
can do nothing in (`rmqstore.console.gate`).  Needs the extra ``console``; ``import rmqstore`` loads nothing of it.
"""

from rmqstore.errors import MissingDependencyError

try:
    import jinja2  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"the console needs {error.name}: install it with pip install 'rmqstore[console]'"
    ) from error

from rmqstore.console.application import app

__all__ = ["app"]
