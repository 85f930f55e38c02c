"""Expands a .wgsl file of this folder: WGSL with repeated, optional and bound text.

WGSL has neither macros nor a promise that a loop is unrolled, and a register tile has to be.  A
file here is WGSL but for

- ``//$ for i in range(MR):`` ... ``//$ end`` repeats the lines between,
- ``//$ if BATCHED:`` ... ``//$ else:`` ... ``//$ end`` keeps one part of them,
- ``$NAME`` and ``${expression}`` stand for the value of a Python expression.

The expressions see the bindings (UPPER case: bound at specialisation) and the loop variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["expand"]

_DIRECTIVE = re.compile(r"\s*//\$\s*(for|if|else|end)\b(.*)")
_VALUE = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_]\w*)")
_LOOP = re.compile(r"\s*(\w+)\s+in\s+(.*):\s*")


@cache
def _lines(name: str) -> list[str]:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return text.splitlines()


def expand(name: str, bindings: Mapping[str, Any]) -> str:
    """The text of the file `name` with these bindings.

    Raises
    ------
    NameError
        An expression names what is not bound.
    """
    lines = _lines(name)
    out: list[str] = []
    end = _expand(lines, 0, {"__builtins__": {"range": range}, **bindings}, out)
    assert end == len(lines), f"{name}: line {end + 1} ends a part that no line began"
    return "\n".join(out) + "\n"


def _expand(lines: list[str], at: int, scope: dict[str, Any], out: list[str] | None) -> int:
    """Expand from line `at` to the line that ends this part; None: only look for its end."""

    def value(match: re.Match[str]) -> str:
        return str(eval(match[1] or match[2], scope))

    while at < len(lines):
        directive = _DIRECTIVE.match(lines[at])
        if directive is None:
            if out is not None:
                out.append(_VALUE.sub(value, lines[at]))
            at += 1
            continue
        word, rest = directive.groups()
        if word in ("else", "end"):
            return at
        if word == "if":
            holds = out is not None and bool(eval(rest.strip().removesuffix(":"), scope))
            at = _part(lines, at + 1, scope, out if holds else None)
            if _DIRECTIVE.match(lines[at])[1] == "else":  # type: ignore[index]
                at = _part(lines, at + 1, scope, out if out is not None and not holds else None)
        else:
            loop = _LOOP.fullmatch(rest)
            assert loop is not None, f"line {at + 1}: expected `for NAME in ...:`, got {rest!r}"
            body = at + 1
            if out is not None:
                for item in eval(loop[2], scope):
                    _expand(lines, body, {**scope, loop[1]: item}, out)
            at = _part(lines, body, scope, None)
        at += 1
    return at


def _part(lines: list[str], at: int, scope: dict[str, Any], out: list[str] | None) -> int:
    """Expand the part that begins at line `at`, and has an end."""
    end = _expand(lines, at, scope, out)
    assert end < len(lines), f"the part after line {at} has no end"
    return end
