"""Moving token ranges between the ranks of a group."""

from .messages import Comm

__all__ = ["Comm"]
