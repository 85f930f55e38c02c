"""Hop 4: a problem becomes products over batches (`batches`), and passes beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from numfuse import epilogues
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.kernels.pointwise import Result, Source
from numfuse.backends.cuda.kernels.pointwise import launch as pass_over_elements
from numfuse.backends.cuda.plan import batches, places
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.language.curves import leaf
from numfuse.problem.operands import format_of
from numfuse.problem.shapes import equal, shares_weights

if TYPE_CHECKING:
    from numfuse.epilogues import Epilogue
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem
    from numfuse.problem.second_order import GemmTangentProblem

#: From the name of a problem's field to the view of its array; None of one that is not there.
Bind = Callable[[str], Any]


def forward(rec: Recorder, p: GemmProblem, bind: Bind) -> None:
    """Record out = act(a @ b + bias) + residual."""
    layer(rec, p, bind, bind("out"), bind("pre"), layer_of(p))


def layer(
    rec: Recorder, p: Any, bind: Bind, out: View, pre: View | None, epilogue: Epilogue
) -> None:
    """Record an epilogue of a @ b, bias and residual."""
    others = {"bias": bind("bias"), "extra": bind("residual"), "pre": pre}
    acc = format_of(p.acc_dtype)
    batches.product(rec, bind("a"), bind("b"), p.batch, out, acc, epilogue=epilogue, **others)


def layer_of(p: GemmProblem | GemmTangentProblem) -> Epilogue:
    """Return the epilogue of a forward."""
    if p.residual is not None:
        return epilogues.residual_layer()
    return epilogues.layer(p.activation.curve)


def folded(rec: Recorder, p: Any, views: dict[str, View]) -> tuple[int, tuple[int, ...]]:
    """Return M and the batch of a backward; one that shares `b` and `bias` is folded into M.

    The problem has folded the batch where that takes no copy. Here the others' rows are copied, so
    that the sums of d_b and d_bias are made in their order, whatever the strides are. `views` are
    changed, but for d_a.
    """
    if not p.batch or not shares_weights(p) or not all(p.batch):
        return p.m, p.batch
    for name, view in views.items():
        if name in ("grad", "a", "pre"):
            views[name] = batches.packed_rows(rec, view)
        elif name != "d_a":
            views[name] = batches.matrix_of(view)
    return p.m * prod(p.batch), ()


def backward(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record the gradients of a layer; a residual's is a sum over grad alone."""
    if p.d_a is not None or p.d_b is not None or p.d_bias is not None:
        _gradients(rec, p, bind)
    if p.d_residual is not None:
        batches.sum_to(rec, bind("grad"), bind("d_residual"), format_of(p.acc_dtype))


def _gradients(rec: Recorder, p: GemmBackwardProblem, bind: Bind) -> None:
    """Record grad_pre = grad * act'(pre), and what is made of it."""
    acc = format_of(p.acc_dtype)
    made = epilogues.layer(p.activation.curve).select("out").backward().select("d_z")
    linear = made["d_z"] is leaf("grad")
    recomputed = not linear and p.pre is None
    read = {
        "a": recomputed or p.d_b is not None,
        "b": recomputed or p.d_a is not None,
        "bias": recomputed,
    }
    views = {
        name: view
        for name in ("grad", "a", "b", "bias", "pre", "d_b", "d_bias")
        if read.get(name, True) and (view := bind(name)) is not None
    }
    m, batch = folded(rec, p, views)
    d_a = apart = bind("d_a")
    if d_a is not None and batch != p.batch and d_a.rows is None:
        apart = rec.fresh(d_a.shape, d_a.dtype)
    grad_pre = views["grad"]
    if not linear:
        # rows as the fast loads want them
        pitch = tiling.pitch(p.n, p.dtype.itemsize)
        whole = rec.fresh((*batch, m, pitch), format_of(p.dtype))
        grad_pre = replace(whole, shape=(*batch, m, p.n))
        made = made.guarded() if p.guard else made
        slopes(rec, views, (m, p.n, p.k), batch, acc, made, grad_pre)
    elif p.d_bias is not None:
        slopes(rec, views, (m, p.n, p.k), batch, acc, made, None)
    if d_a is not None:
        target = apart if batch == p.batch else apart.rows
        batches.product(rec, grad_pre, views["b"].turned, batch, target, acc)
    if p.d_b is not None:
        batches.product(rec, views["a"].turned, grad_pre, batch, views["d_b"], acc, free=True)
    if apart is not d_a:
        batches.copy(rec, apart, d_a)


def slopes(
    rec: Recorder,
    given: dict[str, View],
    sizes: tuple[int, int, int],
    batch: tuple[int, ...],
    acc: str,
    epilogue: Epilogue,
    grad_pre: View | None,
) -> None:
    """Record grad_pre = grad * act'(pre), and d_bias from the sums of its columns.

    Without a `grad_pre` it is grad itself that is summed.
    """
    m, n, _ = sizes
    d_bias = given.get("d_bias")
    # places of one bias are neighbours
    outer, inner = places.split(batch, () if d_bias is None else d_bias.shape[:-2])
    table, rows = None, 0
    if all((m, n, *batch)):
        views = {"extra": given["grad"]}
        if grad_pre is not None:
            views["out"] = grad_pre
            names = {"pre": "pre"} if "pre" in given else {"a": "x", "b": "y", "bias": "bias"}
            views |= {name: given[field] for field, name in names.items() if field in given}
        how = sizes, batch, outer + inner, views, acc
        table, rows = batches.launch(rec, *how, epilogue=epilogue, sums=d_bias is not None)
    if d_bias is not None:
        depth = prod(batch[i] for i in inner) * rows
        batches.join(rec, table or rec.fresh((0,), acc), depth, d_bias, acc)


def pointwise(
    rec: Recorder,
    epilogue: Epilogue,
    accumulator: str,
    storage: str,
    sources: dict[str, View],
    results: dict[str, View],
    twice: dict[str, str] | None = None,
) -> None:
    """Record one pass over arrays of one shape: an epilogue's results, by their names.

    All is computed in the dtype `accumulator`; `storage` is the problem's. `twice` has the
    epilogue's name of a result that is stored a second time, by its name in `results`.
    """
    names = {slot: (twice or {}).get(slot, slot) for slot in results}
    size = prod(next(iter(results.values())).shape)
    if not size:
        return
    found = _as_one(rec, sources, results)
    read = [Source(name, name, found[name].dtype) for name in sources]
    written = [Result(name, slot, found[slot].dtype) for slot, name in names.items()]
    how = size, min(view.aligned(()) for view in found.values()), is_short(accumulator, storage)
    launch = pass_over_elements(rec.device.info, epilogue, accumulator, read, written, *how)
    rec.launches((launch,), {name: view.at() for name, view in found.items()})
    for name, out in results.items():
        if found[name] is not out:
            batches.copy(rec, found[name], out)


def _as_one(rec: Recorder, sources: dict[str, View], results: dict[str, View]) -> dict[str, View]:
    """Return arrays as runs of memory in one order, which may be any, by copies where need be."""
    views = sources | results
    equal("the arrays of a pass", *(view.shape for view in views.values()))
    orders = {view.order for view in views.values()}
    if len(orders) == 1 and None not in orders:
        return views
    found = {}
    for name, view in views.items():
        found[name] = view if view.contiguous else rec.fresh(view.shape, view.dtype)
        if name in sources and found[name] is not view:
            batches.copy(rec, view, found[name])
    return found
