"""Hop 2 of jets: Taylor coefficients of the first and second order through a layer.

With z = a b + bias, z_dot[d] = a_dot[d] b and z_ddot[s] = a_ddot[s] b, a layer has

    out         = f(z)
    out_dot[d]  = f'(z) z_dot[d]
    out_ddot[s] = f'(z) z_ddot[s] + f''(z) sum_d weights[s, d] z_dot[d]^2

and a backward makes what :class:`numfuse.epilogues.Jet` derives of that, then d_b = a' q +
sum_d a_dot[d]' q_dot[d] + sum_s a_ddot[s]' q_ddot[s], and d_a = q b' with its two likes.

In the place of f(z) there may be a user's formula f(z, x_0, x_1 ...) of operands that do not move;
then a backward makes their gradients too, each the sum of what the value, every direction and every
second derivative add at a point, over the axes along which its operand was broadcast.

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
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.epilogues import (
    Epilogue,
    Jet,
    epilogue_jet,
    epilogue_jet_backward,
    layer_jet,
    layer_jet_backward,
)
from numfuse.language.curves import leaf
from numfuse.language.graph import Expr
from numfuse.problem.arrays import ArraysByName
from numfuse.problem.folds import fold
from numfuse.problem.forms import Form
from numfuse.problem.fused import FusedProblem
from numfuse.problem.operands import array_of, as_plain, checked, output, same_dtype, shaped
from numfuse.problem.results import (
    Fields,
    LayerJet,
    LayerJetGradients,
    check_needs,
    check_outputs,
)
from numfuse.problem.shapes import GemmShape, Shape, gemm_shape, residual_view

NEEDS = ("a", "b", "bias", "a_dot", "a_ddot")
#: By array: the operands of which it has a member for each, of directions or of seconds.
MEMBERS = {
    **dict.fromkeys(("a_dot", "out_dot", "pre_dot", "grad_dot", "d_a_dot"), "directions"),
    **dict.fromkeys(("a_ddot", "out_ddot", "pre_ddot", "grad_ddot", "d_a_ddot"), "seconds"),
}
#: The arrays without a row for each point.
SHARED = frozenset(("b", "bias", "weights", "d_b", "d_bias"))
_RIGHT = ("b", "bias")
#: The names of a point's members, by turns: left operands, sums, kept sums, results, cotangents and
#: gradients by the sums.
LEFT, SUMS = ("a", "a_dot", "a_ddot"), ("z", "z_dot", "z_ddot")
KEPT, OUTS = ("pre", "pre_dot", "pre_ddot"), ("out", "out_dot", "out_ddot")
GRADS, Q = ("grad", "grad_dot", "grad_ddot"), ("d_z", "d_z_dot", "d_z_ddot")


class Stack(NamedTuple):
    """The form of a call whose arrays are stacks: contiguous (..., M, members, columns).

    `a` stands for a, a_dot and (where it is `moved`) a_ddot, and so do d_a and pre; `out` and
    `grad` for the three results and their cotangents. A problem has them as matrices (..., M,
    members * columns).

    With `shared` the tangents of the left operand are one row for all points, and it has no second
    derivatives: `a` is (..., M, K), `a_dot` (D, K), and `pre` has the values' sums alone.

    A chain of layers goes from gradients by sums to gradients by sums. With `behind`, the columns
    of the layer behind, a backward is given those by that one's sums as `grad`, (M, members,
    behind), and its right factor as `grad_dot`, (N, behind); the cotangents are their product. With
    `by_sums` d_a is the gradient by this layer's own sums, (M, members, N).
    """

    directions: int
    seconds: int
    moved: bool
    shared: bool = False
    behind: int = 0
    by_sums: bool = False


@dataclass(slots=True, eq=False, repr=False)
class JetProblem(ArraysByName):
    """A layer's jet, or its backward; or those of a formula of one product.

    Arrays are (..., rows, columns) with batch axes that broadcast to `batch`, those of `MEMBERS`
    (D, ..., rows, columns) or (S, ..., rows, columns). `pre`, `pre_dot` and `pre_ddot` are the sums
    with the bias, in the accumulator's dtype: kept by a forward, and given to a backward.
    """

    activation: Any
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
    #: Whether the left operands of a stacked problem are none, `a_dot` being (D, 1, K).
    shared: bool
    arrays: dict[str, ndarray]
    #: The formulas, without what is absent, and guarded.
    jet: Jet
    result: Any
    #: Of a stacked backward: what is given in the place of the cotangents, and of d_a.
    behind: int = 0
    by_sums: bool = False
    #: The operands of a formula, which has no bias: (..., M or 1, N or 1).
    operands: tuple[str, ...] = ()
    #: Results of the caller's that are copied from others when all is done: (target, made).
    late: tuple[tuple[ndarray, ndarray], ...] = ()

    @property
    def members(self) -> int:
        """Return the rows of a point."""
        return 1 + self.directions + self.seconds * self.moved

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of all arrays that are written."""
        if self.backward:
            return tuple(name for name in self.arrays if name.startswith("d_"))
        return tuple(x for x in self.arrays if x.startswith(("out", "pre")))

    @property
    def slopes(self) -> tuple[str, ...]:
        """Return the gradients of operands."""
        return tuple([name for name in self.arrays if name.startswith("d_x_")])

    def operand_sums(self) -> FusedProblem:
        """Return the sums of the gradients of operands to their shapes.

        What is summed are arrays of all points, in the accumulator's dtype, called ``whole_d_x_0``
        and so on.
        """
        arrays, results = dict[str, ndarray](), list[tuple[str, Expr]]()
        stored, summed = list[str](), list[str]()
        for name in self.slopes:
            whole = f"whole_{name}"
            arrays[name] = self.arrays[name]
            arrays[whole] = np.broadcast_to(np.empty((), self.acc_dtype), self.shape)
            results.append((name, leaf(whole)))
            (stored if arrays[name].shape == self.shape else summed).append(name)
        ties = self.jet.value.ties
        epilogue = Epilogue("sums", (), tuple(arrays)[1::2], tuple(results), ties)
        head = self.activation, self.m, self.n, 0, self.batch, self.dtype, self.acc_dtype, arrays
        return FusedProblem(*head, {}, epilogue, tuple(stored), tuple(summed), {}, (), {}, None)


def make(
    backward: bool, given: Mapping[str, Any], activation: Any, needs: Any, out: Any, guard: bool,
    keep: bool, pattern: bytes, stack: Stack | None, ghosts: bool = False,
    form: Form | None = None,
) -> JetProblem:  # fmt: skip
    """Return the problem of a jet; see the public functions for what is accepted and raised.

    With a form, `activation` is a user's epilogue.
    """
    if type(activation) is not Activation and form is None:
        activation = get_activation(activation)
    kept = {name: x for name, x in given.items() if name.startswith("pre") and x is not None}
    weights, apart = given.get("weights"), ("weights", "pre", "pre_dot", "pre_ddot")
    rest = {name: array_of(x) for name, x in given.items() if name not in apart}
    if stack is None and rest["a_dot"] is None:
        raise TypeError("a_dot must be an array, got None")
    x, dtype, acc = _checked(rest, form)
    of_stack = stack is not None and not stack.shared
    first = x["a"][..., 0, :] if of_stack else x["a"]
    sizes, a, b, bias = gemm_shape(first, x["b"], x.get("bias"))
    if stack is None:
        counts = {"directions": len(x["a_dot"]) if x["a_dot"].ndim else 0}
        counts["seconds"] = counts["directions"] if weights is None else len(weights)
    else:
        counts = {"directions": stack.directions, "seconds": stack.seconds}
        a = a if stack.shared else _as_rows(x["a"])
    arrays: dict[str, ndarray] = {"a": a, "b": b}
    if bias is not None:
        arrays["bias"] = bias
    if weights is not None:
        arrays["weights"] = weights
    for name, y in (*x.items(), *kept.items()):
        if form is not None and name in form.others:
            arrays[name] = residual_view(sizes, y, label_of(form, name))
        elif name not in ("a", "b", "bias"):
            arrays[name] = _promoted(name, y, x["a"].shape, sizes, counts, stack)
    specs = _results(backward, x, sizes, (dtype, acc), counts, needs, keep, stack, form)
    made, result = _outputs(specs, out, {**x, **kept}, backward, form)
    for name, y in made.items():
        like = "a" if name.startswith("d_a") else name.removeprefix("d_")
        if stack is not None and name not in SHARED and not (stack.shared and like == "a"):
            arrays[name] = y if stack.shared and name == "pre" else _as_rows(y)
        elif form is not None and like in form.others:
            arrays[name] = residual_view(sizes, y)
        else:
            arrays[name] = _as_matrix(like, y, sizes)
    moved = "a_ddot" in x if stack is None else stack.moved
    whole = None if form is None else activation.over(1)
    jet = formulas_of(activation, whole, backward, arrays, pattern, guard, moved, stack is not None)
    sized: Fields = dict(zip(("m", "n", "k", "batch"), sizes, strict=False)) | counts
    sized |= {"dtype": dtype, "acc_dtype": acc, "pattern": pattern, "moved": moved}
    how: Fields = {"backward": backward, "stacked": stack is not None, "result": result}
    how["shared"] = stack is not None and stack.shared
    if stack is not None:
        how |= {"behind": stack.behind, "by_sums": stack.by_sums}
    how |= {"operands": () if form is None else form.others}
    p = JetProblem(activation=activation, arrays=arrays, jet=jet, **sized, **how)
    if p.batch:
        fixed = ("weights", "a_dot") if p.shared else ("weights",)
        fold(p, SHARED, ghosts, members=MEMBERS, kept=fixed)
    return p


def _as_rows(x: ndarray) -> ndarray:
    """Return a stack with the members of a point in one row."""
    if not x.flags.c_contiguous:
        raise ValueError(f"a stack must be contiguous, got strides {x.strides}")
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def needs_of(form: Form | None) -> tuple[str, ...]:
    """Return the operands whose gradients a backward makes."""
    return NEEDS if form is None else ("a", "b", *form.others, "a_dot", "a_ddot")


def label_of(form: Form | None, name: str) -> str:
    """Return what a message calls an array."""
    if form is None or name.removeprefix("d_") not in form.others:
        return name
    label = form.label(name)
    before, core = ("d_", label[2:]) if name.startswith("d_") else ("", label)
    return f"{before}operands[{name.rpartition('_')[2]}]" if core in _OWN else label


#: The names of a call's other arrays, which an operand of a formula may have too.
_OWN = frozenset((*NEEDS, *MEMBERS, "grad", "weights", "pre", "out"))


def _checked(given: Mapping[str, Any], form: Form | None) -> tuple[dict[str, ndarray], Any, Any]:
    """Return the operands that are there, their dtype, and its accumulator's."""
    grads = {name: y for name, y in given.items() if not name.startswith("grad") or y is not None}
    if form is None:
        return checked(grads)
    found: dict[str, ndarray] = {}
    for name, y in grads.items():
        if y is not None or name in form.others:
            found[name] = as_plain(label_of(form, name), y)
    for name in ("a", "b"):
        if name not in found:
            raise TypeError(f"{name} must be an array, got None")
    return found, *same_dtype({label_of(form, name): y for name, y in found.items()})


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
    if stack is not None and stack.behind and name == "grad_dot":
        return shaped(x, name, (sizes.n, stack.behind))
    if stack is not None and stack.shared and name != "grad":
        shape = (stack.directions, sizes.k) if name == "a_dot" else sizes.visible
        found: ndarray = shaped(x, name, shape, "the shape")
        return found[:, None, :] if name == "a_dot" else found
    if stack is not None:
        members = _members(stack, name == "grad")
        columns = stack.behind if stack.behind and name == "grad" else sizes.n
        shape = (*sizes.visible[:-1], members, columns)
        return _as_rows(shaped(x, name, shape, "the shape"))
    own = (counts[MEMBERS[name]],) if name in MEMBERS else ()
    if name in LEFT:
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
    counts: Mapping[str, int], needs: Any, keep: bool, stack: Stack | None, form: Form | None,
) -> dict[str, tuple[Shape, Any] | None]:  # fmt: skip
    """Return the shape and dtype of each result, in their order; None where it is not wanted."""
    dtype, acc = dtypes
    if backward:
        names = needs_of(form)
        wanted = names if needs is None else check_needs(needs, names)
        numbers = (
            [] if form is None else [f"x_{i}" for i, is_one in enumerate(form.numbers) if is_one]
        )
        own = {y: acc if y in numbers else dtype for y in names}
        shapes = {y: x[y].shape for y in names if y in x}
        if stack is not None and stack.by_sums:
            shapes["a"] = (*sizes.visible[:-1], _members(stack, False), sizes.n)
        return {f"d_{y}": (shapes[y], own[y]) if y in wanted and y in x else None for y in names}
    d, s, visible = counts["directions"], counts["seconds"], sizes.visible
    whole = {"": visible, "_dot": (d, *visible), "_ddot": (s, *visible)}
    if stack is not None:
        *rows, n = visible
        found: dict[str, Any] = {"out": ((*rows, _members(stack, True), n), dtype)}
        found |= {"out_dot": None, "out_ddot": None}
        if keep:
            kept = visible if stack.shared else (*rows, _members(stack, False), n)
            found |= {"pre": (kept, acc)}
            found |= {"pre_dot": None, "pre_ddot": None}
        return found
    found = {f"out{end}": (shape, dtype) for end, shape in whole.items()}
    if keep:
        found |= {f"pre{end}": (shape, acc) for end, shape in whole.items()}
        if "a_ddot" not in x:
            found["pre_ddot"] = None
    return found


def _outputs(
    specs: Mapping[str, Any], out: Any, others: dict[str, ndarray], backward: bool,
    form: Form | None,
) -> tuple[Fields, Any]:  # fmt: skip
    """Return the results by name, new or the caller's, and what the caller gets."""
    outs = outputs(out, needs_of(form) if backward else (), len(specs))
    others = {label_of(form, name): y for name, y in others.items()}
    made: dict[str, ndarray] = {}
    found: list[Any] = []
    for (name, spec), given in zip(specs.items(), outs, strict=True):
        array, label = None, label_of(form, name)
        if spec is None:
            if given is not None:
                raise ValueError(
                    f"{label} in out must be None where it is not needed, got an array"
                )
        elif given is None:
            array = np.empty(*spec)
        else:
            shape, dtype = spec
            others[label] = array = output(label, given, shape, dtype, others)
        if array is not None:
            made[name] = array
        found.append(array if given is None else given)
    if backward:
        return made, LayerJetGradients(*found) if form is None else tuple(found)
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
    f: Any, whole: Epilogue | None, backward: bool, arrays: Mapping[str, ndarray], pattern: bytes,
    guard: bool, moved: bool, stacked: bool,
) -> Jet:  # fmt: skip
    """Return the formulas of a call on these arrays, without what is absent."""
    if whole is not None:
        jet = epilogue_jet_backward(whole) if backward else epilogue_jet(whole)
        unused = {f"d_{x}" for x in whole.operands} - arrays.keys()
        if backward and unused:
            jet = jet.each(
                lambda part: part.select(*[x for x, _ in part.results if x not in unused])
            )
    else:
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
