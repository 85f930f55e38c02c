"""Formulas over NumPy arrays, in float64: the reference.

NaN and infinities follow IEEE throughout, silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from numfuse.language.curves import expand
from numfuse.language.graph import SYMBOL, Expr, bottom_up, rounded
from numfuse.language.operations import OPERATIONS


def apply(op: str, *args: Any) -> Any:
    """One operation over arrays: computed in float64, given back in the arrays' common dtype.

    Python numbers do not take part in the promotion, as in NumPy; integers become float64.
    """
    numbers = args[1:] if op == "where" else args
    kinds = [np.result_type(a) if isinstance(a, (np.ndarray, np.generic)) else a for a in numbers]
    dtype = np.result_type(*kinds)
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    wide = [
        np.asarray(a, None if op == "where" and not i else np.float64) for i, a in enumerate(args)
    ]
    with np.errstate(all="ignore"):
        return np.asarray(OPERATIONS[op].value(*wide)).astype(dtype, copy=False)[()]


def evaluate(expr: Expr, x: Any) -> Any:
    """The graph over an array of arguments: computed in float64, rounded once to the array's dtype.

    Parameters
    ----------
    expr : Expr
    x : array_like of real numbers, any shape
        Integers and Python numbers give float64.

    Raises
    ------
    TypeError
        For complex, object or non-numeric arrays.
    """
    return evaluate_all((expr,), {SYMBOL: np.asarray(x)})[0]


def evaluate_all(exprs: Iterable[Expr], leaves: Mapping[Expr, Any]) -> tuple[Any, ...]:
    """The graphs over arrays, one per leaf, that broadcast: as :func:`evaluate`, for several.

    Python numbers do not take part in the promotion, as in NumPy.
    """
    kinds = [x.dtype for x in leaves.values() if isinstance(x, (np.ndarray, np.generic))]
    dtype = np.result_type(*kinds) if kinds else np.dtype(np.float64)
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    elif dtype.kind != "f" and dtype.name != "bfloat16":  # ml_dtypes' bfloat16 has kind "V"
        raise TypeError(f"expected an array of real numbers, got dtype {dtype}")
    wide = {e: np.asarray(x).astype(np.float64) for e, x in leaves.items()}
    shape = np.broadcast_shapes(*(x.shape for x in wide.values()))
    return tuple(np.broadcast_to(v, shape).astype(dtype)[()] for v in values(exprs, wide))


def values(exprs: Iterable[Expr], leaves: Mapping[Expr, Any]) -> tuple[Any, ...]:
    """The graphs over arrays, one per leaf, that broadcast: in the arrays' own dtype.

    NaN and infinities follow IEEE, silently.
    """

    def value(e: Expr, args: list[Any]) -> Any:
        if e.op == "const":
            return rounded(e, "float64")
        return OPERATIONS[e.op].value(*args) if args else leaves[e]

    with np.errstate(all="ignore"):
        return bottom_up(expand(exprs), value)
