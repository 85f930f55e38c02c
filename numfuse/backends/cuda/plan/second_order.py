"""The double backward and forward mode as launches: products (`batches`), passes over elements.

T = u @ b + a @ v + w + z and the pre-activation are made in the accumulator's dtype; a pass turns
them into the elementwise results and into Q and S (in the operands' dtype, as grad_pre); what is
left are the products of a backward, with Q and S in place of grad_pre. Where a result is the sum of
two products, each is made on its own and the next pass adds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.cuda.plan import batches, lower
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.epilogues import Epilogue
from numfuse.language.curves import leaf
from numfuse.language.graph import constant
from numfuse.problem.fields import FIELDS

if TYPE_CHECKING:
    from numfuse.problem.second_order import GemmDoubleBackwardProblem, GemmTangentProblem


def zero(rec: Recorder, out: View) -> None:
    """Record out = 0."""
    made = Epilogue("zero", (), (), (("out", constant(0)),))
    accumulator = "float64" if out.dtype == "float64" else "float32"
    lower.pointwise(rec, made, accumulator, out.dtype, {}, {"out": out})


def _wide(rec: Recorder, p: Any) -> View:
    """Room for a matrix of the result's shape in the accumulator's dtype."""
    return rec.fresh((*p.batch, p.m, p.n), p.acc_dtype.name)


def _moves(p: Any) -> bool:
    return not (p.u is None and p.v is None and p.w is None and p.z is None)


def _elements(p: Any) -> Epilogue:
    """Return what is done element by element: d_grad (as out_dot), q and s of z, grad and t + w.

    T is the one matrix t, or the sum of two products t and w (`_moved`).
    """
    made = epilogues.layer_double_backward(p.activation.curve)
    absent = ("w",) if p.u is None or p.v is None else ()
    return made.without("bias", *(absent if _moves(p) else ("t", "w")))


def _moved(rec: Recorder, p: Any, bind: Bind, out: View | None) -> list[View]:
    """Record T = u @ b + a @ v + w + z, and return the one or two matrices whose sum it is.

    One product goes to `out`, where that is given; two go to matrices of their own.
    """
    acc = p.acc_dtype.name
    a, b, u, v, w, z = map(bind, ("a", "b", "u", "v", "w", "z"))
    factors = [(x, y) for x, y in ((u, b), (a, v)) if x is not None and y is not None]
    if not factors:  # a sum of no products
        none = replace(b, shape=(*b.shape[:-2], 0, b.shape[-1]))
        factors.append((replace(a, shape=(*a.shape[:-1], 0)), none))
    absent = [name for name, x in (("bias", w), ("residual", z)) if x is None]
    added = {"epilogue": epilogues.residual_layer().without(*absent), "bias": w, "extra": z}
    found: list[View] = []
    for x, y in factors:
        target = _wide(rec, p) if out is None or len(factors) > 1 else out
        batches.product(rec, x, y, p.batch, target, acc, **({} if found else added))
        found.append(target)
    return found


def _pass(
    rec: Recorder,
    p: Any,
    bind: Bind,
    epilogue: Epilogue,
    sources: dict[str, View],
    results: dict[str, View],
    **twice: str,
) -> None:
    """Record a pass beside the products of a problem, with T and grad where they are inputs.

    See `lower.pointwise`. Where the one result is T itself, its product writes that.
    """
    made = epilogue.select(*[twice.get(name, name) for name in results])
    whole = len(results) == 1 and made.graphs[0] is leaf("t")
    if "t" in made.inputs:
        parts = _moved(rec, p, bind, next(iter(results.values())) if whole else None)
        sources = sources | dict(zip(("t", "w"), parts, strict=False))
    if "grad" in made.inputs:
        sources = sources | {"grad": bind("grad")}
    if not whole:
        made = epilogue.guarded() if p.guard else epilogue
        lower.pointwise(rec, made, p.acc_dtype.name, p.dtype.name, sources, results, twice)


def _sum_of_products(
    rec: Recorder, p: Any, factors: list[tuple[View, View]], out: View, free: bool
) -> None:
    """Record out = the sum of one product or two, rounded once."""
    acc = p.acc_dtype.name
    parts = [out] if len(factors) == 1 else [rec.fresh(out.shape, acc) for _ in factors]
    for (x, y), part in zip(factors, parts, strict=True):
        batches.product(rec, x, y, p.batch, part, acc, free=free)
    if len(parts) > 1:
        sources = dict(zip(("z", "term_0"), parts, strict=True))
        made = epilogues.sum_of_terms(1)
        lower.pointwise(rec, made, acc, p.dtype.name, sources, {"out": out})


def tangent(rec: Recorder, p: GemmTangentProblem, bind: Bind) -> None:
    """out as in the forward, out_dot = act'(pre) * T."""
    made = _elements(p).select("d_grad")
    sources = {"z": _wide(rec, p)} if _moves(p) and "z" in made.inputs else {}
    # as the forward with its pre-activation, so with the same bits
    lower.layer(rec, p, bind, bind("out"), sources.get("z"), lower.layer_of(p))
    if _moves(p):
        _pass(rec, p, bind, made, sources, {"d_grad": bind("out_dot")})
    else:
        zero(rec, bind("out_dot"))


def double_backward(rec: Recorder, p: GemmDoubleBackwardProblem, bind: Bind) -> None:
    """T, Q and S, and from them the gradients of the backward's gradients."""
    made = _elements(p)
    bent = "q" in dict(made.results)
    there = {
        "d_grad": _moves(p),
        "d_a": bent or p.v is not None,
        "d_b": bent or p.u is not None,
        "d_bias": bent,
        "d_residual": False,
    }
    wanted: dict[str, View] = {}
    for name in FIELDS["double_backward"][1]:
        x = bind(name)
        if x is not None and there[name]:
            wanted[name] = x
        elif x is not None:
            zero(rec, x)
    results = _elementwise(rec, p, bind, made, wanted)
    q, s = map(results.get, "qs")
    terms = [(q, bind("b"), bind("a")), (s, bind("v"), bind("u"))]
    pairs = {
        "d_a": [(g, y.turned) for g, y, _ in terms if g is not None and y is not None],
        "d_b": [(x.turned, g) for g, _, x in terms if g is not None and x is not None],
    }
    for name, factors in pairs.items():
        if name in wanted:
            _sum_of_products(rec, p, factors, wanted[name], name == "d_b")
    if "d_bias" in wanted:
        views: Any = {"grad": results.get("q_wide", q), "d_bias": wanted["d_bias"]}
        m, batch = lower.folded(rec, p, views)
        summed = epilogues.residual_layer().backward().select("d_bias")
        lower.slopes(rec, views, (m, p.n, 0), batch, p.acc_dtype.name, summed, None)


def _elementwise(
    rec: Recorder,
    p: GemmDoubleBackwardProblem,
    bind: Bind,
    made: Epilogue,
    wanted: dict[str, View],
) -> dict[str, View]:
    """Record d_grad, and Q and S where they are needed: q, q_wide before it was rounded, and s.

    Return them all.
    """
    acc, storage = p.acc_dtype.name, p.dtype.name
    shape = (*p.batch, p.m, p.n)
    products, sums = wanted.keys() & {"d_a", "d_b"}, "d_bias" in wanted
    bent = "q" in dict(made.results)
    results: dict[str, View] = {}
    if "d_grad" in wanted:
        results["d_grad"] = wanted["d_grad"]
    if bent and (products or (sums and storage == acc)):
        results["q"] = rec.fresh(shape, storage)
    if bent and sums and storage != acc:
        results["q_wide"] = rec.fresh(shape, acc)
    plain = made["s"] is leaf("grad")
    if products and not plain and (p.u is not None or p.v is not None):
        results["s"] = rec.fresh(shape, storage)
    if results:
        chosen = made.select(*("q" if name == "q_wide" else name for name in results))
        sources: dict[str, View] = {}
        if "z" in chosen.inputs and p.pre is not None:
            sources["z"] = bind("pre")
        elif "z" in chosen.inputs:
            sources["z"] = _wide(rec, p)
            linear = epilogues.residual_layer().without("residual")
            lower.layer(rec, p, bind, sources["z"], None, linear)
        _pass(rec, p, bind, made, sources, results, q_wide="q")
    return results | {"s": bind("grad")} if plain else results
