"""Row functions: what a cell does with a row, printed from an epilogue.

A row function reads a row of accumulators and rows of operands, applies the formulas of an
:class:`numfuse.epilogues.Epilogue` element by element, writes rows of results and adds one of them
to column sums. Cells call it by address: one compiled product per accumulator dtype serves every
storage dtype, layout and formula, and a new formula costs one small function.

`printer` prints the loop, `row` binds its names and compiles it; the functions after it say which
slots the operations' inputs and results have. Operands of any stride come through
`numfuse.backends.cpu.kernels.elementwise.source_row`, so that the loops with the arithmetic in them
vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from numfuse import epilogues, expr
from numfuse.backends.cpu.kernels import library, printer
from numfuse.backends.cpu.kernels.printer import Result, Source, Total
from numfuse.backends.cpu.llvm import conversions, intrinsics, primitives, vectors
from numfuse.epilogues import Epilogue
from numfuse.runtime import specialise

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.language.curves import Curve


def row(
    epilogue: Epilogue,
    fmt: str,
    sources: tuple[Source, ...],
    results: tuple[Result, ...],
    sums: str | tuple[Total, ...] | None = None,
    streams: bool = False,
) -> specialise.Kernel:
    """Compile (or find) the row function of an epilogue.

    `fmt`, the operands' storage format, decides the accumulator's, in which all is computed. There
    is a source for each input that the results depend on, in any order; `results` are those that
    are stored, `sums` the one that is added to the column sums, or several that are added up.
    `streams`: see `printer.text`.
    """
    acc = library.accumulator(fmt)
    if not isinstance(sums, tuple):
        sums = (Total(sums, "sums"),) if sums else ()
    wanted = tuple(dict.fromkeys([x.name for x in results] + [x.name for x in sums]))
    chosen = epilogue.select(*wanted)
    at = {source.name: source for source in sources}
    read = [at[name] for name in chosen.inputs]
    formula = primitives.scalar_function(chosen.graphs, acc, chosen.inputs)
    called = f"{epilogue.name.replace(' ', '_')}_row"
    printed = printer.text(called, read, results, wanted, sums, streams)
    names: dict[str, Any] = {"FORMULA": formula, "PRINTED": printed}
    for name, _, stored, _ in read:
        names[f"FROM_{name}"] = intrinsics.make_elements(stored)
        names[f"ITEM_{name}"] = vectors.itemsize(stored)
        names[f"WIDEN_{name}"] = conversions.make_widen(stored, acc)
    for name, _, stored, _ in results:
        names[f"TO_{name}"] = intrinsics.make_elements(stored)
        names[f"SIZE_{name}"] = vectors.itemsize(stored)
        names[f"NARROW_{name}"] = conversions.make_narrow(stored, acc)
        if streams:
            names |= library.stream_names(name, stored)
    return specialise.kernel(
        printer.template(called, printed), **library.row_names(fmt, acc), **names
    )


# --- what is done with a sum of products --------------------------------------------------------
@library.by_formula
def store(fmt: str) -> specialise.Kernel:
    """``out = acc``"""
    z = Source("z", None, library.accumulator(fmt))
    return row(epilogues.sum_of_terms(0), fmt, (z,), (Result("out", "out", fmt),))


@library.by_formula
def copy(source: str, fmt: str) -> specialise.Kernel:
    """``out = extra``, which may be stored in another format of the same accumulator."""
    copied = epilogues.sum_of_terms(1).without("z")
    return row(copied, fmt, (Source("term_0", "extra", source),), (Result("out", "out", fmt),))


@library.by_formula
def add(acc: str) -> specialise.Kernel:
    """``out += acc``, `out` in the accumulator's dtype: a product summed over blocks of rows."""
    sources = Source("z", None, acc), Source("term_0", "out", acc)
    return row(epilogues.sum_of_terms(1), acc, sources, (Result("out", "out", acc),))


@library.by_formula
def add_and_store(fmt: str) -> specialise.Kernel:
    """``out = extra + acc``: the last block of such a sum, rounded to a half type."""
    acc = library.accumulator(fmt)
    sources = Source("z", None, acc), Source("term_0", "extra", acc)
    return row(epilogues.sum_of_terms(1), fmt, sources, (Result("out", "out", fmt),))


@library.by_formula
def terms(fmt: str, out: str, product: bool, w: bool, z: bool, before: bool) -> specialise.Kernel:
    """``out = acc + w + z + before``, of those that are there; `before` in the accumulator's dtype.

    T = u @ b + a @ v + w + z, what moves a pre-activation, is summed up so.
    """
    acc = library.accumulator(fmt)
    sources = (
        Source("z", None, acc),
        Source("term_0", "bias", fmt),
        Source("term_1", "extra", fmt),
        Source("term_2", "pre", acc),
    )
    there = (product, w, z, before)
    absent = [x.name for x, present in zip(sources, there, strict=True) if not present]
    total = epilogues.sum_of_terms(3).without(*absent)
    return row(total, fmt, sources, (Result("out", "out", out),))


@library.by_formula
def constant(acc: str) -> specialise.Kernel:
    """``out = 1``"""
    one = Epilogue("one", (), (), (("out", expr.constant(1)),))
    return row(one, acc, (), (Result("out", "out", acc),))


#: The row function of a user's epilogue.
fused = library.by_formula(row)


# --- layers -------------------------------------------------------------------------------------
@library.by_formula
def forward(f: Curve, fmt: str, bias: bool, residual: bool, pre: str | None) -> specialise.Kernel:
    """``pre = acc + bias; out = f(pre)``, or ``out = acc + bias + residual``; pre's format."""
    acc = library.accumulator(fmt)
    made = epilogues.residual_layer() if residual else epilogues.layer(f)
    sources = Source("z", None, acc), Source("bias", "bias", fmt), Source("residual", "extra", fmt)
    results = (Result("out", "out", fmt), *([Result("pre", "pre", pre)] if pre else []))
    return row(made if bias else made.without("bias"), fmt, sources, results)


@library.by_formula
def grad_pre(
    f: Curve, fmt: str, bias: bool, saved: str | None, out: bool, sums: bool, guard: bool
) -> specialise.Kernel:
    """``grad_pre = grad * f'(pre)``, pre = acc + bias, or saved; d_bias partials by chunk.

    Rows of a chunk are always visited in order by one thread, so its column sums do not depend on
    the number of threads.
    """
    acc = library.accumulator(fmt)
    made = epilogues.layer(f).select("out").backward()
    made = made.guarded() if guard else made
    sources = (
        Source("z", "extra" if saved else None, saved or acc),
        Source("bias", "bias", fmt),
        Source("grad", "grad", fmt),
    )
    results = (Result("d_z", "out", library.grad_pre_format(fmt)),) if out else ()
    made = made if bias else made.without("bias")
    return row(made, fmt, sources, results, "d_z" if sums else None)


@library.by_formula
def column_sums(fmt: str) -> specialise.Kernel:
    """The partials of d_bias alone, where grad_pre is grad itself."""
    backward = epilogues.residual_layer().backward()
    return row(backward, fmt, (Source("grad", "grad", fmt),), (), "d_bias")


@library.by_formula
def double_backward(
    f: Curve,
    fmt: str,
    guard: bool,
    t: str | None,
    *,
    saved: str | None,
    last: bool,
    added: bool,
    results: tuple[str, ...],
    sums: bool,
) -> specialise.Kernel:
    """``d_grad = f'(pre) t``, ``q = grad f''(pre) t``, ``s = grad f'(pre)``, and the partials of
    d_bias, the column sums of q.

    Parameters
    ----------
    t : str or None
        The format in which T is read, if it is.
    saved : str or None
        The format in which the pre-activation is read; without one it is the accumulator and,
        where it is there, the bias.
    last : bool
        The accumulator is a part of T: the rest is what is read, or what is `added`.
    added : bool
        Whether the slot of the bias is there: the bias, or w where the accumulator is T's.
    results : tuple of str
        Of ``d_grad``, ``q`` and ``s``.
    sums : bool
        Whether the column sums of q are made.
    """
    acc, held = library.accumulator(fmt), library.grad_pre_format(fmt)
    made = epilogues.layer_double_backward(f)
    # T is what is read, or the accumulator and beside it what is read or (from w's place) added
    read = Source("w" if last else "t", "extra", t or acc)
    summed = Source("t" if last else "z", None, acc)
    beside = Source("w" if last else "bias", "bias", fmt)
    kept = Source("z", "pre", saved or acc)
    there = [summed, Source("grad", "grad", fmt)]
    there += [x for x, is_there in ((read, t), (beside, added), (kept, saved)) if is_there]
    if saved and not last:
        there.remove(summed)
    sources = tuple(there)
    made = made.without(*{"z", "t", "bias", "w", "grad"} - {x.name for x in sources})
    made = made.guarded() if guard else made
    every = Result("d_grad", "out", fmt), Result("q", "a", held), Result("s", "b", held)
    stored = tuple(x for x in every if x.name in results)
    return row(made, fmt, sources, stored, "q" if sums else None)


@library.by_formula
def tangent(f: Curve, fmt: str, guard: bool, t: str, bias: bool) -> specialise.Kernel:
    """``pre = acc + bias; out = f(pre)``, ``out_dot = f'(pre) t``; `t`: the format of T."""
    acc = library.accumulator(fmt)
    made = epilogues.layer_tangent(f)
    made = made.guarded() if guard else made
    sources = Source("z", None, acc), Source("bias", "bias", fmt), Source("z_dot", "extra", t)
    results = Result("out", "out", fmt), Result("out_dot", "a", fmt)
    return row(made if bias else made.without("bias"), fmt, sources, results)


def of_activation(act: Activation, fmt: str) -> list[Callable[[], specialise.Kernel]]:
    """Return calls that compile every row function that a layer can ask for with `act`.

    Left out is what only rare arguments take: guard=False, and needs without d_bias or d_a.
    """
    f = act.curve
    rows: list[Callable[[], specialise.Kernel]] = []
    for bias in (True, False):
        kept = dict.fromkeys((None, library.accumulator(fmt), fmt))
        for pre in kept:
            rows.append(partial(forward, f, fmt, bias, False, pre))
        if act.is_identity:
            rows.append(partial(forward, f, fmt, bias, True, None))
        else:
            for saved in kept:
                has_bias = bias and not saved
                rows.append(partial(grad_pre, f, fmt, has_bias, saved, True, bias, True))
    return rows
