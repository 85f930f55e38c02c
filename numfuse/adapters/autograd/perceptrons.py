"""Networks' values for autograd: a primitive, whose backward is one, whose backward is one.

Each is one call of the core. Forward mode, and what is differentiated beyond, go by layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import autograd.numpy as anp
from autograd.builtins import tuple as traced_tuple
from autograd.extend import defjvp_argnums, defvjp_argnums

from numfuse.adapters.autograd.boxes import items, like, primitive, through
from numfuse.adapters.perceptrons import ValueCall, value_call
from numfuse.chains import Chain


class How(NamedTuple):
    """The arguments of a call other than its arrays."""

    call: ValueCall
    #: Where the forward of these operands leaves what its backward takes.
    kept: list[Any]
    #: Which operands' gradients a backward makes.
    made: tuple[bool, ...] = ()
    #: Of a double backward: which gradients by the cotangent and the operands.
    needs: tuple[bool, ...] = ()


def _only(found: Any) -> Any:
    made = tuple([d for d in found if d is not None])
    return made[0] if len(made) == 1 else made


def _value(*args: Any) -> Any:
    *x, how = args
    found, kept = how.call.forward(x, True)
    how.kept[:] = [kept]
    return found


def _gradients(*args: Any) -> Any:
    g, *x, how = args
    return _only(how.call.backward(g, x, how.made, *how.kept))


def _twice(*args: Any) -> Any:
    us, g, x, how = _apart(args)
    given = iter(us)
    cotangents = [next(given) if made else None for made in how.made]
    return _only(how.call.twice(cotangents, g, x, how.needs))


def _apart(args: Any) -> tuple[Any, Any, Any, How]:
    """Return the cotangents of gradients, that of the value, the operands and the rest."""
    *arrays, how = args
    count = sum(how.made)
    return arrays[:count], arrays[count], arrays[count + 1 :], how


_VALUE, _GRADIENTS, _TWICE = map(primitive, (_value, _gradients, _twice))


# --- by layers ------------------------------------------------------------------------------------
def _places(needs: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple([i for i, need in enumerate(needs) if need])


def _value_by_layers(*args: Any) -> Any:
    *x, how = args
    return how.call.plain(x)


def _gradients_by_layers(*args: Any) -> Any:
    g, *x, how = args
    pull = through(_value_by_layers)[0](_places(how.made), None, (*x, how), {})
    return tuple(pull(g))


def _twice_by_layers(*args: Any) -> Any:
    us, g, x, how = _apart(args)
    like_each = [x[i] for i in _places(how.made)]
    us = [anp.zeros_like(y) if u is None else u for u, y in zip(us, like_each, strict=True)]
    pull = through(_gradients_by_layers)[0](_places(how.needs), None, (g, *x, how), {})
    return tuple(pull(us[0] if len(us) == 1 else traced_tuple(us)))


# --- rules ----------------------------------------------------------------------------------------
def _needs(argnums: Any, count: int) -> tuple[bool, ...]:
    return tuple([i in argnums for i in range(count)])


def _value_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    *x, how = args
    how = how._replace(made=_needs(argnums, len(x)))

    def pull(g: Any) -> Any:
        return tuple(items(_GRADIENTS(like(g, x[0]), *x, how), len(argnums)))

    return pull


def _gradients_reverse(argnums: Any, ans: Any, args: Any, kwargs: Any) -> Any:
    g, *x, how = args
    how = how._replace(needs=_needs(argnums, 1 + len(x)))

    def pull(found: Any) -> Any:
        us = [found] if sum(how.made) == 1 else list(found)
        us = [None if u is None else like(u, g) for u in us]
        return tuple(items(_TWICE(*us, g, *x, how), len(argnums)))

    return pull


defvjp_argnums(_VALUE, _value_reverse)
defjvp_argnums(_VALUE, through(_value_by_layers)[1])
defvjp_argnums(_GRADIENTS, _gradients_reverse)
defjvp_argnums(_GRADIENTS, through(_gradients_by_layers)[1])
_again = through(_twice_by_layers)
defvjp_argnums(_TWICE, _again[0])
defjvp_argnums(_TWICE, _again[1])


def perceptron(chain: Chain) -> Any:
    """Return a network's value; None where its layers are operations of their own."""
    found = value_call(chain)
    return None if found is None else _VALUE(*found[1], How(found[0], []))
