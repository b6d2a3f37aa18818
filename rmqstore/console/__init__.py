"""The web console: pages, a JSON API and metrics over a store, read-only.

Owns `app`, which puts them together.  Nothing here writes to a store, and hostile message bodies are inert in every response
(`rmqstore.console.gate`).  Needs the extra ``console``; ``import rmqstore`` loads nothing of it.

From a request to a response: `application` (routes, errors), `gate`, `questions` (parameters), `views` (the answer of each
question), then JSON or `rendering`.

- `application`: routes, errors, putting it together
- `gate`: hosts, token, origin, methods, response headers
- `traffic`: bounds on connections and on answers on their way
- `questions`: the table of questions with their parameters; the OpenAPI document
- `views`: the answer to each question, and what its page shows besides
- `rendering`: templates, charts, views of a body
- `answers`: messages, queues and what waits, as plain values; `overview_answers`, `list_answers`, `rabbitmq_answers`: the others
- `survey`: figures of all queues, part by part; `rows`: order and sums of rows, errors
- `anatomy`: a record's fields, its queue units, its index entries
- `followed_store`: the open store, and when it is opened again; one verify run at a time
"""

from rmqstore.errors import MissingDependencyError

try:
    import jinja2  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"the console needs {error.name}: install it with pip install 'rmqstore[console]'"
    ) from error

from rmqstore.console.application import app

__all__ = ["app"]
