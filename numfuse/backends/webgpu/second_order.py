"""The double backward and forward mode as dispatches: products of `run`, joined by one pass over
their elements.

T = u @ b + a @ v + w + z and the pre-activation are made in the accumulator's dtype; a pass turns
them into the elementwise results and into Q and S; what is left are the products of a backward,
with Q and S in place of grad_pre.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu import lower
from numfuse.backends.webgpu.lower import Cut, Places
from numfuse.backends.webgpu.shaders.kernels import TYPES, Kernel, _enable, _guarded
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.backends.webgpu.stores import Store, View, copy, fresh
from numfuse.expr import Expr, Keyed
from numfuse.language import wgsl
from numfuse.problem.shapes import equal

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.problem.second_order import (
        GatedDoubleBackwardProblem,
        GatedTangentProblem,
        GemmDoubleBackwardProblem,
        GemmTangentProblem,
    )

__all__ = ["double_backward", "gated_double_backward", "gated_tangent", "tangent", "zero"]


@dataclass(frozen=True, eq=False)
class Pointwise(Keyed, Kernel):
    """Outputs that are expressions of inputs and of activations at one of them."""

    accumulator: str
    what: str
    #: (name, storage dtype); an expression knows an input as `<name>_here`.
    inputs: tuple[tuple[str, str], ...]
    #: (name, storage dtype, expression in the accumulator's type)
    outputs: tuple[tuple[str, str, str], ...]
    #: (name of a value, formula, the input it is of, whether it is guarded)
    values: tuple[tuple[str, Expr, str, bool], ...]
    one_rounding: bool

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.what} {self.accumulator}"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        return (
            *((name, TYPES[dtype], "read") for name, dtype in self.inputs),
            *((name, TYPES[dtype], "read_write") for name, dtype, _ in self.outputs),
        )

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        texts, values = [], []
        for name, graph, of, guard in self.values:
            texts.append(wgsl.function(graph, f"{name}_of", self.accumulator))
            if guard:
                texts.append(_guarded(f"{name}_of", acc))
            values.append((name, f"{name}_of{'_guarded' if guard else ''}({of}_here)"))
        functions = "\n\n".join(texts)
        return expand(
            "pointwise.wgsl",
            {
                "ENABLE": _enable(b[1] for b in self.buffers),
                "BUFFERS": self._buffers(),
                "FUNCTIONS": f"{wgsl.prelude(functions, self.accumulator, self.one_rounding)}"
                f"\n\n{functions}\n",
                "ACC": acc,
                "READ": [name for name, _ in self.inputs],
                "VALUES": values,
                "WRITTEN": [(name, TYPES[dtype], text) for name, dtype, text in self.outputs],
            },
        )


def _pass(
    store: Store,
    what: str,
    accumulator: np.dtype[Any],
    inputs: dict[str, View],
    values: Sequence[tuple[str, Expr, str, bool]],
    outputs: dict[str, tuple[View, str]],
) -> None:
    """Record one pass over arrays of one shape; what is not contiguous is copied first or last."""
    device = store.device
    late: list[tuple[View, View]] = []
    found: dict[str, View] = {}
    for name, view in inputs.items():
        found[name] = view
        if not view.contiguous:
            found[name] = fresh(device, view.shape, np.dtype(view.dtype), "a contiguous copy")
            copy(store.commands, view, found[name])
    for name, (view, _) in outputs.items():
        found[name] = view
        if not view.contiguous:
            found[name] = fresh(device, view.shape, np.dtype(view.dtype), "a contiguous result")
            late.append((found[name], view))
    equal("the arrays of a pass", *(view.shape for view in found.values()))
    size = prod(next(iter(found.values())).shape)
    kernel = Pointwise(
        accumulator.name,
        what,
        tuple((name, view.dtype) for name, view in inputs.items()),
        tuple((name, view.dtype, text) for name, (view, text) in outputs.items()),
        tuple(values),
        device.one_rounding[accumulator.name],
    )
    # A device binds a part of a large array at a time.
    itemsize = max(view.itemsize for view in found.values())
    step = (device.binding_limit - 2 * device.alignment) // itemsize // 4 * 4
    for start in range(0, size, step):
        count = min(step, size - start)
        bound = [
            replace(view, shape=(count,), strides=(1,), offset=view.offset + start).bound(device)
            for view in found.values()
        ]
        store.commands.dispatch(
            kernel,
            [binding for binding, _ in bound],
            (0, count, *(offset for _, offset in bound)),
            (*device.grid(-(-count // 256)), 1),
        )
    for source, out in late:
        copy(store.commands, source, out)


def zero(store: Store, x: ndarray, accumulator: np.dtype[Any]) -> None:
    """Record x = 0."""
    _pass(store, "zero", accumulator, {}, (), {"out": (store.target(x), "0")})


def _moved(
    store: Store, p: GemmDoubleBackwardProblem | GemmTangentProblem, out: View, t: View | None
) -> None:
    """Record out = u @ b + a @ v + w + z; `t` is in the accumulator's dtype, where two products of
    halves meet."""
    acc = p.acc_dtype
    products = []
    a, b = store.source(p.a), store.source(p.b)
    if p.u is not None:
        products.append((store.source(p.u), b))
    if p.v is not None:
        products.append((a, store.source(p.v)))
    if not products:  # sums of no products
        products.append((_empty(a, -1), _empty(b, -2)))
    w, z = (None if x is None else store.source(x) for x in (p.w, p.z))
    target = out if len(products) == 1 or t is None else t
    for i, (x, y) in enumerate(products):
        if i:
            lower._product(store, x, y, p.batch, target, acc, add=True)
        else:
            lower._product(store, x, y, p.batch, target, acc, bias=w, extra=z)
    if target is not out:
        copy(store.commands, target, out)


def _empty(view: View, axis: int) -> View:
    """A factor without products: its axis of K has length 0."""
    shape = list(view.shape)
    shape[axis] = 0
    return replace(view, shape=tuple(shape))


def _wide(store: Store, p: GemmDoubleBackwardProblem | GemmTangentProblem, what: str) -> View:
    return fresh(store.device, (*p.batch, p.m, p.n), p.acc_dtype, what)


def _pre(store: Store, p: GemmDoubleBackwardProblem | GemmTangentProblem) -> View:
    pre = _wide(store, p, "the pre-activation")
    bias = None if p.bias is None else store.source(p.bias)
    a, b = store.source(p.a), store.source(p.b)
    lower._product(store, a, b, p.batch, pre, p.acc_dtype, bias=bias)
    return pre


def _moves(p: GemmDoubleBackwardProblem | GemmTangentProblem) -> bool:
    return not (p.u is None and p.v is None and p.w is None and p.z is None)


def tangent(store: Store, p: GemmTangentProblem) -> None:
    """out as in the forward, out_dot = act'(pre) * T."""
    value, slope = lower.value_of(p.activation), lower.slope_of(p.activation)
    if not _moves(p) or value is None:
        lower.forward(store, p)
        if not _moves(p):
            zero(store, p.out_dot, p.acc_dtype)
        else:
            _moved(store, p, store.target(p.out_dot), _wide(store, p, "T"))
        return
    pre, t = _pre(store, p), _wide(store, p, "T")
    _moved(store, p, t, None)
    values = [("value", value, "pre", False)]
    if slope is not None:
        values.append(("slope", slope, "pre", p.guard))
    moved = "t_here" if slope is None else "slope * t_here"
    outs = {"out": (store.target(p.out), "value"), "out_dot": (store.target(p.out_dot), moved)}
    _pass(store, "tangent", p.acc_dtype, {"pre": pre, "t": t}, values, outs)


def double_backward(
    store: Store, p: GemmDoubleBackwardProblem, outs: dict[str, tuple[View, bool]]
) -> None:
    """T, Q and S, and from them the gradients of the backward's gradients.

    `outs` has the gradients that are wanted, "d_grad", "d_a", "d_b" and "d_bias": where to write
    each, and whether it is added to what is there.
    """
    acc, act = p.acc_dtype, p.activation
    identity, moved = lower.value_of(act) is None, _moves(p)
    bent = moved and not identity and not act.second_derivative_is_zero()
    wanted: dict[str, tuple[View, bool]] = {}
    for name, there in (
        ("d_grad", moved),
        ("d_a", bent or p.v is not None),
        ("d_b", bent or p.u is not None),
        ("d_bias", bent),
    ):
        if name in outs and there:
            wanted[name] = outs[name]
        elif name in outs and not outs[name][1]:
            _pass(store, "zero", acc, {}, (), {"out": (outs[name][0], "0")})
    if not wanted:
        return
    products = "d_a" in wanted or "d_b" in wanted
    q: View | None = None
    s: View | None = store.source(p.grad)
    if identity:
        if "d_grad" in wanted:
            _moved(store, p, wanted["d_grad"][0], _wide(store, p, "T"))
    else:
        bends = bent and (products or "d_bias" in wanted)
        q, s = _elementwise(store, p, wanted, bends, products)
    pairs: dict[str, list[tuple[View, View]]] = {"d_a": [], "d_b": []}
    a, b = store.source(p.a), store.source(p.b)
    if q is not None:
        pairs["d_a"].append((q, lower._turned(b)))
        pairs["d_b"].append((lower._turned(a), q))
    if p.v is not None and s is not None:
        pairs["d_a"].append((s, lower._turned(store.source(p.v))))
    if p.u is not None and s is not None:
        pairs["d_b"].append((lower._turned(store.source(p.u)), s))
    for name, factors in pairs.items():
        if name in wanted:
            _sum_of_products(store, p, factors, *wanted[name], name == "d_b")
    if "d_bias" in wanted and q is not None:
        _column_sums(store, p, q, *wanted["d_bias"])


def _elementwise(
    store: Store,
    p: GemmDoubleBackwardProblem,
    wanted: dict[str, tuple[View, bool]],
    bends: bool,
    products: bool,
) -> tuple[View | None, View | None]:
    """Record d_grad, and Q and S where they are needed, which are returned."""
    slope = lower.slope_of(p.activation)
    pre = _pre(store, p) if p.pre is None else store.source(p.pre)
    inputs = {"pre": pre}
    values: list[tuple[str, Expr, str, bool]] = []
    outs: dict[str, tuple[View, str]] = {}
    if slope is not None:
        values.append(("slope", slope, "pre", p.guard))
    if bends or "d_grad" in wanted:
        inputs["t"] = _wide(store, p, "T")
        _moved(store, p, inputs["t"], None)
    if "d_grad" in wanted:
        text = "t_here" if slope is None else "slope * t_here"
        outs["d_grad"] = wanted["d_grad"][0], text
    q = s = None
    if bends:
        q = _wide(store, p, "Q")
        values.append(("second", p.activation.trace(2), "pre", p.guard))
        outs["q"] = q, "grad_here * second * t_here"
    if products and (p.u is not None or p.v is not None):
        s = _wide(store, p, "S")
        outs["s"] = s, "grad_here" if slope is None else "grad_here * slope"
    if bends or s is not None:
        inputs["grad"] = store.source(p.grad)
    if not (bends or s is not None or "d_grad" in wanted):
        return None, None
    _pass(store, "double backward", p.acc_dtype, inputs, values, outs)
    return q, s


def _sum_of_products(
    store: Store,
    p: GemmDoubleBackwardProblem,
    factors: list[tuple[View, View]],
    out: View,
    add: bool,
    free: bool,
) -> None:
    """Record out = the sum of products, rounded once; with `add` out += that sum."""
    target = out
    if len(factors) > 1 and out.dtype != p.acc_dtype.name:
        target = fresh(store.device, out.shape, p.acc_dtype, "a sum of products")
    for i, (x, y) in enumerate(factors):
        lower._product(store, x, y, p.batch, target, p.acc_dtype, free=free, add=add or i > 0)
    if target is not out:
        copy(store.commands, target, out)


def _column_sums(store: Store, p: GemmDoubleBackwardProblem, x: View, out: View, add: bool) -> None:
    """Record out = the sums of the columns of x, as the backward's of d_bias."""
    device, acc = store.device, p.acc_dtype
    by_bias = Places.of(p.batch, out.shape[:-2])
    places = by_bias.each()
    tile = lower.tile_of(device, p.m, p.n, acc)
    rows = -(-p.m // tile.block_m)
    sums = fresh(device, (places.count, rows, p.n), acc, "column sums")
    if p.m and p.n and places.count:
        lower._launch(
            store,
            p.m,
            p.n,
            0,
            places,
            Cut(0),
            tile,
            acc,
            tails={"extra": x, "out": None},
            column_sums=sums,
            pre_is_read=False,
            function=None,
            slope=True,
            guard=False,
        )
    lower._join(store, sums, by_bias.count, by_bias.segments * rows, out, add)


def _formulas(activation: Activation, names: Sequence[str], guard: bool) -> list[Any]:
    orders = {"value": 0, "slope": 1, "second": 2}
    return [
        (name, activation.trace(orders[name]), "a", guard and name != "value") for name in names
    ]


def _sum_text(*terms: tuple[str, ...] | None) -> str:
    """The sum of up to two products, the factors of which are given, as an expression.

    As one fma: of a product and a sum a compiler makes one or does not, by what else needs the
    product, and a gradient would have other bits alone than beside another.
    """
    products = [term for term in terms if term is not None]
    if len(products) < 2:
        return " * ".join(*products) if products else "0"
    (*factors, last), other = products
    return f"fma({' * '.join(factors)}, {last}, {' * '.join(other)})"


def gated_double_backward(store: Store, p: GatedDoubleBackwardProblem) -> None:
    """One pass over up to five operands and three results."""
    bent = p.u is not None and not p.activation.second_derivative_is_zero()
    u, v = p.u is not None, p.v is not None
    texts = {
        "d_grad": (
            p.d_grad,
            (("u_here", "b_here", "slope") if u else None, ("v_here", "value") if v else None),
        ),
        "d_a": (
            p.d_a,
            (
                ("u_here", "grad_here", "b_here", "second") if bent else None,
                ("v_here", "grad_here", "slope") if v else None,
            ),
        ),
        "d_b": (p.d_b, (("u_here", "grad_here", "slope") if u else None,)),
    }
    wanted = {name: (x, _sum_text(*terms)) for name, (x, terms) in texts.items() if x is not None}
    arrays = {"a": p.a, "b": p.b, "grad": p.grad, "u": p.u, "v": p.v}
    _gate_pass(store, p, "double gate", arrays, wanted)


def gated_tangent(store: Store, p: GatedTangentProblem) -> None:
    """One pass over up to four operands and both results."""
    text = _sum_text(
        ("u_here", "b_here", "slope") if p.u is not None else None,
        ("v_here", "value") if p.v is not None else None,
    )
    wanted = {"out": (p.out, "value * b_here"), "out_dot": (p.out_dot, text)}
    _gate_pass(store, p, "gate's tangent", {"a": p.a, "b": p.b, "u": p.u, "v": p.v}, wanted)


def _gate_pass(
    store: Store,
    p: GatedDoubleBackwardProblem | GatedTangentProblem,
    what: str,
    arrays: dict[str, ndarray | None],
    wanted: dict[str, tuple[ndarray, str]],
) -> None:
    """Record a pass that reads what its expressions name."""
    if not wanted or not prod(p.shape):
        return
    text = " ".join(text for _, text in wanted.values())
    names = [name for name in ("value", "slope", "second") if name in text]
    inputs = {
        name: store.source(x)
        for name, x in arrays.items()
        if x is not None and (f"{name}_here" in text or (name == "a" and names))
    }
    outs = {name: (store.target(x), text) for name, (x, text) in wanted.items()}
    _pass(store, what, p.acc_dtype, inputs, _formulas(p.activation, names, p.guard), outs)
