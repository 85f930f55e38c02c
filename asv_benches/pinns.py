"""Burgers' equation as a use: the gradient of a physics-informed loss, by the ways of each library.

For a tanh network u(x, t), the mean square of u_t + u u_x - nu u_xx over points of the domain, and
its gradient by all weights and biases. `uses.py` has the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import numfuse as nf
from numfuse.cli.steps import Maker, Work, layers
from numfuse.cli.timing import Runs
from numfuse.cli.uses import Use

NU = 0.01 / np.pi
SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


def autograd_pinn(sizes: Sequence[int], points: int, dtype: str) -> Maker:
    """HIPS autograd: gradients of gradients, as in `docs/gallery/burgers.py`."""

    def make(generator: np.random.Generator) -> Work:
        import autograd
        import autograd.numpy as anp

        theta, given = pinn_operands(generator, sizes, points, dtype)

        def gradient(layer: Callable[..., Any], last: Callable[..., Any]) -> Any:
            def network(theta: Any, points: Any) -> Any:
                h = points
                for w, b in theta[:-1]:
                    h = layer(h, w, b)
                return last(h, *theta[-1])

            def loss(theta: Any, points: Any) -> Any:
                du = autograd.elementwise_grad(network, 1)
                d2u = autograd.elementwise_grad(lambda theta, p: du(theta, p)[:, 0], 1)
                u, first, second = network(theta, points), du(theta, points), d2u(theta, points)
                residual = first[:, 1] + u[:, 0] * first[:, 0] - NU * second[:, 0]
                return anp.mean(residual**2)

            return autograd.grad(loss)

        plain = gradient(lambda h, w, b: anp.tanh(h @ w + b), lambda h, w, b: h @ w + b)
        fused = gradient(
            lambda h, w, b: nf.matmul_bias_activation(h, w, b, "tanh"), nf.matmul_bias_activation
        )
        runs: Runs = {
            "numfuse": lambda: fused(theta, given),
            "autograd": lambda: plain(theta, given),
        }
        wide = [tuple(z.astype(np.float64) for z in layer) for layer in theta]
        return Work(runs, lambda: plain(wide, given.astype(np.float64)), dtype)

    return make


def pinn_operands(
    generator: np.random.Generator, sizes: Sequence[int], points: int, dtype: str
) -> tuple[list[Any], Any]:
    given = generator.uniform((-1, 0), (1, 1), (points, 2)).astype(dtype)
    return layers(generator, dtype, sizes), given


def torch_pinn(
    sizes: Sequence[int], points: int, dtype: str, way: str, device: str = "cpu"
) -> Maker:
    """PyTorch: `autograd.grad` of `autograd.grad`, or `torch.func` point by point under vmap."""

    def make(generator: np.random.Generator) -> Work:
        import torch
        from torch.func import functional_call, grad, vmap

        from numfuse.adapters.torch import Linear

        weights, given = pinn_operands(generator, sizes, points, dtype)

        class Tanh(torch.nn.Linear):
            def forward(self, x: Any) -> Any:
                return torch.tanh(super().forward(x))

        def network(fused: bool, dtype: str) -> Any:
            made = []
            for place, (w, b) in enumerate(weights):
                last = place == len(weights) - 1
                layer: Any = torch.nn.Linear if last else Tanh
                if fused:
                    layer = lambda *s, last=last: Linear(*s, activation="none" if last else "tanh")  # noqa: E731
                layer = layer(*w.shape)
                with torch.no_grad():
                    layer.weight.copy_(torch.from_numpy(w.T))
                    layer.bias.copy_(torch.from_numpy(b))
                made.append(layer.to(device, getattr(torch, dtype)))
                # (float32 parameters hold the values of float64 ones only where they are float32)
                if dtype == "float64":
                    made[-1].weight.data = torch.from_numpy(w.T.astype(np.float64)).to(device)
                    made[-1].bias.data = torch.from_numpy(b.astype(np.float64)).to(device)
            return torch.nn.Sequential(*made)

        def nested(net: Any, x: Any) -> Callable[[], Any]:
            x.requires_grad_()
            parameters = list(net.parameters())
            one = torch.ones(points, 1, dtype=x.dtype, device=device)

            def run() -> Any:
                u = net(x)
                (du,) = torch.autograd.grad(u, x, one, create_graph=True)
                u_x, u_t = du[:, :1], du[:, 1:]
                (d2u,) = torch.autograd.grad(u_x, x, one, create_graph=True)
                loss = (u_t + u * u_x - NU * d2u[:, :1]).square().mean()
                return torch.autograd.grad(loss, parameters)

            return run

        def functional(net: Any, x: Any) -> Callable[[], Any]:
            parameters = dict(net.named_parameters())
            detached = {name: p.detach() for name, p in parameters.items()}

            def u(p: Any, x: Any, t: Any) -> Any:
                return functional_call(net, p, (torch.stack((x, t))[None],))[0, 0]

            def residual(p: Any, x: Any, t: Any) -> Any:
                u_x = grad(u, 1)
                return grad(u, 2)(p, x, t) + u(p, x, t) * u_x(p, x, t) - NU * grad(u_x, 1)(p, x, t)

            def loss(p: Any) -> Any:
                return vmap(residual, (None, 0, 0))(p, x[:, 0], x[:, 1]).square().mean()

            return lambda: list(grad(loss)(detached).values())

        ways = {"nested": nested, "func": functional}
        x = torch.from_numpy(given).to(device)
        runs = {
            "numfuse": ways[way](network(True, dtype), x),
            "eager": ways[way](network(False, dtype), x),
        }
        exact = nested(network(False, "float64"), x.detach().double())
        if device == "cpu":
            return Work(runs, exact, dtype)
        return Work(runs, exact, dtype, torch.cuda.synchronize)

    return make


def jax_pinn(sizes: Sequence[int], points: int, dtype: str, way: str) -> Maker:
    """jax.jit: forward mode of forward mode, or gradients of gradients, under one gradient."""

    def make(generator: np.random.Generator) -> Work:
        import jax

        jax.config.update("jax_enable_x64", True)
        jnp = jax.numpy
        theta, given = pinn_operands(generator, sizes, points, dtype)

        def plain(h: Any, w: Any, b: Any, activation: str) -> Any:
            z = h @ w + b
            return jnp.tanh(z) if activation == "tanh" else z

        def gradient(layer: Callable[..., Any]) -> Any:
            def network(theta: Any, h: Any) -> Any:
                for w, b in theta[:-1]:
                    h = layer(h, w, b, "tanh")
                return layer(h, *theta[-1], "none")

            def forward(theta: Any, p: Any) -> Any:
                along = [jnp.zeros_like(p).at[:, i].set(1) for i in (0, 1)]

                def moved(i: int) -> Callable[[Any], Any]:
                    return lambda p: jax.jvp(lambda q: network(theta, q), (p,), (along[i],))

                (u, u_x), (_, u_xx) = jax.jvp(moved(0), (p,), (along[0],))
                return u, u_x, moved(1)(p)[1], u_xx

            def nested(theta: Any, p: Any) -> Any:
                first = jax.grad(lambda p: network(theta, p).sum())
                du, d2u = first(p), jax.grad(lambda p: first(p)[:, 0].sum())(p)
                return network(theta, p), du[:, :1], du[:, 1:], d2u[:, :1]

            def loss(theta: Any, p: Any) -> Any:
                u, u_x, u_t, u_xx = (forward if way == "jvp of jvp" else nested)(theta, p)
                return jnp.mean((u_t + u * u_x - NU * u_xx) ** 2)

            return jax.jit(jax.grad(loss))

        arrays = [tuple(map(jnp.asarray, layer)) for layer in theta]
        x = jnp.asarray(given)

        def run(call: Any) -> Callable[[], Any]:
            return lambda: [z for pair in jax.block_until_ready(call(arrays, x)) for z in pair]

        fused = gradient(lambda *z: nf.matmul_bias_activation(*z))
        peer = gradient(plain)
        wide = [tuple(jnp.asarray(z, "float64") for z in layer) for layer in theta]
        runs = {"numfuse": run(fused), "JAX": run(peer)}
        return Work(
            runs, lambda: [z for p in peer(wide, jnp.asarray(x, "float64")) for z in p], dtype
        )

    return make


#: {name: (module, maker of (sizes, points, dtype))}
PINNS: dict[str, tuple[str, Callable[..., Maker]]] = {
    "autograd": ("autograd", autograd_pinn),
    "torch nested": ("torch", lambda *x: torch_pinn(*x, "nested")),
    "torch.func": ("torch", lambda *x: torch_pinn(*x, "func")),
    "jax.jit jvp of jvp": ("jax", lambda *x: jax_pinn(*x, "jvp of jvp")),
    "jax.jit nested": ("jax", lambda *x: jax_pinn(*x, "nested")),
    "torch nested on cuda": ("torch", lambda *x: torch_pinn(*x, "nested", "cuda")),
}


def pinn(way: str, dtype: str, hidden: Sequence[int], points: int) -> Use:
    module, make = PINNS[way]
    shape = f"{len(hidden)} x {hidden[0]}"
    name = f"PINN gradient, {way}, {SHORT[dtype]} {shape} tanh, {points} points"
    return Use(name, (module,), make((2, *hidden, 1), points, dtype))
