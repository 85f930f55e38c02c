"""The double backward and forward mode as launches: products (`batches`), passes over elements.

T = u @ b + a @ v + w + z and the pre-activation are made in the accumulator's dtype; a pass turns
them into the elementwise results and into Q and S (in the operands' dtype, as grad_pre); what is
left are the products of a backward, with Q and S in place of grad_pre. Where a result is the sum of
two products, each is made on its own and the next pass adds them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.cuda.plan import batches, lower
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf, replace_leaves
from numfuse.language.graph import constant
from numfuse.problem.shapes import shares_weights

if TYPE_CHECKING:
    from numfuse.problem.second_order import GemmDoubleBackwardProblem, GemmTangentProblem

__all__ = ["double_backward", "tangent"]


def zero(rec: Recorder, out: View) -> None:
    """Record out = 0."""
    made = Epilogue("zero", (), (), (("out", constant(0)),))
    accumulator = "float64" if out.dtype == "float64" else "float32"
    lower.pointwise(rec, made, accumulator, out.dtype, {}, {"out": out})


def _pass(
    rec: Recorder,
    p: Any,
    epilogue: Epilogue,
    sources: dict[str, View],
    results: dict[str, View],
    **twice: str,
) -> None:
    """Record a pass beside the products of a problem; see `lower.pointwise`."""
    made = lower.guarded(p, epilogue)
    lower.pointwise(rec, made, p.acc_dtype.name, p.dtype.name, sources, results, twice)


# --- products -----------------------------------------------------------------------------------
def _wide(rec: Recorder, p: Any) -> View:
    """Room for a matrix of the result's shape in the accumulator's dtype."""
    return rec.fresh((*p.batch, p.m, p.n), p.acc_dtype.name)


def _pre(rec: Recorder, p: Any, bind: Bind) -> View:
    """Record the pre-activation."""
    pre = _wide(rec, p)
    lower.layer(rec, p, bind, pre, None, epilogues.residual_layer().without("residual"))
    return pre


def _moves(p: Any) -> bool:
    return not (p.u is None and p.v is None and p.w is None and p.z is None)


def _without_products(view: View, axis: int) -> View:
    """A factor of a sum of no products: its axis of K has length 0."""
    shape = list(view.shape)
    shape[axis] = 0
    return replace(view, shape=tuple(shape))


def _moved(rec: Recorder, p: Any, bind: Bind, out: View | None) -> list[View]:
    """Record T = u @ b + a @ v + w + z, and return the one or two matrices whose sum it is.

    One product goes to `out`, where that is given; two go to matrices of their own.
    """
    acc = p.acc_dtype.name
    a, b, u, v, w, z = map(bind, ("a", "b", "u", "v", "w", "z"))
    factors = [(x, y) for x, y in ((u, b), (a, v)) if x is not None and y is not None]
    if not factors:
        factors.append((_without_products(a, -1), _without_products(b, -2)))
    absent = [name for name, x in (("bias", w), ("residual", z)) if x is None]
    made = epilogues.residual_layer().without(*absent)
    found = []
    for i, (x, y) in enumerate(factors):
        target = out if out is not None and len(factors) == 1 else _wide(rec, p)
        if i:
            batches.product(rec, x, y, p.batch, target, acc)
        else:
            batches.product(rec, x, y, p.batch, target, acc, epilogue=made, bias=w, extra=z)
        found.append(target)
    return found


def _unmoved(p: Any) -> tuple[str, ...]:
    """Return ("w",), the second term of T = t + w, where `_moved` makes one matrix."""
    return () if p.u is not None and p.v is not None else ("w",)


def _sum(rec: Recorder, p: Any, parts: list[View], out: View) -> None:
    """Record out = the sum of two matrices, rounded once."""
    sources = dict(zip(("z", "term_0"), parts, strict=True))
    _pass(rec, p, epilogues.sum_of_terms(1), sources, {"out": out})


def _sum_of_products(
    rec: Recorder, p: Any, factors: list[tuple[View, View]], out: View, free: bool
) -> None:
    """Record out = the sum of one product or two, rounded once."""
    acc = p.acc_dtype.name
    parts = [out] if len(factors) == 1 else [rec.fresh(out.shape, acc) for _ in factors]
    for (x, y), part in zip(factors, parts, strict=True):
        batches.product(rec, x, y, p.batch, part, acc, free=free)
    if len(parts) > 1:
        _sum(rec, p, parts, out)


def _column_sums(rec: Recorder, p: Any, x: View, out: View) -> None:
    """Record out = the sums of the columns of x, as the backward's of d_bias."""
    m, batch = p.m, p.batch
    if batch and shares_weights(p) and all(batch):
        rows = x.rows
        assert rows is not None, "x is contiguous"
        m, batch, x, out = m * prod(batch), (), rows, batches.matrix_of(out)
    v = lower.Backward(m, batch, x, None, None, None, None, None, None, out)
    summed = epilogues.residual_layer().backward().select("d_bias")
    lower.slopes(rec, v, p.n, 0, p.acc_dtype.name, summed, None)


# --- operations ---------------------------------------------------------------------------------
def tangent(rec: Recorder, p: GemmTangentProblem, bind: Bind) -> None:
    """out as in the forward, out_dot = act'(pre) * T."""
    out_dot = bind("out_dot")
    made = _of_moved(epilogues.layer_tangent(p.activation.curve), "z_dot")
    made = made.select("out_dot").without("bias", *_unmoved(p))
    sources: dict[str, View] = {}
    if _moves(p) and "z" in made.inputs:
        sources["z"] = _wide(rec, p)
    # as the forward with its pre-activation, so with the same bits
    lower.layer(rec, p, bind, bind("out"), sources.get("z"), lower.layer_of(p))
    if not _moves(p):
        zero(rec, out_dot)
        return
    whole = made["out_dot"] is leaf("t")
    if "t" in made.inputs:
        sources |= zip(("t", "w"), _moved(rec, p, bind, out_dot if whole else None), strict=False)
    if not whole:
        _pass(rec, p, made, sources, {"out_dot": out_dot})


def _of_moved(epilogue: Epilogue, name: str) -> Epilogue:
    """Return the epilogue with T = t + w in the place of the input of this name."""
    moved = {leaf(name): leaf("t") + leaf("w")}
    graphs = replace_leaves(epilogue.graphs, moved)
    names = (name for name, _ in epilogue.results)
    kept = tuple(x for x in epilogue.inputs if x != name)
    return Epilogue(epilogue.name, (), (*kept, "t", "w"), tuple(zip(names, graphs, strict=True)))


def double_backward(rec: Recorder, p: GemmDoubleBackwardProblem, bind: Bind) -> None:
    """T, Q and S, and from them the gradients of the backward's gradients."""
    act = p.activation
    identity, moved = act.is_identity, _moves(p)
    bent = moved and not identity and not act.second_derivative_is_zero()
    wanted: dict[str, View] = {}
    for name, there in (
        ("d_grad", moved),
        ("d_a", bent or p.v is not None),
        ("d_b", bent or p.u is not None),
        ("d_bias", bent),
        ("d_residual", False),
    ):
        x = bind(name)
        if x is not None and there:
            wanted[name] = x
        elif x is not None:
            zero(rec, x)
    if not wanted:
        return
    q: View | None = None
    s: View | None = bind("grad")
    q_wide: View | None = None
    if identity:
        if "d_grad" in wanted:
            parts = _moved(rec, p, bind, wanted["d_grad"])
            if len(parts) > 1:
                _sum(rec, p, parts, wanted["d_grad"])
    else:
        q, q_wide, s = _elementwise(rec, p, bind, wanted, bent)
    pairs: dict[str, list[tuple[View, View]]] = {"d_a": [], "d_b": []}
    a, b = bind("a"), bind("b")
    if q is not None:
        pairs["d_a"].append((q, b.turned))
        pairs["d_b"].append((a.turned, q))
    if p.v is not None and s is not None:
        pairs["d_a"].append((s, bind("v").turned))
    if p.u is not None and s is not None:
        pairs["d_b"].append((bind("u").turned, s))
    for name, factors in pairs.items():
        if name in wanted:
            _sum_of_products(rec, p, factors, wanted[name], name == "d_b")
    if "d_bias" in wanted and q_wide is not None:
        _column_sums(rec, p, q_wide, wanted["d_bias"])


def _elementwise(
    rec: Recorder, p: GemmDoubleBackwardProblem, bind: Bind, wanted: dict[str, View], bent: bool
) -> tuple[View | None, View | None, View | None]:
    """Record d_grad, and Q and S where they are needed: Q, Q before it was rounded, and S."""
    acc, storage = p.acc_dtype.name, p.dtype.name
    products = "d_a" in wanted or "d_b" in wanted
    sums = "d_bias" in wanted
    bends = bent and (products or sums)
    shape = (*p.batch, p.m, p.n)
    results: dict[str, View] = {}
    if "d_grad" in wanted:
        results["d_grad"] = wanted["d_grad"]
    if bends and (products or storage == acc):
        results["q"] = rec.fresh(shape, storage)
    if bends and sums and storage != acc:
        results["q_wide"] = rec.fresh(shape, acc)
    if products and (p.u is not None or p.v is not None):
        results["s"] = rec.fresh(shape, storage)
    if results:
        made = epilogues.layer_double_backward(p.activation.curve)
        made = made.without("bias", *_unmoved(p))
        chosen = made.select(*("q" if name == "q_wide" else name for name in results))
        sources: dict[str, View] = {}
        if "z" in chosen.inputs:
            sources["z"] = _pre(rec, p, bind) if p.pre is None else bind("pre")
        if "t" in chosen.inputs:
            sources |= zip(("t", "w"), _moved(rec, p, bind, None), strict=False)
        if "grad" in chosen.inputs:
            sources["grad"] = bind("grad")
        _pass(rec, p, made, sources, results, q_wide="q")
    q = results.get("q")
    return q, results.get("q_wide", q), results.get("s")
