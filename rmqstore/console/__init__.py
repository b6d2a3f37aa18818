"""The web console: pages, a JSON API and metrics over a store, read-only.

Owns `app`, which puts them together.  Nothing here writes to a store, and every response is one that a hostile message body
can do nothing in (`rmqstore.console.gate`).  Needs the extra ``console``; ``import rmqstore`` loads nothing of it.

- `application`: the addresses; putting pages, API and gate together
- `connections`: how many connections, and how long one may keep silent
- `downloads`: answers on their way, in parts; how many bytes of them
- `gate`: hosts, token, origin, methods, response headers
- `pages`, `api`: what each address shows; the table behind API and OpenAPI document
- `answers`: answers as plain values; of parts of their own: `overview_answers`, `consumer_answers`, `index_answers`,
  `settings_answers`, `rabbitmq_answers`, `health`
- `survey`: what all queues hold, looked at part by part; `lists`: order and sums of rows
- `parameters`: what an address says; `rendering`: templates; `charts`: where bars stand; `bodies`; `errors`
- `anatomy`: a record's fields, its queue units, its index entries
- `followed_store`: the open store, and when it is opened again
- `verify_run`: one verify run at a time
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
