"""The steps that ``bench`` times as uses, through NumPy, modules of PyTorch and JAX.

A function here returns what makes the contestants of a step from a generator of random numbers:
numfuse and the library's own, on the same operands.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import numfuse as nf
from numfuse.cli import network
from numfuse.cli.timing import Runs
from numfuse.cli.ufuncs import Array


class Work(NamedTuple):
    """The contestants of a use, on operands that were drawn for them."""

    #: {name: a step, which returns its results}; ours are "numfuse" and names that begin with it.
    runs: Runs
    #: The results in float64.
    exact: Callable[[], Any]
    dtype: str
    #: Waits for the device; the CPU's results are there when a call returns.
    settle: Callable[[], None] = lambda: None
    #: Contestants whose results cannot be compared: a like network's.
    unlike: Mapping[str, Callable[[], Any]] = MappingProxyType({})


Maker = Callable[[np.random.Generator], Work]


# --- NumPy ---------------------------------------------------------------------------------------
def layers(
    generator: np.random.Generator, dtype: str, sizes: Sequence[int]
) -> list[tuple[Array, Array]]:
    """Weights and biases of a network from sizes[0] to sizes[-1] columns.

    Products with the weights keep the size of the rows.
    """

    def drawn(m: int, n: int) -> tuple[Array, Array]:
        weight = generator.standard_normal((m, n)) / math.sqrt(m)
        return weight.astype(dtype), generator.standard_normal(n).astype(dtype)

    return list(itertools.starmap(drawn, itertools.pairwise(sizes)))


def inference(rows: int, sizes: Sequence[int]) -> Maker:
    """Return what makes the forward of a relu network on `rows` rows, from NumPy, in float32."""

    def make(generator: np.random.Generator) -> Work:
        x = generator.standard_normal((rows, sizes[0])).astype(np.float32)
        weights = layers(generator, "float32", sizes)

        def fused() -> Array:
            h = x
            for w, b in weights[:-1]:
                h = nf.matmul_bias_activation(h, w, b, "relu")
            return nf.matmul_bias_activation(h, *weights[-1])

        def plain(h: Array) -> Array:
            for w, b in weights[:-1]:
                h = np.maximum(h @ w + b, 0)
            w, b = weights[-1]
            return h @ w + b

        # (rows of float64 make all of it float64)
        runs = {"numfuse": fused, "NumPy": lambda: plain(x)}
        return Work(runs, lambda: plain(x.astype(np.float64)), "float32")

    return make


def demo(generator: np.random.Generator) -> Work:
    """Make the step that ``python -m numfuse demo`` trains with."""
    x = generator.standard_normal((128, network.PIXELS)).astype(np.float32)
    labels = generator.integers(0, network.CLASSES, 128)
    start = network.Parameters.random(generator)
    wide = network.Parameters(start.flat.astype(np.float64))
    exact = network.array_step(network.unfused_gradients, wide, x.astype(np.float64), labels)
    return Work(network.steps(start, x, labels), exact, "float32")


# --- PyTorch -------------------------------------------------------------------------------------
def torch_module(
    kind: str, sizes: Sequence[int], activation: str, dtype: str, device: str, seed: int
) -> tuple[Any, Any]:
    """Return a network of torch.nn from sizes[0] to sizes[2] columns, and ours, on copies.

    `kind` is "MLP", or "gated": down(activation(gate(x)) * up(x)), without biases. Both list their
    parameters in the same order.
    """
    import torch
    from torch import nn

    from numfuse.adapters import torch as ours

    first, hidden, last = sizes
    gated = kind == "gated"
    curve: Any = getattr(nn.functional, activation)
    if activation == "gelu":
        curve = functools.partial(curve, approximate="tanh")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            place: Any = {"dtype": getattr(torch, dtype), "device": device, "bias": not gated}
            self.gate = nn.Linear(first, hidden, **place) if gated else None
            self.up = nn.Linear(first, hidden, **place)
            self.down = nn.Linear(hidden, last, **place)

        def forward(self, x: Any) -> Any:
            if self.gate is None:
                return self.down(curve(self.up(x)))
            return self.down(curve(self.gate(x)) * self.up(x))

    plain = Plain()
    its: Any = copy.deepcopy(plain)
    if gated:
        layer: Any = ours.GatedLinear.from_torch(its.gate, its.up, activation)
    else:
        layer = ours.Linear.from_torch(its.up, activation)
    return plain, nn.Sequential(layer, ours.Linear.from_torch(its.down))


def torch_step(
    kind: str,
    rows: int,
    sizes: Sequence[int],
    *,
    activation: str = "gelu",
    dtype: str = "float32",
    device: str = "cpu",
    train: bool = True,
    block: bool = False,
    also: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> Maker:
    """Return what makes a step of a module: forward, mean square error and backward, or inference.

    `block`: the rows are another layer's output, so their gradient is needed, too. `also` returns
    further contestants by name, from torch.nn's module and ours.
    """

    def make(generator: np.random.Generator) -> Work:
        import torch

        seed = int(generator.integers(1 << 30))
        plain, fused = torch_module(kind, sizes, activation, dtype, device, seed)
        given = (generator.standard_normal((rows, n), np.float32) for n in (sizes[0], sizes[2]))
        x, y = (torch.from_numpy(z).to(device, getattr(torch, dtype)) for z in given)
        x.requires_grad_(block and train)

        def step(module: Any, x: Any = x, y: Any = y) -> Callable[[], Any]:
            parameters = list(module.parameters())

            def trained() -> Any:
                module.zero_grad(set_to_none=True)
                x.grad = None
                loss = torch.nn.functional.mse_loss(module(x), y)
                loss.backward()
                return [loss, [p.grad for p in parameters], x.grad if block else ()]

            def inferred() -> Any:
                with torch.no_grad():
                    return module(x)

            return trained if train else inferred

        def exact() -> Any:
            wide = x.detach().double().requires_grad_(x.requires_grad)
            return step(copy.deepcopy(plain).double(), wide, y.double())()

        every = {"numfuse": fused, "eager": plain, **(also(plain, fused) if also else {})}
        work = Work({name: step(module) for name, module in every.items()}, exact, dtype)
        return work if device == "cpu" else work._replace(settle=torch.cuda.synchronize)

    return make


# --- JAX -----------------------------------------------------------------------------------------
def jax_layer(rows: int, width: int, *, gradient: bool = False) -> Maker:
    """Return what makes one layer under jax.jit, or its gradients."""

    def make(generator: np.random.Generator) -> Work:
        import jax

        x = generator.standard_normal((rows, width)).astype(np.float32)
        ((w, b),) = layers(generator, "float32", (width, width))
        given = [jax.numpy.asarray(z) for z in (x, w, b)]

        def run(layer: Callable[..., Any]) -> Callable[[], Any]:
            def loss(*z: Any) -> Any:
                return (layer(*z) ** 2).sum()

            call = jax.jit(jax.grad(loss, (0, 1, 2)) if gradient else layer)
            return lambda: jax.block_until_ready(call(*given))

        def exact() -> Any:
            wide = [z.astype(np.float64) for z in (x, w, b)]
            t = np.tanh(wide[0] @ wide[1] + wide[2])
            d = 2 * t * (1 - t * t)
            return (d @ wide[1].T, wide[0].T @ d, d.sum(0)) if gradient else t

        runs = {
            "numfuse": run(lambda x, w, b: nf.matmul_bias_activation(x, w, b, "tanh")),
            "JAX": run(lambda x, w, b: jax.numpy.tanh(x @ w + b)),
        }
        return Work(runs, exact, "float32")

    return make
