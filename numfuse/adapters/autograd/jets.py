"""Jets of layers and networks for autograd: a forward, whose backward is one call of the core.

The backward takes what the forward has kept. Forward mode, and what is differentiated beyond, go
the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.builtins import tuple as traced_tuple
from autograd.extend import defjvp_argnums, defvjp_argnums

from numfuse.adapters.autograd.boxes import items, like, primitive, through
from numfuse.adapters.jets import (
    RESULTS,
    Constants,
    FusedFormulas,
    JetCall,
    layer_call,
    network_entry,
)

_WHAT = "automatic differentiation"


class How(NamedTuple):
    """The arguments of a call other than its arrays."""

    call: JetCall
    constants: Constants
    #: Where the forward of these operands leaves what its backward takes.
    kept: list[Any]
    #: Of a backward: which operands of the forward.
    needs: tuple[bool, ...] = ()


def _forward(*args: Any) -> Any:
    *x, how = args
    found, kept = how.call.forward(x, how.constants, True)
    how.kept[:] = [kept]
    return tuple(found)


def _backward(*args: Any) -> Any:
    *every, how = args
    kept = how.kept[0] if how.kept else None
    grads, x = every[:RESULTS], every[RESULTS:]
    found = how.call.backward(grads, x, how.constants, how.needs, kept)
    made = tuple([d for d in found if d is not None])
    return made[0] if len(made) == 1 else made


_FORWARD, _BACKWARD = primitive(_forward), primitive(_backward)


# --- the plain way --------------------------------------------------------------------------------
class _Ops(FusedFormulas):
    """Operations on boxes, of which the plain way is made."""

    matmul = staticmethod(anp.matmul)
    broadcast_to = staticmethod(anp.broadcast_to)

    @staticmethod
    def constant(x: Any, like: Any) -> Any:
        return np.asarray(x, like.dtype)


def _plain_forward(*args: Any) -> tuple[Any, ...]:
    *x, how = args
    return tuple(how.call.plain(_Ops(how.call.backend), x, how.constants))


def _plain_backward(*args: Any) -> tuple[Any, ...]:
    """Return the gradients of a forward's operands, by what it is made of."""
    *every, how = args
    grads, x = every[:RESULTS], every[RESULTS:]
    at = tuple([i for i, need in enumerate(how.needs) if need])
    first, second = (None if c is None else np.asarray(c) for c in how.constants)
    shapes = how.call.shapes(x, (first, second))
    pairs = zip(grads, shapes, strict=True)
    gs = tuple([np.zeros(shape, x[0].dtype) if g is None else g for g, shape in pairs])
    found: tuple[Any, ...] = through(_plain_forward)[0](at, gs, (*x, how), {})(traced_tuple(gs))
    return found


# --- rules ----------------------------------------------------------------------------------------
def _reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *x, how = args
    how = how._replace(needs=tuple([i in argnums for i in range(len(x))]))

    def pull(g: Any) -> Any:
        grads = [None if part is None else like(part, x[0]) for part in g]
        found = items(_BACKWARD(*grads, *x, how), len(argnums))
        return tuple(found)

    return pull


defvjp_argnums(_FORWARD, _reverse)
defjvp_argnums(_FORWARD, through(_plain_forward)[1])
_again = through(_plain_backward)
defvjp_argnums(_BACKWARD, _again[0])
defjvp_argnums(_BACKWARD, _again[1])


# --- calls ----------------------------------------------------------------------------------------
def _run(call: JetCall, x: Sequence[Any], constants: Constants, keep: Any) -> Any:
    if keep:
        raise ValueError(f"keep must be False under {_WHAT}, which keeps what it needs")
    return call.result(*items(_FORWARD(*x, How(call, constants, [])), RESULTS))


def _run_backward(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Constants,
    kept: Any,
    needs: Sequence[str],
) -> Any:
    pairs = zip(call.wanted(needs), x, strict=True)
    wanted = tuple([need and y is not None for need, y in pairs])
    found: Any = ()
    if any(wanted):
        how = How(call, constants, [] if kept is None else [kept], wanted)
        found = items(_BACKWARD(*grads, *x, how), sum(wanted))
    rest = iter(found)
    return call.gradients([next(rest) if need else None for need in wanted], needs)


def layer(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], needs: Any,
    out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run an operation of a layer's jet."""
    how = operation, operands, activation, flags, out, backend
    call, grads, x, constants, keep = layer_call(*how, _WHAT)
    if grads:
        return _run_backward(call, grads, x, constants, None, needs)
    return _run(call, x, constants, keep)


network = network_entry(_run, _run_backward, _WHAT)
