"""numfuse's functions for HIPS autograd: reverse mode of any order the table has, and forward mode.

Each operation is a primitive with a fused backward, which is a primitive with a fused double
backward, which is differentiated through its pieces (`numfuse.adapters.pieces`). Primitives return
plain tuples: autograd cannot differentiate through a named one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.builtins import tuple as traced_tuple
from autograd.core import VSpace, make_jvp, make_vjp
from autograd.extend import defjvp_argnums, defvjp_argnums
from autograd.extend import primitive as autograd_primitive
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

from numfuse.activations import get
from numfuse.adapters import pieces
from numfuse.adapters.primitives import CORE, PRIMITIVES, How, Primitive
from numfuse.adapters.surface import NAMES, Functions
from numfuse.operations import OPERATIONS
from numfuse.runtime.dispatch import AGAIN

__all__ = [*NAMES, "activation", "synchronize", "to_numpy"]


def _like(g: Any, x: Any) -> Any:
    """A cotangent in the operands' dtype: autograd makes float64 of what it meets."""
    return g if g.dtype == x.dtype else g.astype(x.dtype)


# --- primitives ---------------------------------------------------------------------------------
def primitive(function: Callable[..., Any]) -> Any:
    """autograd's, of a function of arrays: NumPy's arithmetic makes scalars of 0-d arrays."""

    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        return function(*[np.asarray(x) if isinstance(x, np.generic) else x for x in operands])

    return autograd_primitive(call)


def _runner(name: str) -> Callable[..., Any]:
    primitive = PRIMITIVES[name]
    run, takes_saved, several = primitive.run, primitive.takes_saved, primitive.names is not None

    def call(*args: Any) -> Any:
        how: How = args[-1]
        pre = how.saved[0] if takes_saved and how.saved is not None else None
        found = run(CORE, how, *args[:-1], pre=pre)
        # One gradient is an array: autograd takes every item of a tuple by a primitive.
        return found[0] if several and len(found) == 1 else found

    return call


def _product(a: Any, b: Any, bias: Any, how: How) -> Any:
    saved, act = how.saved, how.activation
    if saved is None:
        return CORE.matmul_bias_activation(a, b, bias, act, backend=how.backend)
    if act.is_identity:
        return saved[0]
    out, pre = CORE.matmul_bias_activation(
        a, b, bias, act, return_pre_activation=True, backend=how.backend
    )
    saved[:] = [pre]
    return out


class _Parts(list[Any]):
    """The cotangents of a tuple of gradients; None where nobody has asked for one.

    autograd's own of a tuple are arrays of zeros to which each item's is added.
    """


class _PartsSpace(VSpace):
    def _add(self, x: _Parts, y: _Parts) -> _Parts:
        pairs = zip(x, y, strict=True)
        return _Parts(b if a is None else a if b is None else a + b for a, b in pairs)

    _mut_add = _add


_PartsSpace.register(_Parts)
_item = autograd_primitive(lambda found, i: found[i])


def _item_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    found, place = args
    count = len(found)
    return lambda g: (_Parts(g if i == place else None for i in range(count)),)


defvjp_argnums(_item, _item_reverse)
defjvp_argnums(_item, lambda argnums, gs, ans, args, kwargs: gs[0][args[1]])


def _items(found: Any, count: int) -> Any:
    """Return the gradients that a primitive gives, as a sequence."""
    if count == 1:
        return (found,)
    return tuple(_item(found, i) for i in range(count)) if isbox(found) else found


#: Functions of a primitive's operands and, last, its How.
_RUN = {name: primitive(_runner(name)) for name in PRIMITIVES}
_RUN["product"] = primitive(_product)


class _Autograd(Functions):
    """The public functions over the primitives above."""

    arrays = anp
    moves = staticmethod(isbox)

    def primitive(self, name: str, how: How, *operands: Any, pre: Any = None) -> Any:
        if pre is not None:
            return self.composite(name, how, *operands, pre=pre, guard=how.guard)
        if name == "product" and not how.activation.is_identity and any(map(isbox, operands)):
            # The forward leaves its pre-activation there, for every derivative of these operands.
            # It goes through all levels of boxes: what a level differentiates is the operands, and
            # the array is their product's value on each of them.
            how = how._replace(saved=[])
        found = _RUN[name](*operands, how)
        return found if PRIMITIVES[name].names is None else _items(found, len(how.needs))

    def pre_activation(self, how: How, a: Any, b: Any, bias: Any) -> Any:
        if how.saved is None:
            return super().pre_activation(how, a, b, bias)
        return _RUN["product"](a, b, bias, how._replace(activation=_NONE))


_NONE = get("none")
FUNCTIONS = _Autograd()
globals().update(FUNCTIONS.functions())
activation = FUNCTIONS.activation


# --- their derivatives --------------------------------------------------------------------------
def _cotangents(primitive: Primitive, how: How, g: Any, like: Any) -> list[Any]:
    """Return the cotangent of each result, None where there is none."""
    given = (g,) if primitive.names is None or len(how.needs) == 1 else g
    parts = primitive.cotangents(given, how)
    return [None if part is None else _like(part, like) for part in parts]


def _fused(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the reverse and the forward rule of a primitive that are fused calls."""
    primitive = PRIMITIVES[name]

    def reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        *operands, how = args
        needs = tuple([name for i, name in enumerate(primitive.operands) if i in argnums])

        def pull(g: Any) -> Any:
            cotangents = _cotangents(primitive, how, g, operands[0])
            found = FUNCTIONS.pulled(name, how._replace(needs=needs), cotangents, operands)
            return tuple(found[i] for i in argnums)

        return pull

    def forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        *operands, how = args
        dots: list[Any] = [None] * len(operands)
        for i, g in zip(argnums, gs, strict=True):
            dots[i] = _like(g, args[i])
        found = FUNCTIONS.pushed(name, how, operands, dots, ans)
        return found[0] if len(found) == 1 else found

    return reverse, forward


def _through(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the reverse and the forward rule of a primitive, through what it is made of."""

    def replaced(argnums: Any, args: Any) -> Callable[[Any], Any]:
        def call(values: Any) -> Any:
            *operands, how = args
            for place, i in enumerate(argnums):
                operands[i] = values[place]
            found = FUNCTIONS.composite(name, how, *operands)
            if not isinstance(found, tuple):
                return found
            return found[0] if len(found) == 1 else traced_tuple(found)

        return call

    def reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        def pull(g: Any) -> Any:
            values = traced_tuple(args[i] for i in argnums)
            if isinstance(g, _Parts):
                pairs = zip(g, ans, strict=True)
                g = traced_tuple(anp.zeros_like(x) if part is None else part for part, x in pairs)
            with _quiet():
                found = make_vjp(replaced(argnums, args), values)[0](g)
            return tuple(found[i] for i in range(len(argnums)))

        return pull

    def forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        values = traced_tuple(args[i] for i in argnums)
        with _quiet():
            return make_jvp(replaced(argnums, args), values)(traced_tuple(gs))[1]

    return reverse, forward


def _double_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *operands, how = args
    primitive = PRIMITIVES["product_double"]

    def pull(g: Any) -> Any:
        cotangents = _cotangents(primitive, how, g, operands[3])
        wanted = [primitive.operands[i] for i in argnums]
        found = pieces.third(FUNCTIONS, how, cotangents, operands, wanted)
        return tuple(
            anp.zeros_like(operands[i]) if part is None else part
            for i, part in zip(argnums, found, strict=True)
        )

    return pull


@contextmanager
def _quiet() -> Iterator[None]:
    """A result that does not depend on an operand has the gradient 0, and nobody need be warned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Output seems independent of input")
        yield


for _name, _run in _RUN.items():
    _pull, _push = (_fused if PRIMITIVES[_name].is_fused else _through)(_name)
    defvjp_argnums(_run, _double_reverse if _name == "product_double" else _pull)
    defjvp_argnums(_run, _push)


# --- a call on boxes ------------------------------------------------------------------------------
_KINDS = {ArrayBox, np.ndarray, type(None)}


def _again(operation: Any, *call: Any) -> Any:
    """Run a layer's forward at once, which is most calls, and any other operation as it is run."""
    operands, activation, flags, _, out, backend = call
    layer = operation is _LAYER and out is None and not flags[0]
    if layer and operands[0] is not None and operands[1] is not None:
        if _KINDS.issuperset(map(type, operands)):
            return FUNCTIONS.primitive("product", How(get(activation), backend=backend), *operands)
    return operation.other(*call)


_LAYER = OPERATIONS["matmul_bias_activation"]
AGAIN[ArrayBox] = _again


def to_numpy(x: Any) -> Any:
    """As :func:`numfuse.to_numpy`: the value; its derivatives are left behind."""
    while isbox(x):
        x = getval(x)
    return x


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`: nothing runs behind a box."""
