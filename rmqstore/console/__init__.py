"""The web console: read-only pages, a JSON API and metrics of a store.

It requires the extra ``console``; ``import rmqstore`` loads none of it.  Hostile message bodies are inert in every response.

- `application`: `app`, routes, errors
- `gate`: hosts, token, origin, methods, response headers
- `traffic`: limits on connections and responses
- `questions`: the table of questions with their parameters; the OpenAPI document
- `views`: the answer to each question, and its page
- `rendering`: templates, charts, views of a body
- `answers`: messages, queues and pending messages; `overview_answers`, `list_answers`, `rabbitmq_answers`: the other answers
- `survey`: figures of all queues, part by part; `rows`: order and sums of rows, errors
- `anatomy`: a record's fields, its queue units, its index entries
- `followed_store`: the open store, refreshed or reopened; one verify run at a time
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
