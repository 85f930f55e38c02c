"""Everyone's call of a case of `cpu_sweep.py`, on operands that are drawn anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from cpu_cases import (
    FIRST,
    NUMPY,
    OPERATIONS,
    SLOPES,
    Call,
    gate_slopes,
    jax_library,
    layer_slopes,
    torch_library,
)

if TYPE_CHECKING:
    from cpu_sweep import Case

#: The margin, in columns, on either side of an operand whose rows lie apart.
MARGIN = 16


class Contestants:
    """The operands of a case, drawn anew, and everyone's call on them."""

    def __init__(self, case: Case, generator: np.random.Generator) -> None:
        self.case, self.operation = case, OPERATIONS[case.operation]
        self._generator = generator
        self.turned: list[Callable[[Any], Any]] = []
        shapes = self._shapes()
        #: Whole arrays, of which operands are views: JAX has no views.
        self.whole = [
            self._normal(self._whole(shape, turn), scale)
            for (shape, scale), turn in zip(shapes, self.turned, strict=True)
        ]
        pairs = list(zip(self.whole, self.turned, strict=True))
        self.operands = [turn(x) for x, turn in pairs]
        self.tangents = [self._normal(x.shape) for x in self.operands]
        lead = (case.batch,) if case.batch else ()
        self.grad = self._normal((*lead, case.m, case.n))
        #: The operands whose gradients are taken: of a network its parameters.
        self.wanted = slice(1, None) if self.operation.network else slice(None)

    def _normal(self, shape: Sequence[int], scale: float = 1.0) -> Any:
        x = self._generator.standard_normal(shape, np.float32) * np.float32(scale)
        return x.astype(ml_dtypes.bfloat16 if self.case.dtype == "bfloat16" else self.case.dtype)

    def _shapes(self) -> list[tuple[tuple[int, ...], float]]:
        """Return the operands' shapes and scales, and note the views of them."""
        c, operation = self.case, self.operation
        lead, own = ((c.batch,) if c.batch else ()), () if c.shared else (c.batch,)
        vector = (*own, *((1,) if own else ()), c.n)
        named = {"N": vector, "MN": (*lead, c.m, c.n), "M1": (*lead, c.m, 1)}
        found: list[tuple[tuple[int, ...], float]] = []
        if operation.network:
            widths = [c.k, *[c.n] * c.depth]
            pairs = list(itertools.pairwise(widths))
            found = [((c.m, c.k), 1.0), *((pair, pair[0] ** -0.5) for pair in pairs)]
            found += [((c.n,), 1.0) for _ in pairs]
        elif operation.factors:
            found = [((*lead, c.m, c.k), 1.0)]
            found += [((*own, c.k, c.n), c.k**-0.5)] * operation.factors
        found += [(named[x], 1.0) for x in operation.others]
        views: dict[str, dict[int, Callable[[Any], Any]]] = {
            "a turned": {0: _turn}, "a apart": {0: _inner},
            "b turned": {1 + i: _turn for i in range(operation.factors)},
        }  # fmt: skip
        self.turned = [views.get(c.layout, {}).get(i, _same) for i in range(len(found))]
        return found

    @staticmethod
    def _whole(shape: tuple[int, ...], turn: Callable[[Any], Any]) -> tuple[int, ...]:
        """Return the shape of the array that an operand is a view of."""
        if turn is _turn:
            return (*shape[:-2], shape[-1], shape[-2])
        return (*shape[:-1], shape[-1] + 2 * MARGIN) if turn is _inner else shape

    def formula(self, library: Any) -> Callable[..., Any]:
        """Return the value as a function of the operands."""
        act = library.curves[self.case.activation]
        return lambda *operands: self.operation.formula(library, act, *operands)

    def runs(self, compiled: bool) -> dict[str, Call]:
        """Return everyone's call."""
        ours = self.operation.ours(self, self.case.order)
        found = {"numfuse": lambda: _there(ours())}
        if (by_hand := self._numpy()) is not None:
            found["NumPy"] = by_hand
        found["PyTorch"] = self._torch(map(tensor, self.operands), tensor)
        found["JAX"] = self._jax()
        if compiled and self.case.order in FIRST:
            import torch

            torch._dynamo.reset()
            made = partial(torch.compile, dynamic=False)
            found["torch.compile"] = self._torch(map(tensor, self.operands), tensor, made)
        return found

    def exact(self) -> Any:
        """Return the results in float64: NumPy's values, PyTorch's derivatives."""
        if self.case.order == "value":
            wide = [x.astype(np.float64) for x in self.operands]
            return self.formula(NUMPY)(*wide)

        def widened(x: Any) -> Any:
            return tensor(x.astype(np.float64))

        return self._torch(map(widened, self.operands), widened)()

    def _numpy(self) -> Call | None:
        """Return NumPy's call where people write it by hand; half types are slow there."""
        name, order = self.case.activation, self.case.order
        if self.case.dtype not in ("float32", "float64"):
            return None
        if order == "value":
            value = self.formula(NUMPY)
            return lambda: value(*self.operands)
        if order not in ("gradients", "saved") or name not in SLOPES:
            return None
        if self.case.operation == "layer":
            a, b, bias = self.operands
            pre = a @ b + bias if order == "saved" else None
            return lambda: layer_slopes(name, self.grad, a, b, bias, pre)
        if self.case.operation == "gate":
            return lambda: gate_slopes(name, self.grad, *self.operands)
        return None

    def _torch(self, operands: Any, make: Callable[[Any], Any], how: Any = lambda f: f) -> Call:
        """Return PyTorch's call on tensors."""
        import torch

        order, given = self.case.order, list(operands)
        value = how(self.formula(torch_library()))
        differentiate = torch.autograd.grad
        if order == "value":

            def forward() -> Any:
                with torch.no_grad():
                    return value(*given)

            return forward
        along, grad = [make(x) for x in self.tangents], make(self.grad)
        if order == "tangent":
            return lambda: torch.func.jvp(value, tuple(given), tuple(along))
        wanted = [x.requires_grad_() for x in given[self.wanted]]
        if order == "gradients":
            return lambda: differentiate(value(*given), wanted, grad)
        out = value(*given)
        if order == "saved":
            return lambda: differentiate(out, wanted, grad, retain_graph=True)
        ends = wanted if self.operation.network else [grad.requires_grad_(), *wanted]
        first = differentiate(out, wanted, grad, create_graph=True)
        pairs = [(x, y) for x, y in zip(first, along[self.wanted], strict=True) if x.requires_grad]
        starts, cotangents = zip(*pairs, strict=True)
        options: Any = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        return lambda: differentiate(starts, ends, cotangents, **options)

    def _jax(self) -> Call:
        """Return JAX's call, which is given whole arrays and takes views of them inside."""
        import jax

        order, formula = self.case.order, self.formula(jax_library())
        start = self.wanted.start or 0

        def views(whole: Sequence[Any]) -> list[Any]:
            return [turn(x) for x, turn in zip(whole, self.turned, strict=True)]

        def value(whole: Any) -> Any:
            return formula(*views(whole))

        def tangent(whole: Any, along: Any) -> Any:
            return jax.jvp(formula, tuple(views(whole)), tuple(along))

        def pulled(*operands: Any) -> Any:
            return jax.vjp(partial(formula, *operands[:start]), *operands[start:])[1]

        def gradients(whole: Any, grad: Any) -> Any:
            return pulled(*views(whole))(grad)

        def second(whole: Any, grad: Any, along: Any) -> Any:
            operands = views(whole)
            fixed, rest = operands[:start], operands[start:]
            if self.operation.network:
                return jax.vjp(lambda *x: pulled(*fixed, *x)(grad), *rest)[1](tuple(along[start:]))
            return jax.vjp(lambda grad, *x: pulled(*x)(grad), grad, *rest)[1](tuple(along))

        whole, grad, along = jax.device_put((self.whole, self.grad, self.tangents))
        given: dict[str, tuple[Any, ...]] = {
            "value": (value, whole), "tangent": (tangent, whole, along),
            "gradients": (gradients, whole, grad), "second": (second, whole, grad, along),
        }  # fmt: skip
        if order == "saved":
            given["saved"] = lambda pull, grad: pull(grad), pulled_of(pulled, views, whole), grad
        compiled, arguments = jax.jit(given[order][0]), given[order][1:]
        return lambda: jax.block_until_ready(compiled(*arguments))


def pulled_of(pulled: Callable[..., Any], views: Callable[[Any], Any], whole: Any) -> Any:
    """Return the pullback of a forward that JAX has run, with what it keeps."""
    import jax

    return jax.jit(lambda whole: pulled(*views(whole)))(whole)


def _same(x: Any) -> Any:
    return x


def _turn(x: Any) -> Any:
    return x.mT


def _inner(x: Any) -> Any:
    return x[..., MARGIN:-MARGIN]


def _there(found: Any) -> Any:
    """Return results without those that nobody asked for."""
    return [x for x in found if x is not None] if isinstance(found, tuple) else found


def tensor(x: Any) -> Any:
    """Return a tensor over the memory of an array."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)
