"""Networks' values as the adapters have them: one operation, its backward, and its double backward.

Each is one call of the core where a backend runs whole networks of these widths. Beyond the second
derivative, and for others, the layers follow one another (:mod:`numfuse.chains`), which a library
differentiates to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numfuse.activations import get
from numfuse.adapters.jets import NetworkOperands
from numfuse.backends import resolve
from numfuse.chains import Chain
from numfuse.multilayer import mlp, mlp_bwd, mlp_double_bwd


@dataclass(frozen=True)
class ValueCall(NetworkOperands):
    """A network's value; `x` of its methods are all operands, flat."""

    def forward(self, x: Sequence[Any], keep: bool = False) -> tuple[Any, Any]:
        """Return the value, and what the backward takes as `kept`."""
        found = mlp(*self._given(x), keep=keep, **self._options())
        return found if keep else (found, None)

    def backward(
        self, grad: Any, x: Sequence[Any], needs: Sequence[bool], kept: Any = None
    ) -> list[Any]:
        """Return the gradient of each operand, None where it is not needed."""
        how = self._options() | {"needs": self.groups(needs), "kept": kept}
        return self.flat(mlp_bwd(grad, *self._given(x), **how), needs)

    def twice(
        self, cotangents: Sequence[Any], grad: Any, x: Sequence[Any], needs: Sequence[bool]
    ) -> list[Any]:
        """Return the gradients by `grad` and by each operand of those that `backward` returns.

        `cotangents` are those of the gradients of each operand, `needs` says which are needed.
        """
        u, v, w = self.apart(cotangents)
        how = self._options() | {"needs": ("grad",) * needs[0] + self.groups(needs[1:])}
        d_grad, *rest = mlp_double_bwd(u, v, w, grad, *self._given(x), **how)
        return [d_grad, *self.flat(rest, needs[1:])]

    def plain(self, x: Sequence[Any]) -> Any:
        """Return the value, layer by layer, of a library's arrays."""
        return Chain("mlp", *self.apart(x), *self.how).one_by_one()

    def _given(self, x: Sequence[Any]) -> tuple[Any, ...]:
        return *self.apart(x), self.activations[:-1]

    def _options(self) -> dict[str, Any]:
        return {"final": self.activations[-1], "backend": self.backend}


def value_call(chain: Chain) -> tuple[ValueCall, list[Any]] | None:
    """Return a network's value as one call, and its operands; None where it goes by layers.

    Those are networks of half types, which a library rounds at every layer, and of operands that do
    not fit: a layer says why.
    """
    weights, biases, activations = zip(*chain.layers, strict=True)
    backend, x = resolve(chain.backend), chain.x
    there = [x, *weights, *[y for y in biases if y is not None]]
    if any(y.dtype != x.dtype for y in there) or x.dtype.itemsize < 4:
        return None
    if any(y.ndim < 2 or y.shape[-1] > _widest(backend) for y in (x, *weights)):
        return None
    return ValueCall(tuple(map(get, activations)), True, backend), [x, *weights, *biases]


def _widest(backend: Any) -> int:
    found: int = getattr(backend, "widest_network", 0)
    return found
