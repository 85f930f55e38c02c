"""The meaning of every operation, in plain NumPy: slow, and what the other backends are held to.

Operands are widened, the epilogues of the core are evaluated over arrays in float64, and
the result is rounded once, to the problem's dtype, at the end. Products are made in long double: it
is wider than float64 where the machine has it, and NumPy computes it with plain loops instead of
BLAS, so that the order of summation over K is k = 0, 1, 2 ... whatever the layout, and a view gives
bit for bit what its copy gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse import epilogues
from numfuse.backends import Call, OneRun, Traits, latest
from numfuse.language import elementary
from numfuse.language.curves import leaf
from numfuse.problem.results import settled
from numfuse.problem.shapes import as_one, sum_to

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.epilogues import Epilogue

_F64 = np.dtype(np.float64)
_LONG = np.dtype(np.longdouble)
#: Infinities and NaN are results here, and no errors.
_quietly = np.errstate(all="ignore")


class Reference(OneRun):
    """The reference backend; see :class:`numfuse.backends.Backend` for what each method is."""

    name = "reference"
    traits = Traits(intermediate="float64")

    jet = partialmethod(OneRun._run, "jet")

    @_quietly
    def run(self, kind: str, p: Any) -> None:
        """Compute a problem."""
        if not settled(p):
            _COMPUTE[kind](p)
        told = f"{kind}/{p.activation.name}"
        latest.call = Call("reference", "NumPy", "float64", told, None)

    def describe(self) -> dict[str, Any]:
        """Return what `info` shows, by name."""
        return {"device": "NumPy", "arithmetic": "float64, products in long double"}

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is compiled."""


def _forward(p: Any) -> None:
    """out = act(a @ b + bias) + residual."""
    made = epilogues.layer(p.activation.curve).without("bias")
    residual = None if p.residual is None else _wide(p.residual)
    if residual is not None:
        made = epilogues.residual_layer().without("bias")
    found = _computed(made, z=_pre_activation(p), residual=residual)
    if p.pre is not None:
        p.pre[...] = found["pre"]
    p.out[...] = found["out"]


def _backward(p: Any) -> None:
    """grad_pre = grad * act'(pre), and from it the gradients."""
    if p.d_residual is not None:
        p.d_residual[...] = sum_to(_wide(p.grad), p.d_residual.shape, _LONG)
    p, outs = _in_rows(p)
    pre = _pre_activation(p) if p.pre is None else _wide(p.pre)
    made = epilogues.layer(p.activation.curve).select("out").backward().without("bias")
    grad_pre = _computed(made, p.guard, z=pre, grad=_wide(p.grad))["d_z"]
    if p.d_a is not None:
        p.d_a[...] = sum_to(_product(grad_pre, p.b.swapaxes(-1, -2)), p.d_a.shape, _LONG)
    if p.d_b is not None:
        p.d_b[...] = sum_to(_product(p.a.swapaxes(-1, -2), grad_pre), p.d_b.shape, _LONG)
    if p.d_bias is not None:
        p.d_bias[...] = sum_to(grad_pre, p.d_bias.shape, _LONG)
    for out, rows in outs:
        out[...] = rows.reshape(out.shape)


def _double_backward(p: Any) -> None:
    """T, Q and S, and from them the gradients of the backward's gradients."""
    if p.d_residual is not None:
        p.d_residual[...] = 0
    p, outs = _in_rows(p)
    pre, grad = _pre_activation(p) if p.pre is None else _wide(p.pre), _wide(p.grad)
    made = epilogues.layer_double_backward(p.activation.curve).without("bias", "w")
    found = _computed(made, p.guard, z=pre, grad=grad, t=_moved(p, grad.shape))
    q, s = found.get("q", np.zeros_like(grad)), found["s"]
    if p.d_grad is not None:
        p.d_grad[...] = found["d_grad"]
    if p.d_a is not None:
        second = None if p.v is None else _product(s, p.v.swapaxes(-1, -2))
        p.d_a[...] = _sum(p.d_a, _product(q, p.b.swapaxes(-1, -2)), second)
    if p.d_b is not None:
        second = None if p.u is None else _product(p.u.swapaxes(-1, -2), s)
        p.d_b[...] = _sum(p.d_b, _product(p.a.swapaxes(-1, -2), q), second)
    if p.d_bias is not None:
        p.d_bias[...] = sum_to(q, p.d_bias.shape, _LONG)
    for out, rows in outs:
        out[...] = rows.reshape(out.shape)


def _tangent(p: Any) -> None:
    """out as in the forward, out_dot = act'(pre) * T."""
    pre = _pre_activation(p)
    made = epilogues.layer_tangent(p.activation.curve).without("bias")
    found = _computed(made, p.guard, z=pre, z_dot=_moved(p, pre.shape))
    residual = 0.0 if p.residual is None else _wide(p.residual)
    p.out[...], p.out_dot[...] = found["out"] + residual, found["out_dot"]


def _fused(p: Any) -> None:
    """The epilogue of sums and operands, the sums of its results, and products of these.

    A result may be an operand, so all is computed before anything is written.
    """
    leaves = {name: _wide(x) for name, x in p.arrays.items() if name in p.epilogue.operands}
    for name, pairs in p.sums.items():
        products = [_product(p.arrays[a], p.arrays[b]) for a, b in pairs]
        leaves[name] = _wide(sum(products[1:], products[0]))
    values = elementary.values(p.epilogue.graphs, {leaf(name): x for name, x in leaves.items()})
    found = {}
    for (name, _), value in zip(p.epilogue.results, values, strict=True):
        found[name] = np.broadcast_to(value, p.shape)

    def factor(x: Any) -> ndarray:
        y: ndarray = found[x.name] if x.name in found else p.arrays[x.name]
        return y.swapaxes(-1, -2) if x.turned else y

    for name in p.zeroed:
        p.arrays[name][...] = 0
    for name in p.stored:
        p.arrays[name][...] = found[name]
    for name in p.summed:
        p.arrays[name][...] = sum_to(found[name], p.arrays[name].shape, _LONG)
    for name, terms in p.products.items():
        out = p.arrays[name]
        out[...] = _sum(out, *(_product(factor(x), factor(y)) for x, y in terms))


def _jet(p: Any) -> None:
    """A layer's jet or its gradients, a direction and a second derivative at a time."""
    if p.stacked:
        p = replace(p, arrays=_apart(p))
    x, jet = p.arrays, p.jet.each(lambda part: part.without("bias"))
    weights = np.eye(p.directions) if p.weights is None else _wide(p.weights)
    z: dict[str, Any] = {"z": _wide(x["pre"]) if p.backward and "pre" in x else _pre_activation(p)}
    for end in ("_dot", "_ddot"):
        known = x.get(f"pre{end}") if p.backward else None
        if known is None and f"a{end}" in x:
            known = [_wide(_product(y, p.b)) for y in x[f"a{end}"]]
        z |= {} if known is None else {f"z{end}": [_wide(y) for y in known]}

    def of(part: Epilogue, **given: Any) -> dict[str, ndarray]:
        given |= {y: _wide(x[y]) for y in p.operands}
        found = elementary.values(part.graphs, {leaf(y): given[y] for y in part.inputs})
        pairs = zip(part.results, found, strict=True)
        return {name: np.broadcast_to(value, p.shape) for (name, _), value in pairs}

    def members(part: Epilogue, end: str, count: int, **given: Any) -> list[dict[str, ndarray]]:
        names = [y for y in (*z, *x) if y.endswith(end) and y in part.inputs]
        own = [{y: z[y][i] if y in z else _wide(x[y][i]) for y in names} for i in range(count)]
        found = []
        for i, one in enumerate(own):
            more = {y: values[i] for y, values in given.items()}
            found.append(of(part, z=z["z"], **one, **more))
        return found

    def weighted(terms: Any, by: ndarray) -> list[ndarray]:
        pairs = [[(w, y) for w, y in zip(row, terms, strict=True) if w] for row in by]
        return [sum((w * y for w, y in row), np.zeros(p.shape)) for row in pairs]

    bent: list[ndarray] = []
    if p.backward and "grad_ddot" in x:
        bent = weighted([_wide(y) for y in x["grad_ddot"]], weights.T)
    value = of(jet.value, z=z["z"], **{y: _wide(x[y]) for y in ("grad",) if y in x})
    spread = {"grad_bent": bent} if "grad_bent" in jet.direction.inputs else {}
    directions = members(jet.direction, "_dot", p.directions, **spread)
    seconds = members(jet.second, "_ddot", p.seconds)
    if not p.backward:
        _store_jet(p, z, value, directions, seconds, weights, weighted)
        return
    zero = np.zeros(p.shape)
    parts = (value, *directions, *seconds)
    total = {}
    for name in jet.totals:
        terms = [y[name] for y in parts if name in y]
        total[name] = sum(terms[1:], terms[0]) if terms else zero
    for name in p.slopes:
        x[name][...] = sum_to(total.get(name, zero), x[name].shape, _LONG)
    q = [total["d_z"]]
    q += [y.get("d_z_dot", zero) for y in directions]
    if p.moved:
        q += [y.get("d_z_ddot", zero) for y in seconds]
    lefts = [x["a"], *x["a_dot"], *x.get("a_ddot", ())]
    outs = [p.d_a, *(x.get("d_a_dot", [None] * p.directions)), *(x.get("d_a_ddot", ()))]
    for out, one in zip(outs, q, strict=False):
        if out is not None:
            out[...] = sum_to(_product(one, p.b.swapaxes(-1, -2)), out.shape, _LONG)
    if p.d_b is not None:
        products = [_product(y.swapaxes(-1, -2), one) for y, one in zip(lefts, q, strict=True)]
        p.d_b[...] = _sum(p.d_b, *products)
    if p.d_bias is not None:
        p.d_bias[...] = sum_to(q[0], p.d_bias.shape, _LONG)


def _apart(p: Any) -> dict[str, ndarray]:
    """Return the arrays of a problem of stacks as those of one without."""
    found = dict(p.arrays)
    for name in ("a", "out", "pre", "grad", "d_a"):
        if name in found:
            left = name in ("a", "pre", "d_a")
            if p.shared and left:
                continue
            members = p.members if left else 1 + p.directions + p.seconds
            x = found[name].reshape(*found[name].shape[:-1], members, -1)
            rest = np.moveaxis(x, -2, 0)
            found[name], found[f"{name}_dot"] = rest[0], rest[1 : 1 + p.directions]
            if members > 1 + p.directions or name not in ("a", "pre", "d_a"):
                found[f"{name}_ddot"] = rest[1 + p.directions :]
    return found


def _store_jet(
    p: Any, z: Any, value: Any, directions: Any, seconds: Any, weights: ndarray, weighted: Any
) -> None:
    """Store the results of a forward."""
    bent = [y["bent"] for y in directions if "bent" in y]
    total = weighted(bent, weights) if bent else [np.zeros(p.shape)] * p.seconds
    p.out[...] = value["out"]
    for d, one in enumerate(directions):
        p.out_dot[d][...] = one.get("out_dot", 0)
    for s, one in enumerate(total):
        p.out_ddot[s][...] = one + (seconds[s].get("straight", 0) if p.moved else 0)
    if p.pre is not None:
        p.pre[...] = value["pre"]
        for name in ("z_dot", "z_ddot") if p.moved else ("z_dot",):
            kept = p.arrays[name.replace("z", "pre")]
            for i, one in enumerate(z[name]):
                kept[i][...] = one


#: What computes each kind of problem.
_COMPUTE: dict[str, Callable[[Any], None]] = {
    "forward": _forward,
    "backward": _backward,
    "double_backward": _double_backward,
    "tangent": _tangent,
    "fused": _fused,
    "jet": _jet,
    **dict.fromkeys(epilogues.GATES, _fused),
}


def _in_rows(p: Any) -> tuple[Any, list[tuple[ndarray, ndarray]]]:
    """A batch over one b as one product, of copies where it takes copies; (result, its copy) of
    each result that is to be written back."""
    p, outs = as_one(p), []
    if not p.batch:
        for name in p.BY_ROWS:
            x = getattr(p, name)
            if x is not None and x.ndim > 2:
                setattr(p, name, x.reshape(-1, x.shape[-1]))
                if name in ("d_a", "d_grad"):
                    outs.append((x, getattr(p, name)))
    return p, outs


def _wide(x: ndarray) -> ndarray:
    return x.astype(_F64, copy=False)


def _product(a: ndarray, b: ndarray) -> ndarray:
    product: ndarray = a.astype(_LONG) @ b.astype(_LONG)
    return product


def _pre_activation(p: Any) -> ndarray:
    pre = _product(p.a, p.b)
    if p.bias is not None:
        pre = pre + _wide(p.bias)
    return _wide(pre)


def _computed(
    made: Epilogue, guard: bool = False, **operands: ndarray | None
) -> dict[str, ndarray]:
    """Return the results of an epilogue over arrays, by name, in float64."""
    made = made.guarded() if guard else made
    leaves = {leaf(name): operands[name] for name in made.inputs}
    values = elementary.values(made.graphs, leaves)
    return {name: value for (name, _), value in zip(made.results, values, strict=True)}


def _moved(p: Any, shape: tuple[int, ...]) -> ndarray:
    """T = u @ b + a @ v + w + z."""
    t = np.zeros(shape, _LONG)
    if p.u is not None:
        t = t + _product(p.u, p.b)
    if p.v is not None:
        t = t + _product(p.a, p.v)
    for x in (p.w, p.z):
        if x is not None:
            t = t + _wide(x)
    return _wide(t)


def _sum(out: ndarray, *products: ndarray | None) -> ndarray:
    """Products, each summed to the shape of a gradient, in long double."""
    total = np.zeros(out.shape, _LONG)
    for product in products:
        if product is not None:
            total = total + sum_to(product, out.shape, _LONG)
    return total


BACKEND = Reference()
