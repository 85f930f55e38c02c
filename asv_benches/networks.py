"""Whole networks from NumPy on the CPU: inference, and training steps with Adam, beside peers.

``python asv_benches/networks.py [WORD ...]`` runs the rows whose names have one of the words. Each
contestant does the same in the same process by turns (`numfuse.cli.uses.measure`); results are
checked against float64. Weights are plain lists of arrays, and nothing is packed ahead but in the
rows that say so.

- numfuse: :func:`numfuse.mlp`, the loss in NumPy, :func:`numfuse.mlp_bwd`, and Adam as one
  :func:`numfuse.elementwise` over a flat vector;
- NumPy: the same by hand, Adam over a flat vector;
- PyTorch: eager, with its fused Adam;
- JAX: the whole step under jax.jit, its state donated.

``--drawn N`` adds N rows of sizes that are drawn anew.

``--memory`` tells instead how much memory the rows of a training step take: the most that a process
holds during steps, less the same of a process whose steps have one row. Each contestant has
processes of its own (Linux, where a process can set its peak back).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import numfuse as nf
from numfuse.cli import network, timing
from numfuse.cli.steps import Maker, Work, layers
from numfuse.cli.ufuncs import Array
from numfuse.cli.uses import Use, measure

RATE = 1e-3
#: Seconds of a stretch: as in a loop, most of its calls find awake threads and filled caches.
STRETCH = 0.02
PEERS = ("NumPy", "PyTorch", "JAX")
#: {name: what each peer calls the activation}
CURVES: dict[str, Callable[[Array], Array]] = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
}
SLOPES: dict[str, Callable[[Array], Array]] = {
    "relu": lambda h: (h > 0).astype(h.dtype),
    "tanh": lambda h: 1 - h * h,
}


class Model:
    """Weights and biases as views of a flat vector, and Adam's state."""

    def __init__(self, given: Sequence[tuple[Array, Array]], dtype: str) -> None:
        every = [y for w, _ in given for y in (w,)] + [b for _, b in given]
        self.shapes, self.count = [y.shape for y in every], len(given)
        self.flat = np.concatenate([y.ravel() for y in every]).astype(dtype)
        self.mean, self.square, self.grad = (np.zeros_like(self.flat) for _ in range(3))
        self.weights, self.biases = self.views(self.flat)
        self.d_weights, self.d_biases = self.views(self.grad)
        self.steps = 0

    def views(self, flat: Array) -> tuple[list[Array], list[Array]]:
        found, start = [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            found.append(flat[start : start + size].reshape(shape))
            start += size
        return found[: self.count], found[self.count :]

    def scales(self) -> tuple[float, float]:
        """Count a step; return what undoes that Adam's means begin at 0."""
        self.steps += 1
        first, second = (
            1 / (1 - beta**self.steps) for beta in (network.BETA_MEAN, network.BETA_SQUARE)
        )
        return first, second


# --- contestants --------------------------------------------------------------------------------
def numfuse_step(x: Array, y: Array, given: Any, curve: str, dtype: str) -> Callable[[], Any]:
    m = Model(given, dtype)
    state = m.flat, m.mean, m.square
    scale = 2 / y.size
    operands = x, m.weights, m.biases, curve
    out = None, m.d_weights, m.d_biases

    def step() -> Any:
        found, kept = nf.mlp(*operands, keep=True)
        difference = found - y
        nf.mlp_bwd(difference * x.dtype.type(scale), *operands, kept=kept, out=out)
        nf.elementwise(network.adam, *state, m.grad, 0.0 * RATE, *m.scales(), out=state)
        return np.vdot(difference, difference) / y.size, m.grad

    return step


def numpy_step(x: Array, y: Array, given: Any, curve: str, dtype: str) -> Callable[[], Any]:
    m = Model(given, dtype)
    act, slope = CURVES[curve], SLOPES[curve]
    one = x.dtype.type

    def step() -> Any:
        inputs = [x]
        for w, b in zip(m.weights[:-1], m.biases[:-1], strict=True):
            inputs.append(act(inputs[-1] @ w + b))
        difference = inputs[-1] @ m.weights[-1] + m.biases[-1] - y
        d = difference * one(2 / y.size)
        for i in range(m.count - 1, -1, -1):
            np.matmul(inputs[i].T, d, out=m.d_weights[i])
            np.sum(d, axis=0, out=m.d_biases[i])
            if i:
                d = (d @ m.weights[i].T) * slope(inputs[i])
        first, second = map(one, m.scales())
        m.mean += one(1 - network.BETA_MEAN) * (m.grad - m.mean)
        m.square += one(1 - network.BETA_SQUARE) * (m.grad * m.grad - m.square)
        root = np.sqrt(m.square * second) + one(network.EPSILON)
        m.flat -= one(0.0 * RATE) * (m.mean * first) / root
        return np.vdot(difference, difference) / y.size, m.grad

    return step


def torch_step(x: Array, y: Array, given: Any, curve: str, dtype: str) -> Callable[[], Any]:
    import torch

    weights, biases = (
        [torch.tensor(z.astype(dtype), requires_grad=True) for z in part]
        for part in zip(*given, strict=True)
    )
    every = [*weights, *biases]
    betas = network.BETA_MEAN, network.BETA_SQUARE
    adam = torch.optim.Adam(every, lr=0.0 * RATE, betas=betas, eps=network.EPSILON, fused=True)
    rows, right = torch.from_numpy(x), torch.from_numpy(y)
    act = getattr(torch, curve)

    def step() -> Any:
        adam.zero_grad()
        h = rows
        for w, b in zip(weights[:-1], biases[:-1], strict=True):
            h = act(torch.addmm(b, h, w))
        loss = torch.nn.functional.mse_loss(torch.addmm(biases[-1], h, weights[-1]), right)
        loss.backward()
        adam.step()
        return loss.item(), torch.cat([z.grad.ravel() for z in every])

    return step


def jax_step(x: Array, y: Array, given: Any, curve: str, dtype: str) -> Callable[[], Any]:
    import jax
    from jax import numpy as jnp

    jax.config.update("jax_enable_x64", True)
    act = {"relu": jax.nn.relu, "tanh": jnp.tanh}[curve]
    weights, biases = ([jnp.asarray(z.astype(dtype)) for z in p] for p in zip(*given, strict=True))
    rows, right = jnp.asarray(x), jnp.asarray(y)

    def loss(parameters: Any) -> Any:
        h = rows
        for w, b in zip(*(p[:-1] for p in parameters), strict=True):
            h = act(h @ w + b)
        return ((h @ parameters[0][-1] + parameters[1][-1] - right) ** 2).mean()

    def update(parameters: Any, mean: Any, square: Any, count: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(parameters)
        beta, beta_2 = network.BETA_MEAN, network.BETA_SQUARE
        mean = jax.tree.map(lambda m, g: m + (1 - beta) * (g - m), mean, grads)
        square = jax.tree.map(lambda s, g: s + (1 - beta_2) * (g * g - s), square, grads)
        first, second = 1 / (1 - beta**count), 1 / (1 - beta_2**count)

        def moved(p: Any, m: Any, s: Any) -> Any:
            rate = jnp.asarray(0.0 * RATE, p.dtype)
            return p - rate * (m * first) / (jnp.sqrt(s * second) + network.EPSILON)

        return jax.tree.map(moved, parameters, mean, square), mean, square, value, grads

    jitted = jax.jit(update, donate_argnums=(0, 1, 2))
    parameters = weights, biases
    state = [parameters, *(jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))]
    count = [np.asarray(0, dtype)]

    def step() -> Any:
        count[0] = count[0] + np.asarray(1, dtype)
        *state[:], value, grads = jitted(*state, count[0])
        jax.block_until_ready(grads)
        return float(value), jnp.concatenate([z.ravel() for p in grads for z in p])

    return step


STEPS = {"numfuse": numfuse_step, "NumPy": numpy_step, "PyTorch": torch_step, "JAX": jax_step}


def training(rows: int, sizes: Sequence[int], curve: str, dtype: str) -> Maker:
    """Return what makes a training step of a network: forward, mean square error, backward, Adam.

    At a rate of 0 every step does the whole arithmetic, on the same numbers.
    """

    def make(generator: np.random.Generator) -> Work:
        x, y = (generator.standard_normal((rows, n)).astype(dtype) for n in (sizes[0], sizes[-1]))
        given = layers(generator, dtype, sizes)
        wide = [z.astype(np.float64) for z in (x, y)]
        exact = numpy_step(*wide, given, curve, "float64")
        return Work({n: s(x, y, given, curve, dtype) for n, s in STEPS.items()}, exact, dtype)

    return make


def inference(rows: int, sizes: Sequence[int], curve: str, dtype: str, packed: bool) -> Maker:
    """Return what makes a forward, from NumPy for numfuse and NumPy."""

    def make(generator: np.random.Generator) -> Work:
        import jax
        import torch
        from jax import numpy as jnp

        jax.config.update("jax_enable_x64", True)
        x = generator.standard_normal((rows, sizes[0])).astype(dtype)
        given = layers(generator, dtype, sizes)
        weights, biases = ([*p] for p in zip(*given, strict=True))
        act = CURVES[curve]

        def plain(h: Array) -> Array:
            for w, b in given[:-1]:
                h = act(h @ w + b)
            return h @ given[-1][0] + given[-1][1]

        tensors = [[torch.from_numpy(y) for y in pair] for pair in given]
        rows_torch, rows_jax = torch.from_numpy(x), jnp.asarray(x)
        torch_act = getattr(torch, curve)

        def by_torch() -> Any:
            with torch.no_grad():
                h = rows_torch
                for w, b in tensors[:-1]:
                    h = torch_act(torch.addmm(b, h, w))
                return torch.addmm(tensors[-1][1], h, tensors[-1][0])

        jax_act = {"relu": jax.nn.relu, "tanh": jnp.tanh}[curve]
        arrays = [[jnp.asarray(y) for y in pair] for pair in given]

        @jax.jit
        def jitted(h: Any, arrays: Any) -> Any:
            for w, b in arrays[:-1]:
                h = jax_act(h @ w + b)
            return h @ arrays[-1][0] + arrays[-1][1]

        own = nf.pack(weights) if packed else weights
        runs = {
            "numfuse": lambda: nf.mlp(x, own, biases, curve),
            "NumPy": lambda: plain(x),
            "PyTorch": by_torch,
            "JAX": lambda: jax.block_until_ready(jitted(rows_jax, arrays)),
        }
        return Work(runs, lambda: plain(x.astype(np.float64)), dtype)

    return make


def rows(drawn: int, generator: np.random.Generator) -> list[tuple[Use, tuple[Any, ...]]]:
    """Return the uses, of which so many have sizes that are drawn, and what each is of."""
    found = []

    def add(kind: str, count: int, sizes: Sequence[int], curve: str, dtype: str) -> None:
        name = f"{kind}, {count} rows, {'-'.join(map(str, sizes))} {curve}, {dtype}"
        if kind == "training":
            maker = training(count, sizes, curve, dtype)
        else:
            maker = inference(count, sizes, curve, dtype, kind == "packed inference")
        found.append((Use(name, ("numpy",), maker), (count, sizes, curve, dtype)))

    small, wide = (64, 64, 64, 64, 1), (64, 256, 256, 256, 1)
    for count in (1, 16, 24, 3000, 4096):
        add("inference", count, small, "relu", "float32")
    add("packed inference", 1, small, "relu", "float32")
    for sizes in (small, wide):
        for count in (32, 256, 4096):
            add("training", count, sizes, "relu", "float32")
    for count in (32, 256, 4096):
        add("training", count, small, "tanh", "float64")
    for _ in range(drawn):
        count = int(2 ** generator.uniform(0, 12))
        depth, width = int(generator.integers(1, 6)), int(2 ** generator.uniform(3, 8))
        first, last = (int(2 ** generator.uniform(0, 7)) for _ in range(2))
        kind = str(generator.choice(["training", "inference"]))
        curve, dtype = (
            str(generator.choice(["relu", "tanh"])),
            str(generator.choice(["float32", "float64"])),
        )
        add(kind, count, (first, *[width] * depth, last), curve, dtype)
    return found


# --- memory -------------------------------------------------------------------------------------
def held(name: str, count: int, sizes: Sequence[int], curve: str, dtype: str) -> int:
    """Return the most memory that this process holds during steps, in KiB."""
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((count, n)).astype(dtype) for n in (sizes[0], sizes[-1]))
    step = STEPS[name](x, y, layers(generator, dtype, sizes), curve, dtype)
    for _ in range(3):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(5):
        step()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def taken(*of: Any) -> dict[str, float]:
    """Return the memory that the rows of a training step take, in MiB, by contestant."""
    _, *rest = of
    found = {}
    for name in STEPS:
        peaks = []
        for count in (of[0], 1):
            command = [sys.executable, __file__, "--held", json.dumps([name, count, *rest])]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                break
            peaks.append(int(done.stdout))
        else:
            found[name] = (peaks[0] - peaks[1]) / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--seconds", type=float, default=6.0, help="a row; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--memory", action="store_true", help="of training steps, not times")
    parser.add_argument("--held", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.held:
        print(held(*json.loads(options.held)))
        return
    generator = np.random.default_rng(options.seed)
    every = []
    for use, of in rows(options.drawn, generator):
        if options.words and not any(word in use.name for word in options.words):
            continue
        if options.memory:
            if use.name.startswith("training"):
                every.append({"use": use.name, "MiB": taken(*of)})
                told = "  ".join(f"{name} {size:.1f}" for name, size in every[-1]["MiB"].items())
                print(f"{use.name:62} MiB: {told}", flush=True)
            continue
        found = measure(use, generator, options.seconds, options.rounds, sample=STRETCH)
        every.append(found)
        medians = found["seconds"]
        base = medians["numfuse"]
        peers = {name: medians[name] for name in PEERS if name in medians}
        best = min(peers.values()) / base
        notes = [str(found["failed"])] if found["failed"] else []
        if found["error"]["numfuse"] > found["tolerance"]:
            notes.append("WRONG")
        ratios = "  ".join(f"{name} {seconds / base:.2f}" for name, seconds in peers.items())
        print(
            f"{use.name:62} {timing.readable(base):>8}   best {best:.2f}   {ratios}",
            *notes,
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(every, file)


if __name__ == "__main__":
    main()
