"""Networks' tangents and double backwards beside PyTorch and JAX, on the CPU and on a GPU.

``python asv_benches/second_order.py [WORD ...]`` runs the rows whose names have all of the words,
each way of each library in the same process by turns, with random operands, and prints medians in
milliseconds. What they compute is compared first, in float64.

- ``jvp``: the value of a tanh network and its tangent along tangents of points, weights and biases:
  :func:`numfuse.mlp_jvp`, `torch.func.jvp`, `jax.jit` of `jax.jvp`.
- ``double``: the gradients by the cotangent, points, weights and biases of the backward's
  gradients, with cotangents of all of them: :func:`numfuse.mlp_double_bwd`, which makes the forward
  again, `jax.jit` of a vjp of a vjp, and PyTorch's eager double backward: of a graph that its
  forward and backward left behind ("torch"), and with these ("torch, all").
- ``hessian``: the same with cotangents of the weights' gradients alone, and gradients by weights
  and biases: what a Hessian-vector product takes.

- ``step`` and ``penalty`` are of tensors: the gradients by weights and biases of the sum of squares
  of the network's results, and of that of the gradient of their sum by the points.

``layers``: numfuse's own layers, one by one.

``--device cuda`` runs the rows of tensors on a GPU, up to its end, and as CUDA graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from jets import by_turns, operands

import numfuse as nf
from numfuse import chains, multilayer
from numfuse.backends import load

#: (points, widths)
SIZES = {
    "200 points, 32-64-64-10": (200, (32, 64, 64, 10)),
    "2000 points, 2-4x32-1": (2000, (2, *[32] * 4, 1)),
    "10000 points, 2-4x64-1": (10000, (2, *[64] * 4, 1)),
    "10000 points, 64-96-96-10": (10000, (64, 96, 96, 10)),
    # (on a GPU no kernel runs it whole)
    "512 points, 512-2048-512-10": (512, (512, 2048, 512, 10)),
}
#: The results that a row asks a double backward for.
NEEDS = {"double": ("grad", "x", "weights", "biases"), "hessian": ("weights", "biases")}
#: {name: (row, points, widths, dtype)}
ROWS = {
    f"{row}, {dtype}, {name}": (row, *how, dtype)
    for row in ("jvp", *NEEDS, "step", "penalty")
    for dtype in ("float64", "float32")
    for name, how in SIZES.items()
}
Call = Callable[[], Any]


class Operands:
    """Points, weights, biases, tangents of all of them, and a cotangent."""

    def __init__(self, row: str, points: int, sizes: tuple[int, ...], dtype: str) -> None:
        rng = np.random.default_rng()
        self.row, (_, layers) = row, operands(rng, points, (2, *sizes), dtype)
        self.x = rng.standard_normal((points, sizes[0])).astype(dtype)
        self.weights, self.biases = map(list, zip(*layers[1:], strict=True))

        def like(y: Any) -> Any:
            if isinstance(y, list):
                return [like(z) for z in y]
            return rng.standard_normal(y.shape).astype(dtype)

        self.given = self.x, self.weights, self.biases
        self.along = tuple(map(like, self.given))
        if row == "hessian":
            self.along = None, *self.along[1:]
        self.grad = like(np.empty((points, sizes[-1])))

    def wide(self) -> Operands:
        """Return the same in float64."""
        made = object.__new__(Operands)
        for name, y in vars(self).items():
            setattr(made, name, _each(lambda z: z.astype(np.float64), y))
        return made


def _each(make: Callable[[Any], Any], y: Any) -> Any:
    if isinstance(y, (list, tuple)):
        return type(y)(_each(make, z) for z in y)
    return make(y) if isinstance(y, np.ndarray) else y


def ours(o: Operands) -> Call:
    """Return the call of numfuse."""
    if o.row == "jvp":
        return lambda: nf.mlp_jvp(*o.given, *o.along)
    needs = NEEDS[o.row]
    return lambda: nf.mlp_double_bwd(*o.along, o.grad, *o.given, needs=needs)


def by_layers(o: Operands) -> Call:
    """Return the call that numfuse's layers make."""
    run, cpu = ours(o), type(load("cpu"))

    def nothing(*_: Any) -> None:
        return None

    def apart() -> Any:
        whole = dict.fromkeys(("network_jvp", "network_double_bwd"), nothing)
        again = dict.fromkeys(("again", "gradients_again"), nothing)
        with mock.patch.multiple(cpu, **whole), mock.patch.multiple(multilayer, **again):
            return run()

    return apart


def _network(tanh: Any, x: Any, weights: Any, biases: Any) -> Any:
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        x = tanh(x @ w + b)
    return x @ weights[-1] + biases[-1]


def jax_call(o: Operands) -> Call:
    """Return the call of JAX."""
    import jax

    jax.config.update("jax_enable_x64", True)

    def network(*given: Any) -> Any:
        return _network(jax.numpy.tanh, *given)

    def backward(grad: Any, *given: Any) -> Any:
        _, pull = jax.vjp(network, *given)
        return pull(grad)

    def jvp(along: Any, given: Any, _: Any) -> Any:
        return jax.jvp(network, tuple(given), tuple(along))

    def double(along: Any, given: Any, grad: Any) -> Any:
        if o.row == "double":
            _, pull = jax.vjp(backward, grad, *given)
            return pull(tuple(along))
        _, pull = jax.vjp(lambda *own: backward(grad, given[0], *own)[1:], *given[1:])
        return pull(tuple(along[1:]))

    step = jax.jit(jvp if o.row == "jvp" else double)
    given = jax.device_put((o.along, o.given, o.grad))
    return lambda: jax.block_until_ready(step(*given))


def torch_calls(o: Operands) -> dict[str, Call]:
    """Return the calls of PyTorch."""
    import torch

    x, weights, biases = _each(torch.from_numpy, o.given)
    along, grad = _each(torch.from_numpy, o.along), torch.from_numpy(o.grad)

    def network(*given: Any) -> Any:
        z, count = given[0], len(given) // 2
        for w, b in zip(given[1:count], given[1 + count : -1], strict=True):
            z = torch.tanh(torch.addmm(b, z, w))
        return torch.addmm(given[-1], z, given[count])

    flat = x, *weights, *biases
    tangents = *((along[0],) if along[0] is not None else ()), *along[1], *along[2]
    if o.row == "jvp":
        return {"torch": lambda: torch.func.jvp(network, flat, tangents)}
    wanted = [y.requires_grad_() for y in flat[len(flat) - len(tangents) :]]
    ends = [grad.requires_grad_(), *wanted] if o.row == "double" else wanted

    def first() -> Any:
        return torch.autograd.grad(network(*flat), wanted, grad, create_graph=True)

    def second(found: Any, keep: bool = True) -> Any:
        # (by the last bias there is no second derivative)
        how: Any = {"retain_graph": keep, "allow_unused": True, "materialize_grads": True}
        there = [(y, z) for y, z in zip(found, tangents, strict=True) if y.requires_grad]
        return torch.autograd.grad([y for y, _ in there], ends, [z for _, z in there], **how)

    kept = first()
    return {"torch": lambda: second(kept), "torch, all": lambda: second(first(), False)}


def through_torch(o: Operands, device: str) -> dict[str, Call]:
    """Return calls on tensors: numfuse's node, its layers, and PyTorch's."""
    import torch
    from jets_gpu import graphed

    from numfuse.adapters import cuda_whole
    from numfuse.adapters.torch import device_perceptrons

    def leaf(y: np.ndarray) -> Any:
        return torch.from_numpy(y).to(device).requires_grad_()

    x, weights, biases = _each(leaf, o.given)
    wanted = [*weights, *biases]

    def eager() -> Any:
        return _network(torch.tanh, x, weights, biases)

    def node() -> Any:
        return nf.mlp(x, weights, biases)

    def apart() -> Any:
        by_layers = mock.patch.object(chains.Chain, "run", chains.Chain.one_by_one)
        with by_layers, mock.patch.object(multilayer, "NETWORKS", {}):
            return node()

    def apart_on_cuda(run: Call) -> Call:
        def by_layers() -> Any:
            never = mock.patch.object(device_perceptrons, "fits", lambda _: False)
            with never, mock.patch.object(cuda_whole, "ENABLED", False):
                return run()

        return by_layers

    def to_its_end(run: Call) -> Call:
        def waited() -> Any:
            found = run()
            torch.cuda.synchronize()
            return found

        return waited

    def gradients(network: Call) -> Call:
        def run() -> Any:
            out = network()
            if o.row == "penalty":
                (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            how: Any = {"allow_unused": True, "materialize_grads": True}
            return torch.autograd.grad(out.square().sum(), wanted, **how)

        return run

    if device == "cpu":
        runs = {"numfuse": node, "layers": apart, "torch": eager}
        return {way: gradients(network) for way, network in runs.items()}
    runs = {"numfuse": gradients(node), "layers": apart_on_cuda(gradients(node))}
    runs["torch"] = gradients(eager)
    runs |= {f"{way}, graphed": graphed(run) for way, run in runs.items()}
    return {way: to_its_end(run) for way, run in runs.items()}


def contestants(o: Operands, peers: str, device: str = "cpu") -> dict[str, Call]:
    """Return the calls of a row."""
    if o.row in ("step", "penalty"):
        return through_torch(o, device)
    runs = {"numfuse": ours(o), "layers": by_layers(o)}
    if "jax" in peers:
        runs["jax.jit"] = jax_call(o)
    return runs | (torch_calls(o) if "torch" in peers else {})


def flat_of(found: Any) -> np.ndarray:
    """Return all results as one vector."""
    if found is None:
        return np.empty(0)
    if isinstance(found, (list, tuple)):
        return np.concatenate([flat_of(y) for y in found])
    if hasattr(found, "detach"):
        found = found.detach().cpu()
    return np.asarray(found).ravel().astype(np.float64)


def main() -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--peers", default="jax,torch")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    for name, how in ROWS.items():
        if args.device == "cuda" and how[0] not in ("step", "penalty"):
            continue
        if args.words and not all(word in name for word in args.words):
            continue
        o = Operands(*how)
        runs = contestants(o, args.peers, args.device)
        exact, errors = flat_of(contestants(o.wide(), "")["numfuse"]()), {}
        for way, run in runs.items():
            errors[way] = np.abs(flat_of(run()) - exact).max() / np.abs(exact).max()
            assert errors[way] < (1e-12 if how[-1] == "float64" else 2e-4), (way, errors[way])
        times = {way: 1e3 * np.median(t) for way, t in by_turns(runs, args.seconds).items()}
        told = ", ".join(f"{way} {t:.3f} ({errors[way]:.0e})" for way, t in times.items())
        own = ("numfuse", "layers")
        peers = [t for way, t in times.items() if not way.startswith(own)]
        best = min(times["numfuse"], times.get("numfuse, graphed", np.inf))
        ratio = f"; {min(peers) / best:.2f} of the best peer" if peers else ""
        print(f"{name}: {told}{ratio}", flush=True)


if __name__ == "__main__":
    main()
