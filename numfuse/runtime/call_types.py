"""The types of operators' calls, found once for all kernels.

Numba tries the templates of an operator one by one until one fits: some forty for an addition, most
of them NumPy's, which take longest as they search a ufunc's loops. It does so for each use in a
text, at every round of its inference, and again when the use is lowered. What it finds for numbers
depends on nothing but the types.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from numba.core import types

#: Functions whose calls are remembered: Python's operators, and those of its functions that texts
#: of kernels call as often.
_KNOWN = frozenset((*(f for f in vars(operator).values() if callable(f)), min, max, abs, bool))

#: {(context, function, arguments' types): (context, function, signature)}; what the identities of a
#: key mean is kept beside the signature, so that nothing else can take their place.
_FOUND: dict[tuple[int, int, tuple[Any, ...]], tuple[Any, Any, Any]] = {}

# (what stubs say of these is not all that they have)
_FUNCTION: Any = types.BaseFunction
_TUPLE: Any = types.BaseTuple
_find = _FUNCTION.get_call_type


def _depends_on_types_alone(kind: Any) -> bool:
    """Whether a value of this type is a number, an array or a tuple of such values."""
    if isinstance(kind, _TUPLE):
        return all(_depends_on_types_alone(one) for one in kind.types)
    if isinstance(kind, types.Array):
        return _depends_on_types_alone(kind.dtype)
    return isinstance(getattr(kind, "literal_type", kind), (types.Number, types.Boolean))


def _get_call_type(self: Any, context: Any, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
    """Return the signature of a call, as Numba's method of this name does."""
    if kws or self.typing_key not in _KNOWN:
        return _find(self, context, args, kws)
    key = id(context), id(self), args
    found = _FOUND.get(key)
    if found is None:
        signature = _find(self, context, args, kws)
        if signature is not None and all(map(_depends_on_types_alone, args)):
            _FOUND[key] = context, self, signature
        return signature
    return found[2]


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Let compilations of this block remember operators' types; Numba's own do so no longer.

    The caller holds Numba's lock of compilations. A block may stand within another one.
    """
    before = _FUNCTION.get_call_type
    _FUNCTION.get_call_type = _get_call_type
    try:
        yield
    finally:
        _FUNCTION.get_call_type = before
