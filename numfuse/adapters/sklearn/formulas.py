"""Formulas of the adapter's own: recorded as a user's are, under no name that a user could take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numfuse import definitions
from numfuse.definitions import UserEpilogue


def recorded(name: str, source: str) -> Callable[[Callable[..., Any]], UserEpilogue]:
    """Return a decorator that makes an epilogue of a formula."""
    return lambda formula: definitions.recorded(formula, name, source)
