"""A layer and its derivatives: products, each with an epilogue, and passes over their elements.

A double backward and forward mode make T = u @ b + a @ v + w + z and the pre-activation in the
accumulator's dtype; an elementwise epilogue turns them into the elementwise results and into Q and
S; what is left are the products of a backward, with Q and S in place of grad_pre.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy import ndarray

from numfuse import epilogues
from numfuse.backends.webgpu.lower.elementwise import elementwise, zero
from numfuse.backends.webgpu.lower.places import Cut, Places, chains_of, tile_of
from numfuse.backends.webgpu.lower.products import launch, product, sum_of_products
from numfuse.backends.webgpu.lower.sums import join
from numfuse.backends.webgpu.shaders.formula import Formula
from numfuse.backends.webgpu.stores import Region, Store, fresh

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue
    from numfuse.language.curves import Curve
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem
    from numfuse.problem.second_order import GemmDoubleBackwardProblem, GemmTangentProblem

    _Moving: TypeAlias = GemmDoubleBackwardProblem | GemmTangentProblem

#: Where to write each of the results that are wanted, and whether it is added to what is there.
_Outs: TypeAlias = Mapping[str, tuple[Region, bool]]
#: The gradient of a pre-activation, b, and a.
_Term: TypeAlias = tuple[Region, ndarray | None, ndarray | None]


def layer_backward(f: Curve) -> Epilogue:
    """Return the gradient by the pre-activation of a layer."""
    return epilogues.layer(f).select("out").backward()


def residual_backward() -> Epilogue:
    """Return the gradients of a residual layer, which are those of its result."""
    return epilogues.residual_layer().backward()


def forward(store: Store, p: GemmProblem, outs: _Outs) -> None:
    """Record act(a @ b + bias), or a @ b + bias + residual, and the pre-activation if wanted."""
    absent = () if p.bias is not None else ("bias",)
    if p.residual is None:
        formula = Formula.of(epilogues.layer, p.activation.curve, absent)
    else:
        formula = Formula.of(epilogues.residual_layer, None, absent)
    a, b = store.source(p.a), store.source(p.b)
    given = {"bias": p.bias, "residual": p.residual}
    arrays = {name: store.source(x) for name, x in given.items() if x is not None}
    made = {name: outs[name][0] for name in ("out", "pre") if name in outs}
    product(store, a, b, p.batch, made, p.acc_dtype, formula.choose(*made), arrays)


def backward(store: Store, p: GemmBackwardProblem, outs: _Outs) -> None:
    """Record grad_pre = grad * act'(pre), and what is made of it."""
    absent = () if p.bias is not None and p.pre is None else ("bias",)
    formula = Formula.of(layer_backward, p.activation.curve, absent, p.guard)
    grad_pre: Region | None = None
    arrays = {"grad": store.source(p.grad)}
    if formula.alias("d_z") == "grad":
        grad_pre = arrays["grad"]
        if "d_bias" in outs:
            _column_sums(store, p, grad_pre, *outs["d_bias"])
    else:
        made = {}
        if "d_a" in outs or "d_b" in outs:
            grad_pre = fresh(store.device, (*p.batch, p.m, p.n), p.acc_dtype, "grad_pre")
            made["d_z"] = grad_pre
        summed = ("d_z",) if "d_bias" in outs else ()
        chosen = formula.choose(*made, summed=summed)
        factors = None
        if p.pre is not None:
            arrays["z"] = store.source(p.pre)
        elif "z" in chosen.inputs:
            factors = store.source(p.a), store.source(p.b)
            if chains_of(store.device, p.m, p.n, p.k, Places.of(p.batch, p.batch), p.acc_dtype):
                arrays["z"] = fresh(store.device, (*p.batch, p.m, p.n), p.acc_dtype, "a product")
                product(store, *factors, p.batch, {"out": arrays["z"]}, p.acc_dtype)
                factors = None
            if p.bias is not None:
                arrays["bias"] = store.source(p.bias)
        if made or summed:
            _rows(store, p, chosen, arrays, made, factors, *outs.get("d_bias", (None, False)))
    if grad_pre is not None:
        _gradients(store, p, [(grad_pre, p.b, p.a)], outs)


def _gradients(store: Store, p: GemmBackwardProblem, terms: Sequence[_Term], outs: _Outs) -> None:
    """Record d_a and d_b: the sums of g @ b^T and of a^T @ g over the terms (g, b, a)."""
    if "d_a" in outs:
        factors = [(g, store.source(b).turned) for g, b, _ in terms if b is not None]
        sum_of_products(store, p.batch, p.acc_dtype, factors, *outs["d_a"])
    if "d_b" in outs:
        factors = [(store.source(a).turned, g) for g, _, a in terms if a is not None]
        sum_of_products(store, p.batch, p.acc_dtype, factors, *outs["d_b"], free=True)


def _column_sums(store: Store, p: GemmBackwardProblem, x: Region, out: Region, add: bool) -> None:
    """Record the sums of the columns of x, of which each batch axis that `out` lacks is summed."""
    absent = ("z", "bias", "residual")
    formula = Formula.of(residual_backward, None, absent).choose(summed=("d_bias",))
    _rows(store, p, formula, {"grad": x}, {}, None, out, add)


def _rows(
    store: Store,
    p: GemmBackwardProblem,
    formula: Formula,
    arrays: Mapping[str, Region],
    outs: Mapping[str, Region],
    factors: tuple[Region, Region] | None,
    d_bias: Region | None,
    add: bool,
) -> None:
    """Record a formula of every row, and d_bias from its column sums."""
    device, acc = store.device, p.acc_dtype
    by_bias = Places.of(p.batch, () if d_bias is None else d_bias.shape[:-2])
    # every element of the batch is a place of its own, in the same order
    places = replace(by_bias, outer=by_bias.outer + by_bias.inner, inner=())
    tile = tile_of(device, p.m, p.n, acc)
    rows = -(-p.m // tile.block_m)
    sums = {}
    if d_bias is not None:
        sums["column_sums"] = fresh(device, (places.count, rows, p.n), acc, "column sums")
    if p.m and p.n and places.count:
        k = 0 if factors is None else p.k
        how = (p.m, p.n, k), places, Cut(k), tile, acc
        launch(store, *how, formula, arrays, outs, factors or (), sums)
    if d_bias is not None:
        join(store, sums["column_sums"], by_bias.count, by_bias.segments * rows, d_bias, add)


# --- T, tangents and second derivatives ---------------------------------------------------------
def _moves(p: _Moving) -> bool:
    return not (p.u is None and p.v is None and p.w is None and p.z is None)


def _moved(store: Store, p: _Moving, out: Region) -> None:
    """Record out = u @ b + a @ v + w + z."""
    factors = []
    a, b = store.source(p.a), store.source(p.b)
    if p.u is not None:
        factors.append((store.source(p.u), b))
    if p.v is not None:
        factors.append((a, store.source(p.v)))
    if not factors:  # sums of no products
        none = replace(b, shape=(*b.shape[:-2], 0, b.shape[-1]))
        factors.append((replace(a, shape=(*a.shape[:-1], 0)), none))
    _sums(store, p, factors, out, bias=p.w, residual=p.z)


def _sums(
    store: Store,
    p: _Moving,
    factors: Sequence[tuple[Region, Region]],
    out: Region,
    **added: ndarray | None,
) -> None:
    """Record out = the sum of products, and of a bias and a residual."""
    arrays = {name: store.source(x) for name, x in added.items() if x is not None}
    absent = tuple(name for name in added if name not in arrays)
    formula = Formula.of(epilogues.residual_layer, None, absent).choose("out")
    how = store, p.batch, p.acc_dtype, factors, out
    sum_of_products(*how, formula=formula, arrays=arrays)


def _wide(store: Store, p: _Moving, what: str) -> Region:
    return fresh(store.device, (*p.batch, p.m, p.n), p.acc_dtype, what)


def _operands(store: Store, p: _Moving, moved: str, needed: tuple[str, ...]) -> dict[str, Region]:
    """Record the pre-activation ``z`` and T, which is called `moved`, where they are needed."""
    arrays: dict[str, Region] = {}
    if "z" in needed and p.pre is not None:
        arrays["z"] = store.source(p.pre)
    elif "z" in needed:
        arrays["z"] = _wide(store, p, "the pre-activation")
        factors = store.source(p.a), store.source(p.b)
        _sums(store, p, [factors], arrays["z"], bias=p.bias, residual=None)
    if moved in needed:
        arrays[moved] = _wide(store, p, "T")
        _moved(store, p, arrays[moved])
    return arrays


def tangent(store: Store, p: GemmTangentProblem, outs: _Outs) -> None:
    """Record the forward, and out_dot = act'(pre) * T."""
    moves = _moves(p)
    absent = ("bias",) if moves else ("bias", "z_dot")
    formula = Formula.of(epilogues.layer_tangent, p.activation.curve, absent, p.guard)
    if not moves or formula.alias("out") == "z":
        forward(store, p, outs)
        if moves:
            _moved(store, p, outs["out_dot"][0])
        else:
            zero(store, outs["out_dot"][0], p.acc_dtype)
        return
    made = {name: region for name, (region, _) in outs.items()}
    chosen = formula.choose(*made)
    arrays = _operands(store, p, "z_dot", chosen.inputs)
    elementwise(store, chosen, arrays, made, p.acc_dtype)


def double_backward(store: Store, p: GemmDoubleBackwardProblem, outs: _Outs) -> None:
    """Record T, Q and S, and from them the gradients of the backward's gradients."""
    absent = ("bias", "w") if _moves(p) else ("bias", "w", "t")
    formula = Formula.of(epilogues.layer_double_backward, p.activation.curve, absent, p.guard)
    bent, sloped = formula.has("q"), formula.has("s")
    there = {
        "d_grad": formula.has("d_grad"),
        "d_a": bent or (sloped and p.v is not None),
        "d_b": bent or (sloped and p.u is not None),
        "d_bias": bent,
    }
    wanted = {name: out for name, out in outs.items() if there[name]}
    for name, (out, add) in outs.items():
        if name not in wanted and not add:
            zero(store, out, p.acc_dtype)
    q, s = _elementwise(store, p, formula, wanted)
    terms: list[_Term] = [] if q is None else [(q, p.b, p.a)]
    if s is not None:
        terms.append((s, p.v, p.u))
    _gradients(store, p, terms, wanted)
    if "d_bias" in wanted and q is not None:
        _column_sums(store, p, q, *wanted["d_bias"])


def _elementwise(
    store: Store, p: GemmDoubleBackwardProblem, formula: Formula, wanted: _Outs
) -> tuple[Region | None, Region | None]:
    """Record d_grad, and Q and S where they are needed, which are returned."""
    outs: dict[str, Region] = {}
    if "d_grad" in wanted and formula.alias("d_grad") == "t":
        _moved(store, p, wanted["d_grad"][0])
    elif "d_grad" in wanted:
        outs["d_grad"] = wanted["d_grad"][0]
    q = s = None
    if formula.has("q") and wanted.keys() & {"d_a", "d_b", "d_bias"}:
        q = outs["q"] = _wide(store, p, "Q")
    if ("d_a" in wanted and p.v is not None) or ("d_b" in wanted and p.u is not None):
        if formula.alias("s") == "grad":
            s = store.source(p.grad)
        elif formula.has("s"):
            s = outs["s"] = _wide(store, p, "S")
    if outs:
        chosen = formula.choose(*outs)
        arrays = _operands(store, p, "t", chosen.inputs)
        if "grad" in chosen.inputs:
            arrays["grad"] = store.source(p.grad)
        elementwise(store, chosen, arrays, outs, p.acc_dtype)
    return q, s


#: By the method of a backend, what records its problem.
LAYERS: dict[str, Callable[[Store, Any, _Outs], None]] = {
    "forward": forward,
    "backward": backward,
    "double_backward": double_backward,
    "tangent": tangent,
}
