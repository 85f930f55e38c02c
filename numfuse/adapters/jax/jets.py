"""Jets of layers and networks as two JAX primitives: forward and backward, and the tangent.

The tangent is made of JAX's operations and transposes to the backward, so that reverse mode is one
call of the core for the forward and one for the backward, which makes the forward again by blocks
of points. Both call back to Python. Everything beyond, and CUDA, goes the plain way, which XLA
compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from numpy import ndarray

from numfuse.adapters.jax.calls import abstract_results, agreed, fitted, in_front, primitive
from numfuse.adapters.jax.formulas import Graphs, values
from numfuse.adapters.jax.operations import Shape
from numfuse.adapters.jax.primitives import mapped
from numfuse.adapters.jets import RESULTS, JetCall, NetworkCall, layer_call, network_entry
from numfuse.runtime.strided import ghost

_GRADS = "grad", "grad_dot", "grad_ddot"
_WHAT = "JAX, the arrays of which are never written to"


class Constant(NamedTuple):
    """An array that JAX compares and hashes."""

    shape: Shape
    values: bytes

    @property
    def array(self) -> ndarray:
        return np.frombuffer(self.values).reshape(self.shape)


class Form(NamedTuple):
    """The description of a call without its arrays; JAX compares and hashes it.

    The operands of a backward are three cotangents and those of the forward; those of a tangent are
    the forward's and a tangent for each. All have `lead` mapped axes in front, of length 1 where
    one is the same for all. The last `pooled` of them are summed over in its gradient.
    """

    call: JetCall
    constants: tuple[Constant | None, Constant | None]
    there: tuple[bool, ...]
    lead: int = 0
    pooled: int = 0
    #: Of a backward: which operands of the forward.
    needs: tuple[bool, ...] = ()

    @property
    def calls_back(self) -> bool:
        """Return True: there is no machine code that XLA calls."""
        return True

    @property
    def how(self) -> Any:
        """Return what has the backend."""
        return self.call

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Return the constants."""
        first, second = (None if x is None else x.array for x in self.constants)
        return first, second

    def placed(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return what an operand is there for, None elsewhere: cotangents, and the rest."""
        rest = iter(given)
        every = [next(rest) if there else None for there in self.there]
        count = RESULTS if self.needs else 0
        return every[:count], every[count:]


class _Arrays(NamedTuple):
    """A call without its arrays (`numfuse.adapters.jax.calls`)."""

    form: Form
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    @property
    def lead(self) -> Shape:
        """Return the mapped axes of a result."""
        n = self.form.lead
        return np.broadcast_shapes(*(shape[:n] for shape in self.shapes))

    def wanted(self, shape: Shape) -> Shape:
        """Return the shape of the gradient of an operand."""
        n, own = self.form.lead, self.form.lead - self.form.pooled
        return *self.lead[:own], *shape[own:n], *shape[n:]

    def results(self) -> list[tuple[Shape, Any]]:
        """Return the shape and dtype of each result."""
        form, dtype = self.form, np.dtype(jnp.dtype(self.dtypes[0]))
        _, x = form.placed(self.shapes)
        if form.needs:
            pairs = zip(x, form.needs, strict=True)
            return [(self.wanted(shape), dtype) for shape, need in pairs if need]
        own = [None if shape is None else ghost(shape[form.lead :], dtype) for shape in x]
        shapes = form.call.shapes(own[: len(form.call.names)], form.arrays)
        return [(self.lead + shape, dtype) for shape in shapes]

    def on_host(self, given: Sequence[ndarray]) -> list[ndarray]:
        """Return the results, of NumPy arrays."""
        form, n = self.form, self.form.lead
        grads, x = form.placed([np.asarray(y) for y in given])
        if not n:
            if form.needs:
                made = form.call.backward(grads, x, form.arrays, form.needs)
                found = [d for d in made if d is not None]
            else:
                found = list(form.call.forward(x, form.arrays, False)[0])
            return [np.asarray(y, order="C") for y in found]
        return [np.asarray(y, order="C") for y in self._mapped(grads, x)]

    def _mapped(self, grads: Sequence[Any], x: list[Any]) -> list[ndarray]:
        """Return the results of a network whose operands have mapped axes.

        Points of one network are its points, whatever axes they have; several networks are a batch.
        """
        form, n, lead = self.form, self.form.lead, self.lead
        first = np.broadcast_to(x[0], lead + x[0].shape[n:])
        shapes: list[Any] = [None if y is None else self.wanted(y.shape) for y in x]
        shared = all(
            y is None or (shape[:n] == (1,) * n == y.shape[:n] and y.ndim - n <= 2)
            for y, shape in zip(x[1:], shapes[1:], strict=True)
        ) and all(y is None or y.ndim - n == 1 for y in x[1 + len(x) // 2 :])
        grads = [None if g is None else np.broadcast_to(g, lead + g.shape[n:]) for g in grads]
        # (members in front, as the core has them)
        moved = [g if i == 0 or g is None else np.moveaxis(g, n, 0) for i, g in enumerate(grads)]
        if shared:
            rows = math.prod(first.shape[:-1])
            own: list[Any] = [first.reshape(rows, first.shape[-1])]
            own.extend([y if y is None else y.reshape(y.shape[n:]) for y in x[1:]])
            moved = [
                g if g is None else g.reshape((*g.shape[:1] * (i > 0), rows, g.shape[-1]))
                for i, g in enumerate(moved)
            ]
        else:
            own = self._in_batches([first, *x[1:]], shapes)
        if not form.needs:
            result = zip(form.call.forward(own, form.arrays, False)[0], self.results(), strict=True)
            found = []
            for i, (y, (shape, _)) in enumerate(result):
                if i:
                    y = y.reshape((shape[n], *lead, *shape[n + 1 :]))
                found.append(np.moveaxis(y, 0, n) if i else y.reshape(shape))
            return found
        found = form.call.backward(moved, own, form.arrays, form.needs)
        if found[0] is not None:
            d_x = found[0].reshape(first.shape)
            over = tuple([i for i in range(n) if shapes[0][i] != lead[i]])
            found[0] = d_x.sum(axis=over, keepdims=True, dtype=d_x.dtype) if over else d_x
        pairs = zip(found, shapes, strict=True)
        return [d.reshape(shape) for d, shape in pairs if d is not None]

    def _in_batches(self, x: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
        """Return a network's operands with mapped axes as the first axes of a batch."""
        n, bias = self.form.lead, 1 + len(x) // 2
        rank = max(y.ndim - n for y in x if y is not None)
        own = []
        for i, (y, shape) in enumerate(zip(x, shapes, strict=True)):
            if y is not None:
                if i:
                    y = np.broadcast_to(y, shape)
                ones = rank - (y.ndim - n) - (i >= bias and y.ndim - n == 1)
                row = (1,) * (i >= bias and y.ndim - n == 1)
                y = y.reshape((*y.shape[:n], *(1,) * ones, *row, *y.shape[n:]))
            own.append(y)
        return own


# --- the plain way --------------------------------------------------------------------------------
class _Ops:
    """Operations on JAX's arrays, of which the plain way is made."""

    matmul = staticmethod(partial(jnp.matmul, precision="highest"))
    broadcast_to = staticmethod(jnp.broadcast_to)

    @staticmethod
    def elementwise(f: Any, *x: Any) -> Any:
        names = [f"p_{i}" for i in range(len(x))]
        return values(Graphs(f.graphs, names, False), *x) if f.graphs else ()

    @staticmethod
    def constant(x: Any, like: Any) -> Any:
        return jnp.asarray(x, like.dtype)


def _plain(form: Form, x: Sequence[Any]) -> tuple[Any, ...]:
    return form.call.plain(_Ops, x, form.arrays)


def _over(form: Form, x: Sequence[Any], at: Sequence[int]) -> Any:
    """Return a forward as a function of some of its operands."""

    def run(*moving: Any) -> tuple[Any, ...]:
        every = list(x)
        for i, y in zip(at, moving, strict=True):
            every[i] = y
        return _plain(form, every)

    return run


def _plain_call(form: Form, *given: Any) -> list[Any]:
    """Return what a call returns, by JAX's operations."""

    def one(*members: Any) -> Any:
        grads, x = form.placed(members)
        if not form.needs:
            return _plain(form, x)
        at = [i for i, need in enumerate(form.needs) if need]
        outs, pull = jax.vjp(_over(form, x, at), *[x[i] for i in at])
        pairs = zip(grads, outs, strict=True)
        return pull(tuple([jnp.zeros_like(y) if g is None else g for g, y in pairs]))

    found = mapped(one, form.lead, given)
    pairs = zip(found, _made(form, given).results(), strict=True)
    return [fitted(y, shape) for y, (shape, _) in pairs]


def _plain_tangent(form: Form, *given: Any) -> list[Any]:
    """Return the tangents of a forward's results."""

    def one(*members: Any) -> Any:
        _, both = form.placed(members)
        x, dots = both[: len(both) // 2], both[len(both) // 2 :]
        at = [i for i, dot in enumerate(dots) if dot is not None]
        return jax.jvp(_over(form, x, at), [x[i] for i in at], [dots[i] for i in at])[1]

    return list(mapped(one, form.lead, given))


def _made(form: Form, given: Sequence[Any]) -> _Arrays:
    return _Arrays(form, tuple([x.shape for x in given]), tuple([x.dtype.name for x in given]))


# --- rules ----------------------------------------------------------------------------------------
def _batched(
    plain: Any, name: str, given: Sequence[Any], axes: Sequence[Any], *, form: Form
) -> Any:
    if not isinstance(form.call, NetworkCall):
        found = jax.vmap(partial(plain, form), axes)(*given)
    else:
        bind = _PRIMITIVES[name].bind
        found = bind(*in_front(given, axes), form=form._replace(lead=form.lead + 1))
    return found, [0] * len(found)


def _through(plain: Any, form: Form, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the tangents of what a function of JAX's operations returns."""
    at = [i for i, dot in enumerate(tangents) if type(dot) is not ad.Zero]

    def run(*moving: Any) -> Any:
        every = list(primals)
        for i, y in zip(at, moving, strict=True):
            every[i] = y
        return plain(form, *every)

    return jax.jvp(run, [primals[i] for i in at], [tangents[i] for i in at])


def _derived(primals: Sequence[Any], tangents: Sequence[Any], *, form: Form) -> Any:
    outs = JET.bind(*primals, form=form)
    if form.needs:
        return outs, _through(_plain_call, form, primals, tangents)[1]
    _, moving = form.placed([type(dot) is not ad.Zero for dot in tangents])
    dots = [dot for dot in tangents if type(dot) is not ad.Zero]
    own = form._replace(there=(*form.there, *map(bool, moving)))
    return outs, TANGENT.bind(*primals, *dots, form=own)


def _tangent_derived(primals: Sequence[Any], tangents: Sequence[Any], *, form: Form) -> Any:
    return _through(_plain_tangent, form, primals, tangents)


def _not_transposed(cotangents: Sequence[Any], *given: Any, form: Form) -> Any:
    raise TypeError("numfuse's jets are linear in nothing, got a transposition")


def _tangent_transposed(cotangents: Sequence[Any], *given: Any, form: Form) -> Any:
    _, both = form.placed(given)
    count, n = len(both) // 2, form.lead
    x, dots = both[:count], both[count:]
    if any(map(ad.is_undefined_primal, x)):
        raise TypeError("numfuse's tangent of a jet is linear in tangents alone")
    needs = tuple([ad.is_undefined_primal(dot) for dot in dots])
    avals = [dot.aval for dot in dots if ad.is_undefined_primal(dot)]
    cts = [None if type(ct) is ad.Zero else ct for ct in cotangents]
    found: list[Any] = [ad.Zero(aval) for aval in avals]
    if any(ct is not None for ct in cts):
        for i, dot in enumerate(dots):
            if needs[i] and dot.aval.shape[:n] != x[i].shape[:n]:
                lead = np.broadcast_shapes(dot.aval.shape[:n], x[i].shape[:n])
                x[i] = jnp.broadcast_to(x[i], lead + x[i].shape[n:])
        there = tuple([y is not None for y in (*cts, *x)])
        own = form._replace(there=there, pooled=n, needs=needs)
        made = JET.bind(*[y for y in (*cts, *x) if y is not None], form=own)
        found = [fitted(d, aval.shape) for d, aval in zip(made, avals, strict=True)]
    rest = iter(found)
    every = [*[None] * count, *[next(rest) if need else None for need in needs]]
    return [y for y, there in zip(every, form.there, strict=True) if there]


_RULES: Any = partial(_batched, _plain_call, "jet"), _derived, _not_transposed
JET: Primitive = primitive("jet", _Arrays, *_RULES)
_in_xla: Any = mlir.lower_fun(lambda *x, form: _plain_call(form, *x), multiple_results=True)
mlir.register_lowering(JET, _in_xla, platform="cuda")

TANGENT = Primitive("numfuse_jet_tangent")
TANGENT.multiple_results = True
TANGENT.def_impl(jax.jit(lambda *x, form: _plain_tangent(form, *x), static_argnames="form"))
TANGENT.def_abstract_eval(partial(abstract_results, _Arrays))
_tangent_in_xla: Any = mlir.lower_fun(lambda *x, form: _plain_tangent(form, *x), True)
mlir.register_lowering(TANGENT, _tangent_in_xla)
batching.primitive_batchers[TANGENT] = partial(_batched, _plain_tangent, "tangent")
_PRIMITIVES = {"jet": JET, "tangent": TANGENT}
ad.primitive_jvps[TANGENT] = _tangent_derived
ad.primitive_transposes[TANGENT] = _tangent_transposed


# --- calls ----------------------------------------------------------------------------------------
def _bind(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Sequence[Any],
    needs: Sequence[bool] = (),
) -> list[Any]:
    """Return the results of a forward, or the gradients of a backward in their places."""
    names = *_GRADS[: len(grads)], *call.names
    for name, y in zip(names, (*grads, *x), strict=True):
        if y is not None and not isinstance(y, (jax.Array, ndarray)):
            kind = f"{type(y).__module__}.{type(y).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"{name} must be a JAX array, got {kind}")
    every = [None if y is None else jnp.asarray(y) for y in (*grads, *x)]
    own = every[len(grads) :]
    arrays = [None if c is None else np.ascontiguousarray(c, np.float64) for c in constants]
    ghosts = [None if y is None else ghost(y.shape, y.dtype) for y in own]
    call.check(ghosts, (arrays[0], arrays[1]))
    first, second = (None if c is None else Constant(c.shape, c.tobytes()) for c in arrays)
    there = tuple([y is not None for y in every])
    needs = tuple([need and y is not None for need, y in zip(needs, own, strict=False)])
    form = Form(call, (first, second), there, 0, 0, needs)
    if grads and not any(needs):
        return [None] * len(x)
    found = JET.bind(*agreed([y for y in every if y is not None]), form=form)
    if not grads:
        return list(found)
    rest = iter(found)
    return [next(rest) if need else None for need in needs]


def _run(call: JetCall, x: Sequence[Any], constants: Sequence[Any], keep: Any) -> Any:
    _refuse(keep)
    return call.result(*_bind(call, (), x, constants))


def _run_backward(
    call: JetCall,
    grads: Sequence[Any],
    x: Sequence[Any],
    constants: Sequence[Any],
    kept: Any,
    needs: Sequence[str],
) -> Any:
    _refuse(kept)
    return call.gradients(_bind(call, grads, x, constants, call.wanted(needs)), needs)


def _array(x: float, like: Any) -> Any:
    return jnp.asarray(x, None if like is None else like.dtype)


def layer(
    operation: Any, operands: Sequence[Any], activation: Any, flags: Sequence[Any], needs: Any,
    out: Any, backend: Any,
) -> Any:  # fmt: skip
    """Run an operation of a layer's jet, or of a formula's."""
    how = operation, operands, activation, flags, out, backend
    call, grads, x, constants, keep = layer_call(*how, _WHAT, _array)
    if grads:
        return _run_backward(call, grads, x, constants, operands[-1] is not None, needs)
    return _run(call, x, constants, keep)


network = network_entry(_run, _run_backward, _WHAT)


def _refuse(keep: Any) -> None:
    if keep:
        raise ValueError(f"keep must be False and kept None under {_WHAT}")
