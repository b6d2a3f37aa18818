"""What a question to the console can be answered with instead of an answer.

Owns the exceptions that become the statuses 404 and 400; those of the store are `rmqstore.errors`.
"""

__all__ = ["BadQueryError", "NotFoundError"]


class NotFoundError(LookupError):
    """There is nothing under that name or at that place."""


class BadQueryError(ValueError):
    """A question that cannot be asked like that; the text says how."""
