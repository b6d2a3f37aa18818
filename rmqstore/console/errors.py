"""What a question to the console can be answered with instead of an answer.

Owns the exceptions that become the statuses 404 and 400, and how an error reads; those of the store are `rmqstore.errors`.
"""

import os

from rmqstore.errors import StoreError

__all__ = ["BadQueryError", "NotFoundError", "error_text"]


class NotFoundError(LookupError):
    """There is nothing under that name or at that place."""


class BadQueryError(ValueError):
    """A question that cannot be asked like that; the text says how."""


def error_text(error: Exception) -> str:
    """str: what an error says; one of the system as the command line has it: its reason, and the path that it is about."""
    if isinstance(error, OSError) and not isinstance(error, StoreError) and error.filename is not None:
        return f"{error.strerror or type(error).__name__} [{os.fsdecode(error.filename)}]"
    return str(error)
