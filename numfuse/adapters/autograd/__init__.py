"""numfuse's functions for HIPS autograd: reverse mode of any order the table has, and forward mode.

Each operation is a primitive with a fused backward, which is a primitive with a fused double
backward, which is differentiated through its pieces (`numfuse.adapters.pieces`). Primitives return
plain tuples: autograd cannot differentiate through a named one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

from numfuse import epilogue_jets, fusion, gated, multilayer, networks
from numfuse import jets as layers
from numfuse.activations import get
from numfuse.adapters import pieces
from numfuse.adapters.autograd.boxes import items, like, primitive, through
from numfuse.adapters.autograd.epilogues import fused
from numfuse.adapters.autograd.jets import layer as epilogue_jet
from numfuse.adapters.autograd.jets import layer as jet
from numfuse.adapters.autograd.jets import network
from numfuse.adapters.autograd.perceptrons import perceptron
from numfuse.adapters.primitives import CORE, PRIMITIVES, How, Primitive
from numfuse.adapters.surface import NAMES, Functions
from numfuse.operations import OPERATIONS
from numfuse.runtime.dispatch import AGAIN

_HOMES = fusion, gated, layers, epilogue_jets, networks, multilayer
_FUSED = {name: getattr(home, name) for home in _HOMES for name in home.__all__}
__all__ = [
    *NAMES,
    *_FUSED,
    "activation",
    "epilogue_jet",
    "fused",
    "jet",
    "network",
    "perceptron",
    "synchronize",
    "to_numpy",
]


# --- primitives ---------------------------------------------------------------------------------
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
        return found if PRIMITIVES[name].names is None else items(found, len(how.needs))

    def pre_activation(self, how: How, a: Any, b: Any, bias: Any) -> Any:
        if how.saved is None:
            return super().pre_activation(how, a, b, bias)
        return _RUN["product"](a, b, bias, how._replace(activation=_NONE))


_NONE = get("none")
FUNCTIONS = _Autograd()
globals().update(FUNCTIONS.functions())
globals().update(_FUSED)
activation = FUNCTIONS.activation


# --- their derivatives --------------------------------------------------------------------------
def _cotangents(primitive: Primitive, how: How, g: Any, x: Any) -> list[Any]:
    """Return the cotangent of each result, None where there is none."""
    given = (g,) if primitive.names is None or len(how.needs) == 1 else g
    parts = primitive.cotangents(given, how)
    return [None if part is None else like(part, x) for part in parts]


def _fused(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the reverse and the forward rule of a primitive that are fused calls."""
    primitive = PRIMITIVES[name]

    def reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        *operands, how = args
        needs = tuple([x for i, x in enumerate(primitive.operands) if i in argnums])

        def pull(g: Any) -> Any:
            cotangents = _cotangents(primitive, how, g, operands[0])
            found = FUNCTIONS.pulled(name, how._replace(needs=needs), cotangents, operands)
            return tuple(found[i] for i in argnums)

        return pull

    def forward(argnums: Any, gs: Any, ans: Any, args: Any, kwargs: Any) -> Any:
        *operands, how = args
        dots: list[Any] = [None] * len(operands)
        for i, g in zip(argnums, gs, strict=True):
            dots[i] = like(g, args[i])
        found = FUNCTIONS.pushed(name, how, operands, dots, ans)
        return found[0] if len(found) == 1 else found

    return reverse, forward


def _composite(name: str) -> Callable[..., Any]:
    return lambda *args: FUNCTIONS.composite(name, args[-1], *args[:-1])


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


for _name, _run in _RUN.items():
    _pull, _push = _fused(_name) if PRIMITIVES[_name].is_fused else through(_composite(_name))
    defvjp_argnums(_run, _double_reverse if _name == "product_double" else _pull)
    defjvp_argnums(_run, _push)


# --- a call on boxes ------------------------------------------------------------------------------
_KINDS = {ArrayBox, np.ndarray, type(None)}


def _again(operation: Any, *call: Any) -> Any:
    """Run a layer's forward at once, which is most calls, and any other operation as it is run."""
    operands, activation, flags, _, out, backend = call
    if operation.kind == "fused" and _KINDS.issuperset(map(type, operands)):
        return fused(operation, *call)
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
