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
from types import CodeType
from typing import Any

_DIRECTIVE = re.compile(r"\s*//\$\s*(for|if|else|end)\b\s*(.*?):?\s*")
_VALUE = re.compile(r"\$\{([^}]*)\}|\$([A-Za-z_]\w*)")
_LOOP = re.compile(r"(\w+(?:, \w+)*)\s+in\s.*")


@cache
def _lines(name: str) -> tuple[str, ...]:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return tuple(text.splitlines())


def expand(name: str, bindings: Mapping[str, Any]) -> str:
    """Return the text of the file `name` with these bindings; NameError where one is missing."""
    out: list[str] = []
    scope: dict[str, Any] = {"__builtins__": {"range": range}, **bindings, "put": out.append}
    scope["drop"] = lambda *names: [scope.pop(name, None) for name in names]
    exec(_program(name, tuple(_lines(name))), scope)
    return "\n".join(out) + "\n"


@cache
def _program(name: str, lines: tuple[str, ...]) -> CodeType:
    """Return the Python program that puts the lines of a file, one after another."""
    code: list[str] = []
    inside: list[str] = []  # the loop variable of every part that is open, or nothing
    for number, line in enumerate(lines, 1):
        directive = _DIRECTIVE.fullmatch(line)
        if directive is None:
            values = "".join(f"{a or b}, " for a, b in _VALUE.findall(line))
            text = "%s".join(x.replace("%", "%%") for x in _VALUE.split(line)[::3])
            code.append(" " * len(inside) + f"put({text!r} % ({values}))")
            continue
        word, rest = directive.groups()
        if word in ("else", "end"):
            assert inside, f"{name}: line {number} ends a part that no line began"
            variable = inside.pop()
            if variable:  # (it does not outlive its loop)
                code.append(" " * len(inside) + f"drop{(*variable.split(', '),)}")
        if word == "for":
            loop = _LOOP.fullmatch(rest)
            assert loop is not None, f"line {number}: expected `for NAME in ...:`, got {rest!r}"
        if word != "end":
            code.append(" " * len(inside) + f"{word} {rest}:")
            inside.append(loop[1] if word == "for" and loop else "")
            code.append(" " * len(inside) + "pass")
    assert not inside, f"{name}: a part has no end"
    return compile("\n".join(code), name, "exec")
