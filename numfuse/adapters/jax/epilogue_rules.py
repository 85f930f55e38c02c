"""Epilogues and the gated layer as one JAX primitive, with the rules of `primitives`.

The fused kinds of call are each other's derivatives: forward and tangent, tangent and backward (its
transpose), backward and double backward (a product of a Hessian, its own transpose). Beyond them, a
call is its problem over JAX's arrays (`composite`): plain products, and formulas that XLA fuses.

A forward that is differentiated keeps its sums, from which all derivatives are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from numpy import ndarray

from numfuse.adapters import composites
from numfuse.adapters.jax.calls import agreed, fitted, in_front, placed, primitive
from numfuse.adapters.jax.epilogues import EpilogueCall, Form, base, leads
from numfuse.adapters.jax.formulas import Graphs, values
from numfuse.adapters.jax.operations import ghosts
from numfuse.adapters.jax.primitives import FUNCTIONS
from numfuse.adapters.primitives import How
from numfuse.epilogues import Epilogue
from numfuse.fused_operations import NUMBERS, FusedOperation
from numfuse.problem.product import STORED
from numfuse.runtime.strided import ghost

Arrays = dict[str, Any]


def _given(form: Form, x: Mapping[str, Any]) -> Form:
    """Return the form of a call on these operands by name."""
    before, linear = form.names
    return form._replace(there=tuple([x.get(name) is not None for name in (*before, *linear)]))


def _bind(form: Form, x: Mapping[str, Any]) -> Arrays:
    """Return the results of a call on operands by name, by their names."""
    form = _given(form, x)
    given = {name: x[name] for name in form.present}
    if form.lead:
        axes = leads(form, {name: y.shape for name, y in given.items()})
        for name, y in given.items():
            # (a right factor serves all of a batch as it is; no program copies one of the others)
            if not base(name).startswith("b_"):
                given[name] = jnp.broadcast_to(y, axes[base(name)] + y.shape[form.lead :])
    return dict(zip(form.made, FUSED.bind(*given.values(), form=form), strict=True))


def _named(form: Form, given: Sequence[Any]) -> Arrays:
    """Return operands by name; what JAX has as a zero is None."""
    before, linear = form.names
    pairs = zip((*before, *linear), placed(form, given), strict=True)
    return {name: None if type(x) is ad.Zero else x for name, x in pairs}


# --- rules ----------------------------------------------------------------------------------------
def _batched(given: Sequence[Any], axes: Sequence[Any], *, form: Form) -> Any:
    x = dict(zip(form.present, in_front(given, axes), strict=True))
    found = _bind(form._replace(lead=form.lead + 1), x)
    return list(found.values()), [0] * len(found)


def _derived(primals: Sequence[Any], tangents: Sequence[Any], *, form: Form) -> Any:
    x, dots = _named(form, primals), _named(form, tangents)
    moved = {name: dot for name, dot in dots.items() if dot is not None and name[:2] != "z_"}
    if form.kind.kind == "forward":
        return _forward_derived(form, x, moved)
    before, linear = form.names
    outs = FUSED.bind(*primals, form=form)
    parts = []
    along = {name: moved.get(name) for name in linear}
    if any(dot is not None for dot in along.values()):
        parts.append(_bind(form, {**x, **along}))
    moved = {name: dot for name, dot in moved.items() if name in before}
    if moved and form.kind.kind == "backward":
        cotangents = {f"c_{name}": dot for name, dot in moved.items()}
        parts.append(_bind(form.of("double_backward"), {**x, **cotangents}))
    elif moved:
        parts.append(_through(form, x, moved))
    dots = {name: reduce(add, [part[name] for part in parts]) for name in form.made if parts}
    pairs = zip(form.made, outs, strict=True)
    return outs, [
        fitted(dots[name], out.shape) if dots else jnp.zeros_like(out) for name, out in pairs
    ]


def _forward_derived(form: Form, x: Arrays, moved: Arrays) -> Any:
    """Return the results of a forward and their tangents, which are made from its sums."""
    found = _bind(_keeping(form), x)
    outs = [found[name] for name in form.made]
    dots = _tangents(form, x, moved, found)
    if form.keep and not form.inner:
        dots = _through(form, x, moved) | dots
    made = []
    for name, out in zip(form.made, outs, strict=True):
        dot = dots.get(name)
        zero = ad.Zero(jax.typeof(out).to_tangent_aval())
        made.append(zero if dot is None else fitted(dot, out.shape))
    return outs, made


def _keeping(form: Form) -> Form:
    """Return the form of a forward that keeps its sums, where its derivatives depend on them."""
    if form.keep or not form.kind.factors or not form.bends():
        return form
    return form._replace(keep=STORED if form.kind.biases else True, inner=True)


def _tangents(form: Form, x: Arrays, moved: Arrays, found: Arrays) -> Arrays:
    """Return the tangents of a forward's outs, by their names; `found` are its results."""
    sums = {f"z_{name[4:]}": y for name, y in found.items() if name.startswith("pre_")}
    dots = {f"{name}_dot": dot for name, dot in moved.items()}
    made = _bind(form.of("tangent"), {**x, **sums, **dots})
    return {name.removesuffix("_dot"): dot for name, dot in made.items()}


def _transposed(cotangents: Sequence[Any], *given: Any, form: Form) -> Any:
    x, kind = _named(form, given), form.kind.kind
    before, linear = form.names
    avals = {name: y.aval for name, y in x.items() if ad.is_undefined_primal(y)}
    if not avals.keys() <= set(linear):
        raise TypeError(
            f"numfuse's {kind} of an epilogue is linear in {', '.join(linear) or 'nothing'} alone, "
            f"got a transposition in {', '.join(avals)}"
        )
    kept = {name: y for name, y in x.items() if name in before}
    dtype = next(y.dtype for name, y in kept.items() if y is not None and name[:2] != "z_")
    pairs = zip(form.made, cotangents, strict=True)
    cts = {name: ct.astype(dtype) for name, ct in pairs if type(ct) is not ad.Zero}
    found: Arrays = {name: ad.Zero(aval) for name, aval in avals.items()}

    def add(kind: str, weights: Arrays, to: Mapping[str, str]) -> None:
        if not weights:
            return
        needs = tuple([name[2:] for name in to.values() if name.startswith("d_")])
        own = form.of(kind, how=form.how._replace(needs=needs))
        made = _bind(_pooling(own, {**kept, **weights}, avals), {**kept, **weights})
        for name, result in to.items():
            part = fitted(made[result], avals[name].shape).astype(avals[name].dtype)
            found[name] = part if type(found[name]) is ad.Zero else found[name] + part

    own = {name: f"d_{base(name)}" for name in avals}
    if kind == "tangent":
        add("backward", {f"g_{name[4:-4]}": ct for name, ct in cts.items()}, own)
    elif kind == "backward":
        dots = {f"{name[2:]}_dot": ct for name, ct in cts.items()}
        add("tangent", dots, {name: f"out_{name[2:]}_dot" for name in avals})
    else:
        grads = {name[2:]: ct for name, ct in cts.items() if name.startswith("d_g_")}
        add("backward", grads, own)
        rest = {f"c_{name[2:]}": ct for name, ct in cts.items() if name[2:] not in grads}
        add("double_backward", rest, own)
    return [found.get(name) for name in form.present]


def _pooling(form: Form, x: Arrays, avals: Mapping[str, Any]) -> Form:
    """Return the form in which gradients are summed over mapped axes as they are made, if they all
    are wanted so: a cotangent of what is the same for all, for an operand that is."""
    own = _given(form._replace(pooled=form.lead), x)
    axes = leads(own, {name: x[name].shape for name in own.present})
    for name, aval in avals.items():
        for n, length in zip(axes.get(base(name), ()), aval.shape, strict=False):
            if length not in (1, n):
                return form._replace(pooled=0)
    return own


# --- beyond what is fused -------------------------------------------------------------------------
def _through(form: Form, x: Arrays, moved: Arrays) -> Arrays:
    """Return the tangents of the results, by what they are made of."""
    x = {name: y for name, y in x.items() if y is not None and name[:2] != "z_"}

    def moving(*dots: Any) -> Arrays:
        return composite(form, {**x, **dict(zip(moved, dots, strict=True))})

    return jax.jvp(moving, [x[name] for name in moved], list(moved.values()))[1]


def composite(form: Form, x: Mapping[str, Any]) -> Arrays:
    """Return the results of a call by plain products, and formulas over JAX's arrays."""
    form = _given(form, x)
    guard, form = form.how.guard, form._replace(how=form.how._replace(guard=False))
    given = [x[name] for name in form.present]
    call = EpilogueCall(form, tuple(y.shape for y in given), tuple(y.dtype.name for y in given))
    taken = call.taken(ghosts(call.shapes, call.dtypes), ghost)
    layout = call.layout() if form.lead else {}
    arrays = dict(zip(form.present, given, strict=True))
    for name, (shape, _) in layout.items():
        arrays[name] = jnp.broadcast_to(arrays[name], shape)

    def over(epilogue: Epilogue, inputs: Sequence[Any]) -> Sequence[Any]:
        names, inputs = epilogue.inputs or ("",), inputs or [jnp.zeros(())]
        return values(Graphs(epilogue.graphs, names, guard), *inputs)

    product = partial(jnp.matmul, precision="highest")
    made = composites.results(jnp, taken.problem, taken.made, arrays, over, product)
    triples = zip(taken.made, made, taken.results, strict=True)
    return {name: y.reshape(like.shape) for name, y, like in triples}


FUSED = primitive("fused", EpilogueCall, _batched, _derived, _transposed)


# --- calls ----------------------------------------------------------------------------------------
def fused(
    operation: FusedOperation, operands: Sequence[Any], activation: Any, flags: Sequence[Any],
    needs: Any, out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run a call of a public function."""
    FUNCTIONS.refuse_out(out)
    pairs = zip(operation.operands, operands, strict=True)
    given = {name: x for name, x in pairs if x is not None}
    dtype = next(x.dtype for x in given.values() if hasattr(x, "dtype"))
    for name, x in given.items():
        if type(x) in NUMBERS:
            given[name] = np.asarray(x, dtype)
        elif not isinstance(x, (jax.Array, ndarray, np.generic)):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(
                f"{operation.form.label(name)} must be a JAX array where another is, got {kind}"
            )
    x = dict(zip(given, agreed(list(given.values())), strict=True))
    options = dict(zip(operation.flags, flags, strict=True))
    wanted = tuple([name for name in operation.needs if name in needs and name in x])
    how = How(operation.known(activation), wanted, options.get("guard", True), backend)
    form = Form(how, (), 0, 0, operation.form, operation.keep)
    kind = form.kind.kind
    if kind == "forward":
        results = tuple(_bind(form, x).values())
        return results if operation.several else results[0]
    if kind == "tangent":
        own = {name: y for name, y in x.items() if not name.endswith("_dot")}
        moved = {name: x[f"{name}_dot"] for name in own if f"{name}_dot" in x}
        forward = form.of("forward")
        found = _bind(_keeping(forward) if moved else forward, own)
        dots = _tangents(forward, own, moved, found) if moved else {}
        made = []
        for name in forward.made:
            y, dot = found[name], dots.get(name)
            made += [y, jnp.zeros_like(y) if dot is None else dot]
        return tuple(made)
    found = _bind(form, x) if wanted else {}
    if options["sum_batch"]:
        for name in form.kind.right:
            if found.get(f"d_{name}") is not None:
                found[f"d_{name}"] = composites.summed(jnp, found[f"d_{name}"], x[name].shape[-2:])
    return tuple([found.get(f"d_{name}") for name in operation.needs])
