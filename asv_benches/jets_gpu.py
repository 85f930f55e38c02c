"""Derivatives in a loss on a GPU: the gradient of a mean square by all weights, beside its peers.

    python asv_benches/jets_gpu.py                       every row
    python asv_benches/jets_gpu.py --only float32 Burgers
    python asv_benches/jets_gpu.py --no-compile          without torch.compile and JAX
    python asv_benches/jets_gpu.py --tiles 64,8,128,2 64,4,256,2 --only float32
                                                         whole networks by these tiles alone
    python asv_benches/jets_gpu.py --tiles 128,8,256,1 128,8,128,2,16,3 --only float32 128
                                                         the second's weights come in slices of
                                                         16 values of K, through 3 stages
    python asv_benches/jets_gpu.py --turned              weights as torch.nn.Linear has them
    python asv_benches/jets_gpu.py --tiles bf16x6 bf16x6:128,8,256,1,32,2/128,8,256,1,32,2
                                                         by mma.sync, and by warp groups with these
                                                         tiles of a forward and of a backward

Wall times, host included, of a whole gradient with operands on the device; contestants take turns
in one process, figures are medians, results are compared with float64. Burgers' residual is
u_t + u u_x - nu u_xx; the other rows are the Laplacian of a network of 50 inputs.

- numfuse: :func:`numfuse.mlp_jet` and `mlp_jet_bwd` on PyTorch's tensors, the residual by PyTorch;
  with the residual as one pass by :func:`numfuse.elementwise`; as a step of autograd; and replayed
  as a CUDA graph.
- torch nested: `autograd.grad` of `autograd.grad`. torch Taylor: the derivatives carried forward
  by hand, all in one product a layer, compiled, and replayed as a CUDA graph.
- jax.jit: forward mode of forward mode (folx too for the Laplacian, with `--folx`), the gradient by
  reverse mode, products in full precision.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jets import jax_call, operands

import numfuse as nf

NU = 0.01 / np.pi
#: {name: (points, widths, dtype)}
Rows = dict[str, tuple[int, tuple[int, ...], str]]


def burgers(*rows: tuple[str, int, int, int]) -> Rows:
    """Return rows of Burgers' residual by their names."""
    return {
        f"Burgers, {points} points, {depth} x {width}, {dtype}": (
            points,
            (2, *[width] * depth, 1),
            dtype,
        )
        for dtype, points, depth, width in rows
    }


BURGERS = burgers(
    ("float32", 20000, 4, 64),
    ("float64", 20000, 4, 64),
    ("float32", 100000, 5, 128),
    ("float32", 7000, 3, 96),
)
#: For `--tiles` alone: tiles beside the layers.
WIDE = burgers(("float64", 50000, 4, 128), ("float32", 50000, 4, 192), ("float32", 50000, 4, 256))
LAPLACE = {
    f"Laplacian, 2048 points, {dtype}": (2048, (50, 768, 768, 512, 512, 1), dtype)
    for dtype in ("float64", "float32")
}
Run = Callable[[], Any]
SECOND = np.array([[1.0, 0.0]])


# --- numfuse -------------------------------------------------------------------------------------
def burgers_grads(u: Any, dot: Any, ddot: Any) -> tuple[Any, Any, Any]:
    """The cotangents of a mean squared residual, by PyTorch."""
    r = (dot[1] + u * dot[0] - NU * ddot[0]) * (2 / len(u))
    return r * dot[0], torch.stack((r * u, r)), -NU * r[None]


def residual(u: Any, x: Any, t: Any, xx: Any, scale: Any, nu: Any) -> tuple[Any, ...]:
    """Return the cotangents as a formula of :func:`numfuse.elementwise`."""
    r = (t + u * x - nu * xx) * scale
    return r * x, r * u, r, -nu * r


def burgers_fused(u: Any, dot: Any, ddot: Any) -> tuple[Any, Any, Any]:
    """The same as `burgers_grads`, in one pass."""
    d_dot = torch.empty_like(dot)
    out = torch.empty_like(u), d_dot[0], d_dot[1], torch.empty_like(u)
    nf.elementwise(residual, u, dot[0], dot[1], ddot[0], 2 / len(u), NU, out=out)
    return out[0], d_dot, out[3][None]


def laplace_grads(u: Any, dot: Any, ddot: Any) -> tuple[Any, Any, Any]:
    return None, None, ddot * (2 / len(u))


def ours(x: Any, ws: Any, bs: Any, second: Any, grads: Any) -> Run:
    def run() -> Any:
        found, kept = nf.mlp_jet(x, ws, bs, "tanh", second=second, keep=True)
        cotangents = grads(*found)
        return nf.mlp_jet_bwd(*cotangents, x, ws, bs, "tanh", second=second, kept=kept)[1:]

    return run


def ours_autograd(x: Any, ws: Any, bs: Any, second: Any, loss: Any) -> Run:
    ws, bs = ([y.clone().requires_grad_() for y in ys] for ys in (ws, bs))

    def run() -> Any:
        value = loss(*nf.mlp_jet(x, ws, bs, "tanh", second=second))
        found = torch.autograd.grad(value, [*ws, *bs], materialize_grads=True)
        return found[: len(ws)], found[len(ws) :]

    return run


def in_parts(run: Run) -> Run:
    """A call whose float32 products are of three bfloat16 parts each."""

    def split() -> Any:
        with nf.use_backend("cuda", precision="bf16x6"):
            return run()

    return split


def graphed(run: Run) -> Run:
    """A call as a CUDA graph; a replay returns the arrays of the capture.

    It keeps the call: a graph reads its operands by their addresses, and does not hold them.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()

    def replay() -> Any:
        graph.replay()
        return found

    replay.call = run  # type: ignore[attr-defined]
    return replay


# --- PyTorch -------------------------------------------------------------------------------------
def burgers_loss(u: Any, dot: Any, ddot: Any) -> Any:
    return (dot[1] + u * dot[0] - NU * ddot[0]).square().mean()


def laplace_loss(u: Any, dot: Any, ddot: Any) -> Any:
    return ddot.square().mean()


def nested(x: Any, ws: Any, bs: Any, laplacian: bool) -> Run:
    ws, bs = ([y.clone().requires_grad_() for y in ys] for ys in (ws, bs))
    x = x.clone().requires_grad_()
    one = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)

    def run() -> Any:
        z = x
        for w, b in zip(ws[:-1], bs[:-1], strict=True):
            z = torch.tanh(torch.addmm(b, z, w))
        u = torch.addmm(bs[-1], z, ws[-1])
        (du,) = torch.autograd.grad(u, x, one, create_graph=True)
        if laplacian:
            parts = [
                torch.autograd.grad(du[:, i : i + 1], x, one, create_graph=True)[0][:, i : i + 1]
                for i in range(x.shape[1])
            ]
            value = torch.stack(parts).sum(0).square().mean()
        else:
            (d2,) = torch.autograd.grad(du[:, :1], x, one, create_graph=True)
            value = burgers_loss(u, (du[:, :1], du[:, 1:]), (d2[:, :1],))
        found = torch.autograd.grad(value, [*ws, *bs], materialize_grads=True)
        return found[: len(ws)], found[len(ws) :]

    return run


def taylor(x: Any, ws: Any, bs: Any, laplacian: bool) -> Run:
    """Value, directions and second derivatives in one tall product a layer."""
    d = x.shape[1]

    def loss(x: Any, *parameters: Any) -> Any:
        count = len(parameters) // 2
        ws, bs = parameters[:count], parameters[count:]
        h = dot = ddot = None
        for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
            if h is None:
                z = torch.addmm(b, x, w)
                z_dot, z_ddot = w[:, None, :].expand(d, len(x), w.shape[1]), None
            else:
                stack = torch.cat([h[None], dot, ddot]) @ w
                z, z_dot, z_ddot = stack[0] + b, stack[1 : 1 + d], stack[1 + d :]
            if i == count - 1:
                h, dot, ddot = z, z_dot, z_ddot
                break
            h = torch.tanh(z)
            slope = 1 - h * h
            dot = slope * z_dot
            square = (z_dot * z_dot).sum(0)[None] if laplacian else (z_dot[:1] * z_dot[:1])
            ddot = -2 * h * slope * square
            if z_ddot is not None:
                ddot = ddot + slope * z_ddot
        return laplace_loss(h, dot, ddot) if laplacian else burgers_loss(h, dot, ddot)

    compiled = torch.compile(loss, dynamic=False)
    own = [y.clone().requires_grad_() for y in (*ws, *bs)]

    def run() -> Any:
        found = torch.autograd.grad(compiled(x, *own), own, materialize_grads=True)
        return found[: len(ws)], found[len(ws) :]

    return run


# --- JAX -----------------------------------------------------------------------------------------
def jax_laplacian(x: np.ndarray, layers: Any, by_folx: bool) -> Run:
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    def network(layers: Any, z: Any) -> Any:
        for w, b in layers[:-1]:
            z = jnp.tanh(z @ w + b)
        return (z @ layers[-1][0] + layers[-1][1])[..., 0]

    def laplacian(layers: Any, z: Any) -> Any:
        if by_folx:
            from folx import forward_laplacian

            return forward_laplacian(lambda z: network(layers, z), 0)(z).laplacian
        unit = jnp.eye(z.shape[0], dtype=z.dtype)

        def second(v: Any) -> Any:
            return jax.jvp(
                lambda z: jax.jvp(lambda z: network(layers, z), (z,), (v,))[1], (z,), (v,)
            )[1]

        return jnp.sum(jax.vmap(second)(unit))

    def loss(layers: Any, z: Any) -> Any:
        return jnp.mean(jax.vmap(laplacian, (None, 0))(layers, z) ** 2)

    step = jax.jit(jax.grad(loss))
    given, points = jax.device_put(layers), jax.device_put(x)
    return lambda: jax.block_until_ready(step(given, points))


def forwards(name: str, x: np.ndarray, layers: Any, on: Sequence[Any], args: Any) -> None:
    """Print the times of a Laplacian without a gradient, beside folx."""
    import jax
    import jax.numpy as jnp
    from folx import forward_laplacian

    points, ws, bs = on
    second = np.ones((1, x.shape[1]))

    def ours() -> Any:
        return nf.mlp_jet(points, ws, bs, "tanh", second=second)[2][0, :, 0]

    def network(layers: Any, z: Any) -> Any:
        for w, b in layers[:-1]:
            z = jnp.tanh(z @ w + b)
        return (z @ layers[-1][0] + layers[-1][1])[..., 0]

    def laplacian(layers: Any, z: Any) -> Any:
        return forward_laplacian(lambda z: network(layers, z), 0)(z).laplacian

    theirs = jax.jit(jax.vmap(laplacian, (None, 0)))
    given, there = jax.device_put(layers), jax.device_put(x)
    ours()
    ours()
    runs: dict[str, Run] = {"numfuse": ours, "numfuse graphed": graphed(ours)}
    if x.dtype == np.float32:
        in_parts(ours)()
        runs["numfuse bf16x6 graphed"] = graphed(in_parts(ours))
    runs["folx"] = lambda: jax.block_until_ready(theirs(given, there))
    exact = np.asarray(runs["folx"]())
    for way, run in runs.items():
        found = run()
        found = found.cpu().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        print(f"  {way}: {np.abs(found - exact).max() / np.abs(exact).max():.0e} from folx")
    medians = timed(runs, args.seconds)
    told = ", ".join(f"{way} {1e3 * t:.3f} ms" for way, t in medians.items())
    best = min(t for way, t in medians.items() if "numfuse" in way and "bf16x6" not in way)
    print(f"{name}, forward: {told}; {medians['folx'] / best:.2f} of folx", flush=True)


# --- rows ----------------------------------------------------------------------------------------
def flat(found: Any) -> np.ndarray:
    """All gradients, weights and then biases, as one vector."""
    if len(found) != 2 or isinstance(found[0][0], tuple) or len(found[0]) != len(found[1]):
        raise AssertionError("gradients of weights and of biases")
    every = [y for ys in found for y in ys]
    every = [y.cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y) for y in every]
    return np.concatenate([y.ravel() for y in every]).astype(np.float64)


def by_kind(found: Any) -> Any:
    """JAX's pairs of a layer as weights and biases."""
    return tuple(zip(*found, strict=True))


def timed(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """Return the median wall time of each way, which take turns."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for way in random.sample(list(runs), len(runs)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            runs[way]()
            torch.cuda.synchronize()
            times[way].append(time.perf_counter() - start)
    return {way: statistics.median(t) for way, t in times.items()}


def on_device(x: np.ndarray, layers: Any, turned: bool) -> tuple[Any, list[Any], list[Any]]:
    """Return points, weights and biases on the device; turned weights are views of (out, in)."""
    ws = [torch.from_numpy(w).cuda() for w, _ in layers]
    if turned:
        ws = [w.T.contiguous().T for w in ws]
    return torch.from_numpy(x).cuda(), ws, [torch.from_numpy(b).cuda() for _, b in layers]


def row(name: str, points: int, sizes: Sequence[int], dtype: str, args: argparse.Namespace) -> None:
    laplacian = name.startswith("Laplacian")
    x, layers = operands(np.random.default_rng(), points, (2, *sizes[1:]), dtype)
    if laplacian:
        generator = np.random.default_rng()
        x = generator.standard_normal((points, sizes[0])).astype(dtype)
        first = generator.standard_normal((sizes[0], sizes[1])) / np.sqrt(sizes[0])
        layers[0] = first.astype(dtype), layers[0][1]
    points_on, ws, bs = on_device(x, layers, args.turned)
    second = np.ones((1, sizes[0])) if laplacian else SECOND
    grads = laplace_grads if laplacian else burgers_grads
    loss = laplace_loss if laplacian else burgers_loss
    runs: dict[str, Run] = {}
    core = ours(points_on, ws, bs, second, grads)
    runs["numfuse"] = core
    runs["numfuse autograd"] = ours_autograd(points_on, ws, bs, second, loss)
    core()
    if laplacian:
        runs["numfuse graphed"] = graphed(core)
    else:
        runs["numfuse, torch's residual, graphed"] = graphed(core)
        runs["numfuse fused"] = core = ours(points_on, ws, bs, second, burgers_fused)
        core()
        runs["numfuse graphed"] = graphed(core)
    if dtype == "float32":
        runs["numfuse bf16x6"] = by_parts = in_parts(core)
        by_parts()
        print(f"  {name}, bf16x6: {nf.last_call().kernel}", flush=True)
        runs["numfuse bf16x6 graphed"] = graphed(by_parts)
    if not (laplacian and sizes[0] > 8):
        runs["torch nested"] = nested(points_on, ws, bs, laplacian)
    if args.compile:
        made = taylor(points_on, ws, bs, laplacian)
        runs["torch Taylor compiled"] = made
        made()
        runs["torch Taylor compiled, graphed"] = graphed(made)
    if args.jax:
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
        if laplacian:
            calls = {"folx": jax_laplacian(x, layers, True)} if args.folx else {}
            calls["jax.jit"] = jax_laplacian(x, layers, False)
        else:
            calls = {"jax.jit": jax_call(x, layers)}
        for way, call in calls.items():
            runs[way] = lambda call=call: by_kind(call())
    wide = [y.double() for y in (points_on, *ws, *bs)]
    exact = flat(ours(wide[0], wide[1 : 1 + len(ws)], wide[1 + len(ws) :], second, grads)())
    errors = {}
    for way, run in list(runs.items()):
        try:
            found = flat(run())
            run()
        except Exception as error:
            print(f"  {name}, {way}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del runs[way]
            continue
        errors[way] = np.abs(found - exact).max() / np.abs(exact).max()
    medians = timed(runs, args.seconds)
    told = ", ".join(f"{way} {1e3 * t:.3f} ms ({errors[way]:.0e})" for way, t in medians.items())
    peers = [t for way, t in medians.items() if not way.startswith("numfuse")]
    ways = [way for way in medians if way.startswith("numfuse") and "bf16x6" not in way]
    best = min(medians[way] for way in ways)
    ratio = f"; {min(peers) / best:.2f} of the best peer's speed" if peers else ""
    print(f"{name}: {told}{ratio}", flush=True)
    if laplacian and args.folx:
        forwards(name, x, layers, (points_on, ws, bs), args)


def tiles(
    name: str, points: int, sizes: Sequence[int], dtype: str, args: argparse.Namespace
) -> None:
    """Print the time of a gradient as a graph, by each tile of whole networks, and by layers."""
    from numfuse.adapters import cuda_whole
    from numfuse.backends.cuda import network_tiling
    from numfuse.backends.cuda.call.entry import forget
    from numfuse.backends.cuda.driver.devices import device
    from numfuse.backends.cuda.plan import network_sizes

    x, layers = operands(np.random.default_rng(), points, (2, *sizes[1:]), dtype)
    points_on, ws, bs = on_device(x, layers, args.turned)
    jet, how = (points_on, ws, bs, "tanh"), {"second": SECOND}
    ways: dict[str, Run] = {}
    forwards: dict[str, Run] = {}
    kept = network_tiling.TILES[dtype], network_tiling.FORWARDS.get(dtype, ())
    grouped = network_tiling.GROUPED
    for word in ("layers", *args.tiles):
        cuda_whole.ENABLED = word != "layers"
        split = word.startswith("bf16x6")
        if split:
            pair = [tile for tile in word.partition(":")[2].split("/") if tile]
            pair = [network_tiling.NetworkTile(*map(int, tile.split(","))) for tile in pair]
            # (without a tile a network goes by mma.sync)
            network_tiling.GROUPED = {False: tuple(pair[:1]), True: tuple(pair[1:])}
        elif cuda_whole.ENABLED:
            there, _, back = word.rpartition("/")
            made = tuple(map(int, back.split(",")))
            if made[0] < max(sizes[1:-1]) or made[0] > max(sizes[1:-1]) + 64:
                continue
            network_tiling.TILES[dtype] = (network_tiling.NetworkTile(*made),)
            first = [network_tiling.NetworkTile(*map(int, there.split(",")))] if there else []
            network_tiling.FORWARDS[dtype] = tuple(first)
        network_sizes.sizes_of.cache_clear()
        forget(device(0))
        run: Run = ours(points_on, ws, bs, SECOND, burgers_fused)
        ahead: Run = functools.partial(nf.mlp_jet, *jet, keep=True, **how)
        if split:
            run, ahead = in_parts(run), in_parts(ahead)
        try:
            run()
            if cuda_whole.ENABLED and "network" not in nf.last_call().kernel:
                print(f"  {name}, {word}: it does not fit, and went by layers", flush=True)
                continue
            ways[word] = graphed(run)
            forwards[f"{word} forward"] = graphed(ahead)
        except Exception as error:
            print(f"  {name}, {word}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    network_tiling.TILES[dtype], network_tiling.FORWARDS[dtype] = kept
    network_tiling.GROUPED = grouped
    exact = flat(ways["layers"]())
    for way, run in ways.items():
        error = np.abs(flat(run()) - exact).max() / np.abs(exact).max()
        print(f"  {name}, {way}: {error:.0e} from the layers", flush=True)
    medians = timed(ways | forwards, 0.7)
    told = ", ".join(f"{way}: {1e3 * t:.3f} ms" for way, t in medians.items())
    print(f"{name}: {told}", flush=True)


def main() -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turned", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-jax", dest="jax", action="store_false")
    parser.add_argument("--folx", action="store_true")
    parser.add_argument(
        "--tiles", nargs="+", metavar="[FORWARD/]COLUMNS,OF_A_THREAD,THREADS,BLOCKS[,SLICE,STAGES]"
    )
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name())
    for name, how in (BURGERS | (WIDE if args.tiles else LAPLACE)).items():
        if not all(word in name for word in args.only):
            continue
        if args.tiles:
            tiles(name, *how, args)
        else:
            row(name, *how, args)


if __name__ == "__main__":
    main()
