"""A problem as passes of the shader contract.

The contract knows contiguous arrays, and sums over the whole batch for d_b and d_bias. A problem's
arrays are made so, and cut in *units*: the elements of the batch, or the rows of A where one B
serves all, or the elements of a gate. A *group* of units is what one dispatch of each entry point
computes: all units where meaning and limits allow it, one where a member of the batch has a bias or
a gradient of its own. Sums over groups are made here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.contract.grouping import Array, Grouping, Step
from numfuse.problem.fields import FIELDS
from numfuse.problem.shapes import sum_to

if TYPE_CHECKING:
    from numfuse.backends.webgpu.contract.backend import ContractBackend
    from numfuse.problem.product import GemmBackwardProblem, GemmProblem

_F32 = np.dtype(np.float32)
_F64 = np.dtype(np.float64)
#: Of the contract's workgroups along M and along a line.
_TILE, _LINE = 16, 256
_GRAD_PRE = "gemm_bwd_grad_pre_f32"
_PADDING = "padding_0", "padding_1", "padding_2"


class Product:
    """The operands of a product as the contract has them."""

    def __init__(self, backend: ContractBackend, p: GemmProblem | GemmBackwardProblem) -> None:
        self.p = p
        self.backend = backend
        self.m, self.n = p.m, p.n
        self.batch = p.batch
        # A sum over nothing is a sum over one product of zeros.
        self.k = p.k or 1
        self.own_bias = p.bias is not None and not _shared(p.bias)
        #: Whether the batch is rows of A: it is where one B and one bias serve all of it.
        self.rows = _shared(p.b) and not self.own_bias
        count = prod(self.batch)
        self.units = count * self.m if self.rows else count

    def run(
        self, steps: Sequence[Step], arrays: dict[str, Array], results: Iterable[str], alone: bool
    ) -> dict[str, ndarray]:
        """Run the steps and return results; `alone`: one element of the batch at a time."""
        limit = self.backend.device.grid_limit
        most = _TILE * limit if self.rows else 1 if alone else limit
        return Grouping(self.backend, self.units, most, arrays).run(steps, list(results))

    def operands(self, alone: bool) -> dict[str, Array]:
        """a, b and bias."""
        p = self.p
        a, b = p.a, p.b
        if p.k == 0:
            a, b = np.zeros((self.m, 1), _F32), np.zeros((1, self.n), _F32)
        bias = np.zeros((1, self.n), _F32) if p.bias is None else p.bias
        once = {"a": alone and not self.rows, "b": alone or self.rows, "bias": True}
        return {
            name: Array(prod(x.shape[-2:]), "call", x)
            if once[name] and _shared(x)
            else self.each(x)
            for name, x in (("a", a), ("b", b), ("bias", bias))
        }

    def each(self, x: ndarray) -> Array:
        """An operand with a piece for each unit, repeated where it was broadcast."""
        return self.result(x.shape[-2:])._replace(
            content=np.broadcast_to(x, (*self.batch, *x.shape[-2:]))
        )

    def result(self, shape: tuple[int, ...]) -> Array:
        """A result of (rows, columns), with a piece for each unit."""
        return Array(shape[1] if self.rows else shape[0] * shape[1])

    def step(self, entry_point: str, activation: int | None = None, **names: str) -> Step:
        """Return a pass of an entry point, with the problem's activation or that of a number."""
        number = self.p.activation.id if activation is None else activation

        def fields(units: int) -> dict[str, Any]:
            m, batch = (units, 1) if self.rows else (self.m, units)
            sizes = {"M": m, "K": self.k, "N": self.n, "batch_size": batch}
            return {**sizes, "activation_type": number} | dict.fromkeys(_PADDING, 0)

        return Step(entry_point, fields, names)


def _shared(x: ndarray) -> bool:
    return all(length == 1 for length in x.shape[:-2])


def forward(backend: ContractBackend, p: GemmProblem) -> list[str]:
    """out = act(a @ b + bias) + residual; the entry points that ran."""
    product = Product(backend, p)
    kind = "act" if p.residual is None else "residual"
    names = f"gemm_bias_{kind}_f32", f"gemm_bias_{kind}_batched_f32"
    # For a single product either will do, with a batch of one.
    entry = backend.require(*(names if product.rows else names[::-1]), one=True)
    if not p.out.size:
        return []
    alone = product.own_bias or entry == names[0]
    arrays = {**product.operands(alone), "c": product.result((p.m, p.n))}
    outs, steps = {"c": p.out}, [product.step(entry)]
    if p.residual is not None:
        full = np.broadcast_to(p.residual, (*p.residual.shape[:-2], p.m, p.n))
        arrays["residual"] = product.each(full)
    if p.pre is not None:
        arrays["pre"], outs["pre"] = arrays["c"], p.pre
        steps.append(product.step(entry, 0, c="pre"))
    found = product.run(steps, arrays, outs, alone)
    for name, x in outs.items():
        x[...] = found[name].reshape(x.shape)
    return [entry]


def backward(backend: ContractBackend, p: GemmBackwardProblem) -> list[str]:
    """The gradients; the entry points that ran."""
    wanted = {"d_a": p.d_a, "d_b": p.d_b, "d_bias": p.d_bias}
    outs = {name: x for name, x in wanted.items() if x is not None}
    entries = {name: f"gemm_bwd_{name.replace('_', '')}_f32" for name in outs}
    if outs:
        backend.require(_GRAD_PRE, *entries.values())
    outs = {name: x for name, x in outs.items() if x.size}
    if p.d_residual is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            p.d_residual[...] = sum_to(p.grad, p.d_residual.shape, _F32)
    if not outs:
        return []
    product = Product(backend, p)
    m, k, n = product.m, product.k, product.n
    alone = product.own_bias or (p.d_b is not None and not _shared(p.d_b))
    arrays = {
        **product.operands(alone),
        "grad": product.each(p.grad),
        "grad_pre": product.result((m, n)),
        "d_a": product.result((m, k)),
        "d_b": Array(k * n, "group"),
        "d_bias": Array(n, "group"),
    }
    for name in wanted.keys() - outs.keys():
        arrays[name] = Array(1, "call")  # bound, and never written
    ran = [_GRAD_PRE, *(entries[name] for name in outs)]
    found = product.run([product.step(entry) for entry in ran], arrays, outs, alone)
    with np.errstate(over="ignore", invalid="ignore"):
        for name, x in outs.items():
            pieces = found[name]
            if name == "d_a":
                pieces = pieces.reshape(*product.batch, m, k)
            elif not product.rows and alone:
                pieces = pieces.reshape(*product.batch, *x.shape[-2:])
            elif len(pieces) > 1:
                pieces = np.asarray(np.sum(pieces, axis=0, dtype=_F64))
            if pieces.size == x.size:
                x[...] = pieces.reshape(x.shape)
            else:
                x[...] = sum_to(pieces, x.shape, _F64)
    return ran


def _gate(kind: str, backend: ContractBackend, p: Any) -> list[str]:
    """Run a gate, or its backward, and return the entry point that ran."""
    inputs, outputs = FIELDS[kind]
    outs = {name: x for name in outputs if (x := getattr(p, name)) is not None}
    if not outs:
        return []
    entry = f"{p.activation.name}_mul{'_bwd' if kind == 'gated_backward' else ''}_f32"
    backend.require(entry)
    if not p.a.size:
        return []
    arrays = {name: Array(1, content=getattr(p, name)) for name in inputs}
    arrays |= {name: Array(1) for name in outputs}  # an entry point writes all
    step = Step(entry, lambda units: {"numel": units})
    grouping = Grouping(backend, p.a.size, _LINE * backend.device.grid_limit, arrays)
    found = grouping.run([step], list(outs))
    for name, x in outs.items():
        x[...] = found[name].reshape(x.shape)
    return [entry]


gated = partial(_gate, "gated")
gated_backward = partial(_gate, "gated_backward")
