"""Derivatives in a loss: the gradient of Burgers' mean squared residual by all weights, on the CPU.

``python asv_benches/jets.py [WORD ...]`` runs the rows whose names have all of the words, each way
of each library in the same process by turns, with random points and weights, and prints medians.

``--webgpu`` runs float32 rows on a WebGPU device, beside numfuse's own nested way there (HIPS
autograd over its layers). ``--layers`` runs networks there at once, as numfuse does, beside their
layers one by one, in wall time with the operands on the device.

- numfuse: :func:`numfuse.mlp_jet`, the residual in NumPy, :func:`numfuse.mlp_jet_bwd`; with what
  the forward kept, and by blocks that are made again.
- jax.jit: forward mode of forward mode, the gradient by reverse mode.
- torch: `autograd.grad` of `autograd.grad`, eager.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import numfuse as nf

NU = 0.01 / np.pi
#: {name: (points, widths, dtype)}
ROWS = {
    f"{points} points, {depth} x {width}, {dtype}": (points, (2, *[width] * depth, 1), dtype)
    for dtype in ("float64", "float32")
    for points in (2000, 10000)
    for depth, width in ((4, 32), (4, 64))
}
Layers = list[tuple[np.ndarray, np.ndarray]]
#: Seconds before each contestant, as the threads of the one before still look for work for a while;
#: and calls before the one that is timed, which wake its own.
REST, CALLS = 0.006, 3


def operands(rng: np.random.Generator, points: int, sizes: Sequence[int], dtype: str) -> Any:
    """Return points (x, t), and the weights and biases of a network."""
    x = rng.uniform((-1, 0), (1, 1), (points, 2)).astype(dtype)
    layers = []
    for k, n in itertools.pairwise(sizes):
        w = rng.standard_normal((k, n)) / np.sqrt(k)
        layers.append((w.astype(dtype), rng.standard_normal(n).astype(dtype) / 10))
    return x, layers


def ours(x: np.ndarray, layers: Layers, keep: bool) -> Callable[[], Any]:
    """Return the call of numfuse."""
    weights, biases = [w for w, _ in layers], [b for _, b in layers]
    second = np.array([[1.0, 0.0]])

    def run() -> Any:
        kept = None
        found = nf.mlp_jet(x, weights, biases, "tanh", second=second, keep=keep)
        if keep:
            found, kept = found
        u, (u_x, u_t), (u_xx,) = found
        r = (u_t + u * u_x - NU * u_xx) * (2 / len(x))
        grads = r * u_x, np.stack((r * u, r)), -NU * r[None]
        return nf.mlp_jet_bwd(*grads, x, weights, biases, "tanh", second=second, kept=kept)[1:]

    return run


def residual(u: Any, u_x: Any, u_t: Any, u_xx: Any, nu: Any, scale: Any) -> Any:
    """The cotangents of the mean square of u_t + u u_x - nu u_xx by u, u_x, u_t and u_xx."""
    r = (u_t + u * u_x - nu * u_xx) * scale
    return r * u_x, r * u, r, -nu * r


def webgpu_calls(x: np.ndarray, layers: Layers) -> dict[str, Callable[[], Any]]:
    """Return calls on a WebGPU device: jets, and nested derivatives."""
    from pinns import autograd_pinn

    points, *given = (nf.to_device(y, "webgpu") for y in (x, *(y for pair in layers for y in pair)))
    weights, biases, second = given[::2], given[1::2], np.array([[1.0, 0.0]])
    shapes = (2, len(x), 1), (1, len(x), 1)
    dot, ddot = (nf.to_device(np.zeros(shape, x.dtype), "webgpu") for shape in shapes)

    def jets() -> Any:
        found, kept = nf.mlp_jet(points, weights, biases, second=second, keep=True)
        derivatives = found.u, found.u_dot[0], found.u_dot[1], found.u_ddot[0]
        where = None, dot[0], dot[1], ddot[0]
        grad, *_ = nf.elementwise(residual, *derivatives, NU, 2 / len(x), out=where)
        how = {"second": second, "kept": kept}
        made = nf.mlp_jet_bwd(grad, dot, ddot, points, weights, biases, "tanh", **how)[1:]
        return tuple(tuple(map(nf.to_numpy, ys)) for ys in made)

    sizes = (2, *(len(b) for _, b in layers))

    work = autograd_pinn(sizes, len(x), "float32")(np.random.default_rng())
    fused = work.runs["numfuse"]

    def nested() -> Any:
        with nf.use_backend("webgpu"):
            return fused()

    return {"numfuse, kept": jets, "numfuse, nested": nested}


def layered_calls(
    x: np.ndarray, layers: Layers, activation: str = "tanh", parts: bool = False
) -> Any:
    """Return {name: (the call, the same layer by layer)} on a WebGPU device.

    With `parts` come the operands and the cotangents.
    """
    from numfuse.adapters import stacks
    from numfuse.backends.webgpu.arrays import DeviceArray, to_device

    one_by_one = stacks.network(lambda *_: stacks.Arrays(to_device, DeviceArray))
    points, *given = (nf.to_device(y, "webgpu") for y in (x, *(y for pair in layers for y in pair)))
    weights, biases, second = given[::2], given[1::2], np.array([[1.0, 0.0]])
    call, form, needs = (points, weights, biases), (None, second), ("weights", "biases")
    how = activation, "none", True, None
    rng = np.random.default_rng()
    shapes = (len(x), 1), (2, len(x), 1), (1, len(x), 1)
    grads = [nf.to_device(rng.standard_normal(y).astype(x.dtype), "webgpu") for y in shapes]
    _, kept = one_by_one(None, *call, how, form, True, ())

    def forward() -> Any:
        h, made = points, []
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            f, inner = activation if i < len(weights) - 1 else "none", h
            h, pre = nf.matmul_bias_activation(inner, w, b, f, return_pre_activation=True)
            made.append((inner, w, b, f, pre))
        return h, made

    def backward(kept_layers: Any) -> Any:
        g = grads[0]
        for i, (h, w, b, f, pre) in reversed(list(enumerate(kept_layers))):
            wanted = ("a", "b", "bias") if i else ("b", "bias")
            found = nf.matmul_bias_activation_bwd(g, h, w, b, f, needs=wanted, pre_activation=pre)
            g = found.d_a
        return found

    made = forward()[1]
    ways = {
        "value": (lambda: nf.mlp(*call, activation), lambda: forward()[0]),
        "its gradients": (lambda: nf.mlp_bwd(grads[0], *call, activation), lambda: backward(made)),
        "jet": (
            lambda: nf.mlp_jet(*call, activation, second=second),
            lambda: one_by_one(None, *call, how, form, False, ()),
        ),
        "the jet's gradients": (
            lambda: nf.mlp_jet_bwd(*grads, *call, activation, second=second),
            lambda: one_by_one(grads, *call, how, form, kept, needs),
        ),
    }
    return (ways, call, grads) if parts else ways


def by_layers(seconds: float) -> None:
    """Print what networks take at once on a WebGPU device, and layer by layer."""
    for points, sizes in ((200, (2, *[32] * 4, 1)), (2000, (2, *[32] * 4, 1)),
                          (20000, (2, *[64] * 4, 1))):  # fmt: skip
        x, layers = operands(np.random.default_rng(), points, sizes, "float32")
        waiting = nf.to_device(x[:1], "webgpu")
        for name, ways in layered_calls(x, layers).items():
            times: tuple[list[float], list[float]] = [], []
            for run in ways:
                run()
            nf.synchronize(waiting)
            end = time.perf_counter() + seconds / 4
            while time.perf_counter() < end or len(times[1]) < 3:
                for run, found in zip(ways, times, strict=True):
                    start = time.perf_counter()
                    run()
                    nf.synchronize(waiting)
                    found.append(time.perf_counter() - start)
            once, layered = (1e3 * float(np.median(t)) for t in times)
            told = f"{once:.2f} ms, layer by layer {layered:.2f} ms; {layered / once:.2f} times"
            print(f"{points} points, {sizes}, {name}: {told}", flush=True)


def jax_call(x: np.ndarray, layers: Layers) -> Callable[[], Any]:
    """Return the call of JAX."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    def network(layers: Any, z: Any) -> Any:
        for w, b in layers[:-1]:
            z = jnp.tanh(z @ w + b)
        return z @ layers[-1][0] + layers[-1][1]

    def loss(layers: Any, z: Any) -> Any:
        along_x = jnp.zeros_like(z).at[:, 0].set(1)
        along_t = jnp.zeros_like(z).at[:, 1].set(1)
        u, u_t = jax.jvp(lambda z: network(layers, z), (z,), (along_t,))
        u_x, u_xx = jax.jvp(
            lambda z: jax.jvp(lambda z: network(layers, z), (z,), (along_x,))[1], (z,), (along_x,)
        )
        return jnp.mean((u_t + u * u_x - NU * u_xx) ** 2)

    step = jax.jit(jax.grad(loss))
    given, points = jax.device_put(layers), jax.device_put(x)
    return lambda: jax.block_until_ready(step(given, points))


def torch_call(x: np.ndarray, layers: Layers) -> Callable[[], Any]:
    """Return the call of PyTorch."""
    import torch

    parameters = [torch.from_numpy(y).requires_grad_() for layer in layers for y in layer]
    points = torch.from_numpy(x).requires_grad_()
    one = torch.ones(len(x), 1, dtype=points.dtype)

    def run() -> Any:
        z = points
        for i in range(0, len(parameters) - 2, 2):
            z = torch.tanh(torch.addmm(parameters[i + 1], z, parameters[i]))
        u = torch.addmm(parameters[-1], z, parameters[-2])
        (du,) = torch.autograd.grad(u, points, one, create_graph=True)
        u_x, u_t = du[:, :1], du[:, 1:]
        (d2u,) = torch.autograd.grad(u_x, points, one, create_graph=True)
        loss = (u_t + u * u_x - NU * d2u[:, :1]).square().mean()
        return torch.autograd.grad(loss, parameters)

    return run


def adapter_call(x: np.ndarray, layers: Layers) -> Callable[[], Any]:
    """Return the call of numfuse through PyTorch: a loss of tensors, its gradient by autograd."""
    import torch

    weights, biases = (
        [torch.from_numpy(y).requires_grad_() for y in ys] for ys in zip(*layers, strict=True)
    )
    points, second = torch.from_numpy(x), np.array([[1.0, 0.0]])
    order = [y for pair in zip(weights, biases, strict=True) for y in pair]

    def run() -> Any:
        u, (u_x, u_t), (u_xx,) = nf.mlp_jet(points, weights, biases, second=second)
        loss = (u_t + u * u_x - NU * u_xx).square().mean()
        return torch.autograd.grad(loss, order)

    return run


def flat(found: Any) -> np.ndarray:
    """Return all gradients, layer by layer, as one vector."""
    if isinstance(found, tuple) and len(found) == 2:
        found = [y for pair in zip(*found, strict=True) for y in pair]
    every = []
    for y in found:
        every += [np.asarray(z).ravel() for z in (y if isinstance(y, tuple) else (y,))]
    return np.concatenate(every).astype(np.float64)


def by_turns(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Return the seconds that each contestant's calls take, one after another by turns."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way, run in runs.items():
            time.sleep(REST)
            for _ in range(CALLS):
                run()
            start = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - start)
    return times


def on_webgpu(seconds: float) -> None:
    """Print float32 rows on a WebGPU device."""
    for points, sizes in ((2000, (2, *[32] * 4, 1)), (20000, (2, *[64] * 4, 1))):
        x, layers = operands(np.random.default_rng(), points, sizes, "float32")
        runs = webgpu_calls(x, layers)
        wide = [(w.astype(np.float64), b.astype(np.float64)) for w, b in layers]
        exact = flat(ours(x.astype(np.float64), wide, True)())
        error = np.abs(flat(runs["numfuse, kept"]()) - exact).max() / np.abs(exact).max()
        assert error < 1e-4, error
        times = {way: [] for way in runs}
        for run in runs.values():
            run()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not times["numfuse, nested"]:
            for way, run in runs.items():
                start = time.perf_counter()
                run()
                times[way].append(time.perf_counter() - start)
        jets, nested = (1e3 * np.median(t) for t in times.values())
        told = f"{jets:.1f} ms, nested {nested:.1f} ms; {nested / jets:.1f} times its speed"
        print(f"{points} points, {sizes}, WebGPU: {told}", flush=True)


def main() -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--peers", default="jax,torch")
    parser.add_argument("--webgpu", action="store_true", help="on a WebGPU device")
    parser.add_argument("--layers", action="store_true", help="networks there by their layers")
    args = parser.parse_args()
    if args.layers:
        by_layers(args.seconds)
        return
    if args.webgpu:
        on_webgpu(args.seconds)
        return
    for name, (points, sizes, dtype) in ROWS.items():
        if args.words and not all(word in name for word in args.words):
            continue
        x, layers = operands(np.random.default_rng(), points, sizes, dtype)
        runs = {"numfuse, kept": ours(x, layers, True), "numfuse": ours(x, layers, False)}
        if "jax" in args.peers:
            runs["jax.jit"] = jax_call(x, layers)
        if "torch" in args.peers:
            runs["torch"] = torch_call(x, layers)
            runs["numfuse by torch"] = adapter_call(x, layers)
        exact = flat(
            ours(x.astype(np.float64), [tuple(map(np.float64, y)) for y in layers], True)()
        )
        errors = {}
        for way, run in runs.items():
            errors[way] = np.abs(flat(run()) - exact).max() / np.abs(exact).max()
            run()
        times = by_turns(runs, args.seconds)
        told = ", ".join(
            f"{way} {1e3 * np.median(t):.2f} ms ({errors[way]:.0e})" for way, t in times.items()
        )
        peers = [np.median(t) for way, t in times.items() if not way.startswith("numfuse")]
        best = min(np.median(times["numfuse"]), np.median(times["numfuse, kept"]))
        ratio = f"; {min(peers) / best:.2f} of the best peer" if peers else ""
        print(f"{name}: {told}{ratio}", flush=True)


if __name__ == "__main__":
    main()
