"""The work that the guard times: the kernel bench's, the use bench's, and networks and formulas.

The first two are numfuse's own tables, of the version that runs: a row is the same work in two
versions if it has the same name. What a version lacks is left out, and the guard says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401 - makes "bfloat16" a name of NumPy's
import numpy as np

import numfuse as nf

Call = Callable[[], Any]
Made = Iterator[tuple[str, Callable[[], Call]]]

#: (operation, M, N, K, dtype): small, in the caches, and beyond them; every kind of kernel.
KERNELS = (
    ("forward", 64, 64, 64, "float32"),
    ("forward", 512, 512, 512, "float32"),
    ("forward", 256, 256, 256, "float64"),
    ("forward", 256, 256, 256, "bfloat16"),
    ("backward", 256, 256, 256, "float32"),
    ("backward_saved", 512, 512, 512, "float32"),
    ("gated", 1024, 1024, 0, "float32"),
    ("gated_backward", 256, 256, 0, "float64"),
)


def kernels() -> Made:
    from numfuse.cli import peers

    for operation, m, n, k, dtype in KERNELS:
        case = peers.Case(operation, m, n, k, dtype, "gelu")

        def make(case: Any = case) -> Call:
            operands = peers.draw_operands(case, np.random.default_rng(0))
            operands = operands._replace(pre=operands.pre.astype(case.dtype, copy=False))
            made = peers.numfuse_contestant(case, operands)
            return getattr(made, "run", made)

        yield f"kernel: {operation} {m} x {n} x {k} {dtype}", make


def uses() -> Made:
    from numfuse.cli import uses

    for use in uses.USES:
        if use.installed():

            def make(use: Any = use) -> Call:
                return use.make(np.random.default_rng(0)).runs["numfuse"]

            yield f"use: {use.name}", make


def networks() -> Made:
    generator = np.random.default_rng(0)

    def layers(*sizes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        pairs = list(itertools.pairwise(sizes))
        weights = [generator.standard_normal((m, n)) / m**0.5 for m, n in pairs]
        return weights, [generator.standard_normal(n) for _, n in pairs]

    def step() -> Call:
        x, network, grad = (
            generator.standard_normal((512, 16)),
            layers(16, 64, 64, 1),
            np.ones((512, 1)),
        )
        return lambda: nf.mlp_bwd(grad, x, *network, "tanh")

    def jet() -> Call:
        x, network = generator.standard_normal((1000, 2)), layers(2, 32, 32, 1)
        ways = {"directions": np.eye(2), "second": np.ones((1, 2))}
        given = [np.ones_like(y) for y in nf.mlp_jet(x, *network, "tanh", **ways)]
        return lambda: nf.mlp_jet_bwd(*given, x, *network, "tanh", **ways)

    def own() -> Call:
        @nf.epilogue
        def scaled(z: Any, scale: Any) -> Any:
            return z * scale + 1.0

        a, b = generator.standard_normal((128, 64)), generator.standard_normal((64, 96))
        scale = generator.standard_normal(96)
        return lambda: nf.matmul_epilogue(a, b, scaled, scale)

    yield "network: the gradients of 512 rows, 16-64-64-1, float64", step
    yield "network: the gradients of a jet, 1000 points, 2-32-32-1, float64", jet
    yield "formula: a product of 128 x 96 x 64, float64", own


def every() -> Made:
    """Return the names of the cases, and what makes the call of each."""
    yield from kernels()
    yield from uses()
    yield from networks()
