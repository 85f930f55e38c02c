"""The results of a backward, the gradients that may be asked for, and where they may be written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy import ndarray

from numfuse.problem.arrays import ArraysByName
from numfuse.problem.operands import output

#: Fields of a problem by name.
Fields: TypeAlias = dict[str, Any]

GEMM_NEEDS = ("a", "b", "bias")
RESIDUAL_NEEDS = ("a", "b", "bias", "residual")
GATED_NEEDS = ("a", "b")
GEMM_SECOND_NEEDS = ("grad", *GEMM_NEEDS)
RESIDUAL_SECOND_NEEDS = ("grad", *RESIDUAL_NEEDS)
GATED_SECOND_NEEDS = ("grad", *GATED_NEEDS)


class GemmGradients(NamedTuple):
    """The gradients of act(a @ b + bias); None where not needed."""

    d_a: Any
    d_b: Any
    d_bias: Any


class GemmResidualGradients(NamedTuple):
    """The gradients of a @ b + bias + residual; None where not needed."""

    d_a: Any
    d_b: Any
    d_bias: Any
    d_residual: Any


class GatedGradients(NamedTuple):
    """The gradients of act(a) * b; None where not needed."""

    d_a: Any
    d_b: Any


class GemmSecondGradients(NamedTuple):
    """The gradients that the cotangents of a product's gradients give; None where not needed."""

    d_grad: Any
    d_a: Any
    d_b: Any
    d_bias: Any


class GemmResidualSecondGradients(NamedTuple):
    """The gradients that a residual layer's cotangents of gradients give; None where not needed."""

    d_grad: Any
    d_a: Any
    d_b: Any
    d_bias: Any
    d_residual: Any


class GatedSecondGradients(NamedTuple):
    """The gradients that the cotangents of a gate's gradients give; None where not needed."""

    d_grad: Any
    d_a: Any
    d_b: Any


class EpilogueGradients(NamedTuple):
    """The gradients of an epilogue of products; None where not needed."""

    d_a: Any
    #: A tuple where there are several right factors.
    d_b: Any
    #: A tuple, one for each operand.
    d_operands: Any


class GatedLayerGradients(NamedTuple):
    """The gradients of a gated layer; None where not needed."""

    d_a: Any
    d_b_gate: Any
    d_b_up: Any
    d_bias_gate: Any
    d_bias_up: Any


class GatedLayerSecondGradients(NamedTuple):
    """The gradients that a gated layer's cotangents of gradients give; None where not needed."""

    d_grad: Any
    d_a: Any
    d_b_gate: Any
    d_b_up: Any
    d_bias_gate: Any
    d_bias_up: Any


class Tangent(NamedTuple):
    """A value, and its derivative along the tangents of the operands."""

    out: Any
    out_dot: Any


class LayerJet(NamedTuple):
    """The value of a layer, its tangents and its weighted second derivatives."""

    out: Any
    out_dot: Any
    out_ddot: Any


class LayerJetGradients(NamedTuple):
    """The gradients of a layer's jet; None where not needed."""

    d_a: Any
    d_b: Any
    d_bias: Any
    d_a_dot: Any
    d_a_ddot: Any


class EpilogueJetGradients(NamedTuple):
    """The gradients of a formula's jet; None where not needed."""

    d_a: Any
    d_b: Any
    #: A tuple, one for each operand.
    d_operands: Any
    d_a_dot: Any
    d_a_ddot: Any


class NetworkJet(NamedTuple):
    """The value of a network, its tangents and its weighted second derivatives."""

    u: Any
    u_dot: Any
    u_ddot: Any


class NetworkGradients(NamedTuple):
    """The gradients of a network; None where not needed."""

    d_x: Any
    #: Tuples, layer by layer.
    d_weights: Any
    d_biases: Any


class NetworkSecondGradients(NamedTuple):
    """The gradients that the cotangents of a network's gradients give; None where not needed."""

    d_grad: Any
    d_x: Any
    #: Tuples, layer by layer.
    d_weights: Any
    d_biases: Any


#: {the names of gradients: the named tuple of these}
_GRADIENTS: dict[tuple[str, ...], Any] = {
    made._fields: made
    for made in (
        GemmGradients,
        GemmResidualGradients,
        GatedGradients,
        GemmSecondGradients,
        GemmResidualSecondGradients,
        GatedSecondGradients,
    )
}


#: The results of every kind of forward, and of every kind of backward, which reads `pre`.
_FORWARD = ("out", "out_dot", "pre")
_BACKWARD = ("d_grad", "d_a", "d_b", "d_bias", "d_residual")


def settled(p: Any) -> bool:
    """Whether nothing is left to compute of a problem; its results, if any, then become zero."""
    names = without_terms(p)
    for name in names or ():
        getattr(p, name)[...] = 0
    return names is not None


def without_terms(p: Any) -> list[str] | None:
    """Return the results that are zero, if nothing else is to be computed of a problem; else None.

    Where grad, or the result of a forward, has no element, no sum has a term, whatever lengths the
    other axes have. Where no result has an element, none is written.
    """
    if isinstance(p, ArraysByName):
        names = p.results
        if names and p.m and p.n and 0 not in p.batch:
            return None
        return [name for name in names if p.arrays[name].size]
    forward = hasattr(p, "out")
    terms = (p.out if forward else p.grad).size
    results = []
    for name in _FORWARD if forward else _BACKWARD:
        x = getattr(p, name, None)
        if x is not None:
            if terms and x.size:
                return None
            results.append(name)
    return [] if terms else results


def made_late(x: ndarray) -> tuple[ndarray, ndarray]:
    """Return a result, and a new array in its place that `copy_late` will copy to it."""
    return x, np.empty(x.shape, x.dtype)


def copy_late(p: Any) -> None:
    """Copy what was made late to the caller's arrays, after a backend has run a problem."""
    for target, made in p.late:
        target[...] = made


def check_needs(needs: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The gradients that are wanted, out of `names`."""
    if needs is names:
        return names
    if isinstance(needs, str) or not isinstance(needs, Iterable):
        raise TypeError(f"needs must be a tuple of names out of {names}, got {needs!r}")
    wanted = tuple(needs)
    for name in wanted:
        if name not in names:
            raise ValueError(f"needs must hold names out of {names}, got {name!r}")
    return wanted


def check_outputs(out: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """out= of a backward: a tuple like the result of the gradients of `names`."""
    if out is None:
        return (None,) * len(names)
    wanted = ", ".join(f"d_{name}" for name in names)
    if not isinstance(out, tuple | list):
        raise TypeError(
            f"out must be a tuple ({wanted}) with None where to allocate, got {type(out).__name__}"
        )
    if len(out) != len(names):
        raise ValueError(f"out must have {len(names)} entries ({wanted}), got {len(out)}")
    return tuple(out)


def entries(name: str, given: Any, count: int) -> tuple[Any, ...]:
    """Return what a call gives as a tuple of so many; None is so many of None."""
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of {count}, got {type(given).__name__}")
    if len(given) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(given)}")
    return tuple(given)


def network_outputs(
    out: Any, names: tuple[str, ...], wanted: Collection[str], shapes: Mapping[str, Any],
    dtype: np.dtype[Any], others: dict[str, ndarray], seen: Callable[[str, Any], ndarray],
) -> dict[str, Any]:  # fmt: skip
    """Return the arrays that `out=` of a network's backward has, by names such as d_weights[0].

    `names` are those of the groups x, weights, biases, of which some are `wanted`, and `shapes` has
    the shape of each operand, None where there is none. `seen` returns what is to be checked of an
    array, which overlaps none of `others`.
    """
    found: dict[str, Any] = {}
    for group, given in zip(names, check_outputs(out, names), strict=True):
        own = [x for x in shapes if x.partition("[")[0] == group]
        if group in shapes:
            given = (given,)
        elif given is None:
            given = (None,) * len(own)
        elif not isinstance(given, tuple | list) or len(given) != len(own):
            kind = type(given).__name__
            got = f"{len(given)} entries" if isinstance(given, tuple | list) else kind
            raise ValueError(f"d_{group} in out must be None or a tuple of {len(own)}, got {got}")
        for operand, x in zip(own, given, strict=True):
            name, shape = f"d_{operand}", shapes[operand]
            if x is not None and (group not in wanted or shape is None):
                raise ValueError(f"{name} in out must be None where it is not needed, got an array")
            if x is not None:
                others[name] = output(name, seen(name, x), shape, dtype, others)
                found[name] = x
    return found


def made_gradients(
    names: tuple[str, ...],
    shapes: Mapping[str, Any],
    needs: Any,
    out: Any,
    dtype: np.dtype[Any],
    operands: dict[str, ndarray],
) -> tuple[Fields, Any]:
    """Return the gradients by the names of fields, and the named tuple of them for the caller.

    They are new arrays, or the caller's after every check; None where one is not needed, or has no
    shape, as its operand is not there. `operands` has by name what no output may overlap; each
    output joins it.
    """
    if needs is None or needs is names:
        needs = names
    else:
        needs = check_needs(needs, names)
    outs = (None,) * len(names) if out is None else check_outputs(out, names)
    arrays: Fields = {}
    result: list[Any] = []
    for name, given in zip(names, outs, strict=True):
        field, shape, array = f"d_{name}", shapes.get(name), None
        if name in needs and shape is not None:
            if given is None:
                array = np.empty(shape, dtype)
            else:
                operands[field] = array = output(field, given, shape, dtype, operands)
        elif given is not None:
            reason = f"{name!r} is not in needs" if name not in needs else f"{name} is None"
            raise ValueError(f"{field} in out must be None where {reason}, got an array")
        arrays[field] = array
        result.append(array if given is None else given)
    return arrays, _GRADIENTS[tuple(arrays)](*result)
