"""Hop 2 of jets: Taylor coefficients of the first and second order through a layer.

With z = a b + bias, z_dot[d] = a_dot[d] b and z_ddot[s] = a_ddot[s] b, a layer has

    out         = f(z)
    out_dot[d]  = f'(z) z_dot[d]
    out_ddot[s] = f'(z) z_ddot[s] + f''(z) sum_d weights[s, d] z_dot[d]^2

and a backward makes what :class:`numfuse.epilogues.Jet` derives of that, then d_b = a' q +
sum_d a_dot[d]' q_dot[d] + sum_s a_ddot[s]' q_ddot[s], and d_a = q b' with its two likes.

How a backend lowers one. A layer is a product group over rows: every point has a row of each of its
*members*, 1 + D, or 1 + D + S where a_ddot is there, and all of them meet one b. So it is one tall
product, whose epilogue takes the members of a point at once: a *row group*. D and S are numbers of
a call, so that the epilogue is three formulas and two loops, and no graph of 1 + D + S inputs (few
may be unrolled): therefore it is a kind of problem of its own, not a line of
:mod:`numfuse.problem.fused`. In memory the members of a point are rows one behind the other,
(M, 1 + D + S, N), wherever an array is the backend's own or `stacked` says that the caller's lies
so: then the tall product has plain strides, and so has d_b, a sum over points and members in one
product. Three ways, from plain to fast:

- products into memory in the accumulator's dtype (one tall product, or one for each of a, a_dot,
  a_ddot), then a pass over points with the loops; a backend that has products and passes can begin
  here;
- the same by blocks of points that stay in a cache;
- one kernel: a tile of whole points, whose epilogue runs when the last member's sums are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.epilogues import Jet, layer_jet, layer_jet_backward
from numfuse.problem.operands import array_of, checked, output, shaped
from numfuse.problem.results import (
    Fields,
    LayerJet,
    LayerJetGradients,
    check_needs,
    check_outputs,
)
from numfuse.problem.shapes import GemmShape, Shape, gemm_shape, merge_axes

NEEDS = ("a", "b", "bias", "a_dot", "a_ddot")
#: By array: the operands of which it has a member for each, of directions or of seconds.
MEMBERS = {
    **dict.fromkeys(("a_dot", "out_dot", "pre_dot", "grad_dot", "d_a_dot"), "directions"),
    **dict.fromkeys(("a_ddot", "out_ddot", "pre_ddot", "grad_ddot", "d_a_ddot"), "seconds"),
}
#: The arrays without a row for each point.
SHARED = frozenset(("b", "bias", "weights", "d_b", "d_bias"))
_LEFT, _RIGHT = ("a", "a_dot", "a_ddot"), ("b", "bias")


class Stack(NamedTuple):
    """The form of a call whose arrays are stacks: contiguous (..., M, members, columns).

    `a` stands for a, a_dot and (where it is `moved`) a_ddot, and so do d_a and pre; `out` and
    `grad` for the three results and their cotangents. A problem has them as matrices (..., M,
    members * columns).
    """

    directions: int
    seconds: int
    moved: bool


@dataclass(slots=True, eq=False, repr=False)
class JetProblem:
    """A layer's jet, or its backward.

    Arrays are (..., rows, columns) with batch axes that broadcast to `batch`, those of `MEMBERS`
    (D, ..., rows, columns) or (S, ..., rows, columns). `pre`, `pre_dot` and `pre_ddot` are the sums
    with the bias, in the accumulator's dtype: kept by a forward, and given to a backward.
    """

    activation: Activation
    m: int
    n: int
    k: int
    batch: Shape
    dtype: np.dtype[Any]
    acc_dtype: np.dtype[Any]
    directions: int
    seconds: int
    #: Which weights (seconds, directions) are there, one byte each: a zero leaves its term out.
    pattern: bytes
    #: Whether a_ddot is there.
    moved: bool
    backward: bool
    #: Whether a point's members are rows one behind the other of one array: see `Stack`.
    stacked: bool
    arrays: dict[str, ndarray]
    #: The formulas, without what is absent, and guarded.
    jet: Jet
    result: Any

    def __getattr__(self, name: str) -> ndarray | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.arrays.get(name)

    @property
    def members(self) -> int:
        """Return the rows of a point."""
        return 1 + self.directions + self.seconds * self.moved

    @property
    def shape(self) -> Shape:
        """Return the shape of a result's member."""
        return (*self.batch, self.m, self.n)

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of all arrays that are written."""
        if self.backward:
            return tuple(name for name in self.arrays if name.startswith("d_"))
        return tuple(x for x in self.arrays if x.startswith(("out", "pre")))

    def without_terms(self) -> list[str] | None:
        """Return the results that are zero, if nothing else is to be computed; else None."""
        if self.results and self.m and self.n and 0 not in self.batch:
            return None
        return [name for name in self.results if self.arrays[name].size]


def make(
    backward: bool, given: Mapping[str, Any], activation: Any, needs: Any, out: Any, guard: bool,
    keep: bool, pattern: bytes, stack: Stack | None, ghosts: bool = False,
) -> JetProblem:  # fmt: skip
    """Return the problem of a jet; see the public functions for what is accepted and raised."""
    if type(activation) is not Activation:
        activation = get_activation(activation)
    kept = {name: x for name, x in given.items() if name.startswith("pre") and x is not None}
    weights, apart = given.get("weights"), ("weights", "pre", "pre_dot", "pre_ddot")
    rest = {name: array_of(x) for name, x in given.items() if name not in apart}
    if stack is None and rest["a_dot"] is None:
        raise TypeError("a_dot must be an array, got None")
    x, dtype, acc = _checked(rest)
    first = x["a"] if stack is None else x["a"][..., 0, :]
    sizes, a, b, bias = gemm_shape(first, x["b"], x.get("bias"))
    if stack is None:
        counts = {"directions": len(x["a_dot"]) if x["a_dot"].ndim else 0}
        counts["seconds"] = counts["directions"] if weights is None else len(weights)
    else:
        counts = {"directions": stack.directions, "seconds": stack.seconds}
        a = _as_rows(x["a"])
    arrays: dict[str, ndarray] = {"a": a, "b": b}
    if bias is not None:
        arrays["bias"] = bias
    if weights is not None:
        arrays["weights"] = weights
    for name, y in (*x.items(), *kept.items()):
        if name not in ("a", "b", "bias"):
            arrays[name] = _promoted(name, y, x["a"].shape, sizes, counts, stack)
    specs = _results(backward, x, sizes, (dtype, acc), counts, needs, keep, stack)
    made, result = _outputs(specs, out, {**x, **kept}, backward)
    for name, y in made.items():
        like = "a" if name.startswith("d_a") else name.removeprefix("d_")
        if stack is not None and name not in SHARED:
            arrays[name] = _as_rows(y)
        else:
            arrays[name] = _as_matrix(like, y, sizes)
    moved = "a_ddot" in x if stack is None else stack.moved
    jet = formulas_of(activation, backward, arrays, pattern, guard, moved, stack is not None)
    sized: Fields = dict(zip(("m", "n", "k", "batch"), sizes, strict=False)) | counts
    sized |= {"dtype": dtype, "acc_dtype": acc, "pattern": pattern, "moved": moved}
    form: Fields = {"backward": backward, "stacked": stack is not None, "result": result}
    p = JetProblem(activation=activation, arrays=arrays, jet=jet, **sized, **form)
    if p.batch:
        _fold(p, ghosts)
    return p


def _as_rows(x: ndarray) -> ndarray:
    """Return a stack with the members of a point in one row."""
    if not x.flags.c_contiguous:
        raise ValueError(f"a stack must be contiguous, got strides {x.strides}")
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _checked(given: Mapping[str, Any]) -> tuple[dict[str, ndarray], Any, Any]:
    """Return the operands that are there, their dtype, and its accumulator's."""
    grads = {name: y for name, y in given.items() if not name.startswith("grad") or y is not None}
    return checked(grads)


def _as_matrix(like: str, x: ndarray, sizes: GemmShape) -> ndarray:
    """Return an array, with a leading axis of members or without, as matrices."""
    promote = sizes.promote
    if like in ("b", "bias"):
        return x if x.ndim > 1 else x[:, None] if like == "b" else x[None, :]
    if promote is None:
        return x
    if like == "a":  # a row where a is one; b's columns are no matter
        row = len(promote) == 3
        return x[..., None, :] if row else x
    return x[promote]


def _promoted(
    name: str, x: ndarray, a: Shape, sizes: GemmShape, counts: Mapping[str, int],
    stack: Stack | None,
) -> ndarray:  # fmt: skip
    """Return a checked operand as matrices."""
    if stack is not None:
        members = _members(stack, name == "grad")
        shape = (*sizes.visible[:-1], members, sizes.n)
        return _as_rows(shaped(x, name, shape, "the shape"))
    own = (counts[MEMBERS[name]],) if name in MEMBERS else ()
    if name in _LEFT:
        what = f"the shape ({'D' if name == 'a_dot' else 'S'}, *a.shape) ="
        return _as_matrix("a", shaped(x, name, own + a, what), sizes)
    what = (
        "the result's shape" if not own else f"the shape ({MEMBERS[name][0].upper()}, *out.shape) ="
    )
    return _as_matrix("out", shaped(x, name, own + sizes.visible, what), sizes)


def _members(stack: Stack, whole: bool) -> int:
    """Return the members of a point: of results, all are there."""
    return 1 + stack.directions + stack.seconds * (whole or stack.moved)


def _results(
    backward: bool, x: Mapping[str, ndarray], sizes: GemmShape, dtypes: tuple[Any, Any],
    counts: Mapping[str, int], needs: Any, keep: bool, stack: Stack | None,
) -> dict[str, tuple[Shape, Any] | None]:  # fmt: skip
    """Return the shape and dtype of each result, in their order; None where it is not wanted."""
    dtype, acc = dtypes
    if backward:
        wanted = NEEDS if needs is None else check_needs(needs, NEEDS)
        return {f"d_{y}": (x[y].shape, dtype) if y in wanted and y in x else None for y in NEEDS}
    d, s, visible = counts["directions"], counts["seconds"], sizes.visible
    shapes = {"": visible, "_dot": (d, *visible), "_ddot": (s, *visible)}
    if stack is not None:
        *rows, n = visible
        found: dict[str, Any] = {"out": ((*rows, _members(stack, True), n), dtype)}
        found |= {"out_dot": None, "out_ddot": None}
        if keep:
            found |= {"pre": ((*rows, _members(stack, False), n), acc)}
            found |= {"pre_dot": None, "pre_ddot": None}
        return found
    found = {f"out{end}": (shape, dtype) for end, shape in shapes.items()}
    if keep:
        found |= {f"pre{end}": (shape, acc) for end, shape in shapes.items()}
        if "a_ddot" not in x:
            found["pre_ddot"] = None
    return found


def _outputs(
    specs: Mapping[str, Any], out: Any, others: dict[str, ndarray], backward: bool
) -> tuple[Fields, Any]:
    """Return the results by name, new or the caller's, and what the caller gets."""
    outs = outputs(out, NEEDS if backward else (), len(specs))
    made: dict[str, ndarray] = {}
    found: list[Any] = []
    for (name, spec), given in zip(specs.items(), outs, strict=True):
        array = None
        if spec is None:
            if given is not None:
                raise ValueError(f"{name} in out must be None where it is not needed, got an array")
        elif given is None:
            array = np.empty(*spec)
        else:
            shape, dtype = spec
            others[name] = array = output(name, given, shape, dtype, others)
        if array is not None:
            made[name] = array
        found.append(array if given is None else given)
    if backward:
        return made, LayerJetGradients(*found)
    return made, LayerJet(*found) if len(found) == 3 else tuple(found)


def outputs(out: Any, needs: tuple[str, ...], count: int) -> Sequence[Any]:
    """Return the `out` of a call as so many entries: of a backward those of `needs`."""
    if needs:
        found: Sequence[Any] = check_outputs(out, needs)
        return found
    if out is None:
        return (None,) * count
    wanted = "(out, out_dot, out_ddot)"
    if not isinstance(out, tuple | list):
        raise TypeError(f"out must be a tuple {wanted}, got {type(out).__name__}")
    if len(out) not in (3, count):
        raise ValueError(f"out must have 3 entries {wanted}, got {len(out)}")
    return (*out, *(None,) * (count - len(out)))


def formulas_of(
    f: Activation, backward: bool, arrays: Mapping[str, ndarray], pattern: bytes, guard: bool,
    moved: bool, stacked: bool,
) -> Jet:  # fmt: skip
    """Return the formulas of a call on these arrays, without what is absent."""
    jet = layer_jet_backward(f.curve) if backward else layer_jet(f.curve)
    absent = [x for x in ("grad", "grad_dot", "grad_ddot") if x not in arrays and not stacked]
    if "bias" not in arrays or (backward and "pre" in arrays):
        absent.append("bias")
    if not moved:
        absent.append("z_ddot")
    if "grad_ddot" in absent or not any(pattern):
        absent.append("grad_bent")
    jet = jet.each(lambda part: part.without(*absent))
    return jet.each(lambda part: part.guarded()) if guard else jet


def _fold(p: JetProblem, ghosts: bool) -> None:
    """Fold the batch into M where b and bias serve all of it: one product, not many.

    An operand that does not merge is copied, so that sums over rows have one order whatever the
    strides are; with a result that does not, or a ghost, the batch stays.
    """
    views: dict[str, ndarray] = {}
    rows, count = (*p.batch, p.m), prod(p.batch) * p.m
    for name, x in p.arrays.items():
        lead = int(name in MEMBERS)
        if name == "weights":
            views[name] = x
        elif name in SHARED:
            if any(length != 1 for length in x.shape[:-2]):
                return
            views[name] = x[(0,) * (x.ndim - 2)]
        elif x.shape[lead:-1] != rows:
            return
        else:
            apart = x.size and len(merge_axes(x.shape[lead:-1], x.strides[lead:-1])[0]) > 1
            if apart and (ghosts or name in p.results):
                return
            views[name] = x.reshape(*x.shape[:lead], count, x.shape[-1])
    p.arrays.update(views)
    p.m, p.batch = count, ()
