"""Lines of a formula's text: an assignment for every node that is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from numfuse.language.graph import Expr, topological

#: Operations that Python and WGSL write with a sign.
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
}


def assignments(
    exprs: Iterable[Expr],
    line: str,
    constant: Callable[[Expr], str],
    operation: Callable[[Expr, Sequence[str]], str],
) -> tuple[dict[Expr, str], list[str]]:
    """Return the text by which each node is named, and the lines that compute them.

    `line` is an assignment with places for the name and the text. The text of a constant is
    ``constant(e)``, that of another node ``operation(e, texts of its operands)``.
    """
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for e in topological(exprs):
        if e.op == "x":
            names[e] = "x"
        elif e.op == "input":
            names[e] = f"in_{e.payload}"
        elif e.op == "const":
            names[e] = constant(e)
        else:
            text = operation(e, [names[a] for a in e.args])
            names[e] = f"t{len(lines)}"
            lines.append(line.format(names[e], text))
    return names, lines
