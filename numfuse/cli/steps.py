"""The steps that ``bench`` times as uses, through NumPy, modules of PyTorch and JAX.

A function here returns what makes the contestants of a step from a generator of random numbers:
numfuse and the library's own, on the same operands.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import numfuse as nf
from numfuse.cli import network
from numfuse.cli.ufuncs import Array

Runs = dict[str, Callable[[], Any]]


def nothing() -> None:
    """Return at once: the results of a call on the CPU are there when it returns."""


class Work(NamedTuple):
    """The contestants of a use, on operands that were drawn for them."""

    #: {name: a step, which returns its results}; ours are "numfuse" and names that begin with it.
    runs: Runs
    #: The results in float64.
    exact: Callable[[], Any]
    dtype: str
    #: Waits for the device.
    settle: Callable[[], None] = nothing
    #: {contestant: bytes at the peak of a step}, measured where that costs little.
    memory: Callable[[Runs], Mapping[str, int]] | None = None


Maker = Callable[[np.random.Generator], Work]


# --- NumPy ---------------------------------------------------------------------------------------
def normals(generator: np.random.Generator, dtype: str, *shapes: Sequence[int]) -> list[Array]:
    """Arrays of random numbers; matrices are weights, whose products keep the size of the rows."""
    found = []
    for shape in shapes:
        x = generator.standard_normal(shape)
        found.append(np.asarray(x / math.sqrt(shape[0]) if len(shape) == 2 else x, dtype))
    return found


def layers(
    generator: np.random.Generator, dtype: str, sizes: Sequence[int]
) -> list[tuple[Array, Array]]:
    """Weights and biases of a network from sizes[0] to sizes[-1] columns."""
    drawn: list[Array] = []
    for m, n in itertools.pairwise(sizes):
        drawn += normals(generator, dtype, (m, n), (n,))
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def inference(rows: int, sizes: Sequence[int], activation: str = "relu") -> Maker:
    """Return what makes the forward of a network on `rows` rows, from NumPy, in float32."""
    curves: dict[str, Callable[[Array], Array]] = {
        "relu": lambda x: np.maximum(x, 0),
        "tanh": np.tanh,
    }
    curve = curves[activation]

    def make(generator: np.random.Generator) -> Work:
        x = generator.standard_normal((rows, sizes[0])).astype(np.float32)
        weights = layers(generator, "float32", sizes)

        def fused() -> Array:
            h = x
            for w, b in weights[:-1]:
                h = nf.matmul_bias_activation(h, w, b, activation)
            return nf.matmul_bias_activation(h, *weights[-1])

        def plain(h: Array, weights: Iterable[tuple[Array, Array]]) -> Array:
            *hidden, (last, bias) = weights
            for w, b in hidden:
                h = curve(h @ w + b)
            return h @ last + bias

        wide = [(w.astype(np.float64), b.astype(np.float64)) for w, b in weights]
        runs = {"numfuse": fused, "NumPy": lambda: plain(x, weights)}
        return Work(runs, lambda: plain(x.astype(np.float64), wide), "float32")

    return make


def regressor(rows: int, sizes: Sequence[int], dtype: str = "float32") -> Maker:
    """Return what makes a step of gradient descent of a tanh network, written by hand from NumPy.

    At a rate of 0 every step does the whole arithmetic, on the same numbers.
    """

    def make(generator: np.random.Generator) -> Work:
        x, y = (generator.standard_normal((rows, n)).astype(dtype) for n in (sizes[0], sizes[-1]))
        start = layers(generator, dtype, sizes)

        def descended(weights: Any, gradients: list[Any]) -> list[Any]:
            for layer, found in zip(weights, reversed(gradients), strict=True):
                for parameter, gradient in zip(layer, found, strict=True):
                    parameter -= 0.0 * gradient
            return gradients

        def fused() -> list[Any]:
            kept, h = [], x
            for w, b in start[:-1]:
                out, pre = nf.matmul_bias_activation(h, w, b, "tanh", return_pre_activation=True)
                kept.append((h, pre))
                h = out
            grad = (nf.matmul_bias_activation(h, *start[-1]) - y) * (2 / y.size)
            d, *found = nf.matmul_bias_activation_bwd(grad, h, *start[-1])
            gradients = [found]
            for place in reversed(range(len(kept))):
                h, pre = kept[place]
                needs = ("a", "b", "bias") if place else ("b", "bias")
                d, *found = nf.matmul_bias_activation_bwd(
                    d, h, *start[place], "tanh", needs=needs, pre_activation=pre
                )
                gradients.append(found)
            return descended(start, gradients)

        def plain(x: Array, y: Array, weights: Any) -> list[Any]:
            kept = [x]
            for w, b in weights[:-1]:
                kept.append(np.tanh(kept[-1] @ w + b))
            w, b = weights[-1]
            d = (kept[-1] @ w + b - y) * (2 / y.size)
            gradients = []
            for place in reversed(range(len(weights))):
                h = kept[place]
                gradients.append([h.T @ d, d.sum(0)])
                if place:
                    d = (d @ weights[place][0].T) * (1 - h * h)
            return descended(weights, gradients)

        wide = [tuple(z.astype(np.float64) for z in layer) for layer in start]
        runs = {"numfuse": fused, "NumPy": lambda: plain(x, y, start)}
        return Work(runs, lambda: plain(x.astype(float), y.astype(float), wide), dtype)

    return make


def demo(generator: np.random.Generator) -> Work:
    """Make the step that ``python -m numfuse demo`` trains with."""
    x = generator.standard_normal((128, network.PIXELS)).astype(np.float32)
    labels = generator.integers(0, network.CLASSES, 128)
    start = network.Parameters.random(generator)

    def step(gradients_of: network.Gradients) -> Callable[[], Any]:
        gradients = network.Parameters.zeros()
        run = network.array_step(gradients_of, start, 0.0, x, labels, gradients)
        return lambda: [run(), gradients.weight, gradients.bias]

    def exact() -> Any:
        gradients = network.Parameters(np.zeros(start.flat.shape))
        wide = network.Parameters(start.flat.astype(np.float64))
        loss = network.unfused_gradients(wide, gradients, x.astype(np.float64), labels)
        return [loss, gradients.weight, gradients.bias]

    runs = {
        "numfuse": step(network.fused_gradients),
        "NumPy": step(network.unfused_gradients),
    }
    if importlib.util.find_spec("torch") is not None:
        torch = network.TorchNetwork(start, 0.0, x, labels)

        def torch_step() -> Any:
            loss = torch.step()
            return [loss, *([pair[i].grad for pair in torch.layers.values()] for i in (0, 1))]

        runs["PyTorch"] = torch_step
    return Work(runs, exact, "float32")


# --- PyTorch -------------------------------------------------------------------------------------
def torch_module(
    kind: str, sizes: Sequence[int], activation: str, dtype: str, device: str, seed: int
) -> tuple[Any, Any]:
    """Return a network of torch.nn from sizes[0] to sizes[2] columns, and ours, on copies.

    `kind` is "MLP", or "gated": down(activation(gate(x)) * up(x)), without biases.
    """
    import torch
    from torch import nn

    from numfuse.adapters import torch as ours

    first, hidden, last = sizes
    place: Any = {"dtype": getattr(torch, dtype), "device": device}
    curve: Callable[[Any], Any] = {
        "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    }.get(activation) or getattr(nn.functional, activation)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            gated = kind == "gated"
            self.up = nn.Linear(first, hidden, not gated, **place)
            self.gate = nn.Linear(first, hidden, False, **place) if gated else None
            self.down = nn.Linear(hidden, last, not gated, **place)

        def forward(self, x: Any) -> Any:
            if self.gate is None:
                return self.down(curve(self.up(x)))
            return self.down(curve(self.gate(x)) * self.up(x))

    plain = Plain()
    its: Any = copy.deepcopy(plain)
    down = ours.Linear.from_torch(its.down)
    if its.gate is None:
        return plain, nn.Sequential(ours.Linear.from_torch(its.up, activation), down)
    return plain, nn.Sequential(ours.GatedLinear.from_torch(its.gate, its.up, activation), down)


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
    compiled: bool = False,
) -> Maker:
    """Return what makes a step of a module: forward, mean square error and backward, or inference.

    `block`: the rows are another layer's output, so their gradient is needed, too.
    """

    def make(generator: np.random.Generator) -> Work:
        import torch

        seed = int(generator.integers(1 << 30))
        plain, fused = torch_module(kind, sizes, activation, dtype, device, seed)
        given = (generator.standard_normal((rows, n), np.float32) for n in (sizes[0], sizes[2]))
        x, y = (torch.from_numpy(z).to(device, getattr(torch, dtype)) for z in given)
        x.requires_grad_(block and train)

        def step(module: Any, x: Any = x, y: Any = y) -> Callable[[], Any]:
            parameters = [p for _, p in sorted(module.named_parameters(), key=_place)]

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

        runs = {"numfuse": step(fused), "eager": step(plain)}
        if compiled:
            torch._dynamo.reset()
            runs["numfuse compiled"] = step(torch.compile(fused, dynamic=False))
            runs["compiled"] = step(torch.compile(plain, dynamic=False))
        if device == "cpu":
            return Work(runs, exact, dtype)
        return Work(runs, exact, dtype, torch.cuda.synchronize, torch_memory)

    return make


def _place(named: tuple[str, Any]) -> tuple[int, str]:
    """Return where a parameter stands among those of its network, whatever its module is called."""
    name = named[0].removeprefix("_orig_mod.")
    parts = ("gate", "up", "down") if not name[0].isdigit() else ("0.gate", "0", "1")
    return next(i for i, part in enumerate(parts) if name.startswith(part)), name.split(".")[-1]


def torch_memory(runs: Runs) -> dict[str, int]:
    """Return the bytes of a GPU that a step allocates at its peak, beyond what was there before."""
    import torch

    found = {}
    for name, run in runs.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


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
