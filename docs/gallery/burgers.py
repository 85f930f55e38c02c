"""
A physics-informed network for the Burgers equation
===================================================

``u_t + u u_x = nu u_xx`` on -1 < x < 1 with ``u(0, x) = -sin(pi x)``: a network u(x, t) is
trained so that the equation holds at points of the domain. The exact solution is that of Cole and
Hopf.
"""

import itertools
import statistics
import time

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize

import numfuse as nf

NU, WIDTH, DEPTH = 0.1 / np.pi, 32, 3
rng = np.random.default_rng(0)
SIZES = (2, *(WIDTH,) * DEPTH, 1)
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def layers(theta):
    """Return weights and biases as views of one vector."""
    parts = [theta[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(SHAPES, ENDS, strict=True)]
    return parts[::2], parts[1::2]


# %%
# Points inside, where the equation is to hold, and on the edge, where the values are known.

inside = rng.uniform((-1, 0), (1, 1), (2000, 2))
begin = np.stack([np.linspace(-1, 1, 101), np.zeros(101)], axis=1)
walls = np.stack([np.repeat([-1.0, 1.0], 40), np.tile(np.linspace(0, 1, 40), 2)], axis=1)
edge = np.concatenate([begin, walls])
on_edge = np.concatenate([-np.sin(np.pi * begin[:, :1]), np.zeros((len(walls), 1))])

# %%
# `mlp_jet` returns the network's value, its derivatives by x and t, and the second derivative by x:
# `second` has one row, which leaves u_tt out. The residual of the equation is arithmetic on these
# arrays, and so is its gradient by them. `mlp_jet_bwd` takes that back to the weights. `keep` saves
# it from running the network again.

SECOND = [[1.0, 0.0]]  # of u_xx and u_tt
NONE = {"directions": np.zeros((0, 2)), "second": np.zeros((0, 0))}  # the value alone


def loss_and_gradient(theta):
    weights, biases = layers(theta)
    found, kept = nf.mlp_jet(inside, weights, biases, "tanh", second=SECOND, keep=True)
    u, (u_x, u_t), (u_xx,) = found
    r = u_t + u * u_x - NU * u_xx
    g = 2 * r / len(r)
    grads = g * u_x, np.stack([g * u, g]), -NU * g[None]
    within = nf.mlp_jet_bwd(*grads, inside, weights, biases, "tanh", second=SECOND, kept=kept)

    found, kept = nf.mlp_jet(edge, weights, biases, "tanh", keep=True, **NONE)
    off = found.u - on_edge
    g = 20 * off / len(off)
    around = nf.mlp_jet_bwd(g, None, None, edge, weights, biases, "tanh", kept=kept, **NONE)
    parts = [
        (d + e).ravel()
        for pair in zip(within[1:], around[1:], strict=True)
        for d, e in zip(*pair, strict=True)
    ]
    ordered = [x for pair in zip(parts[: DEPTH + 1], parts[DEPTH + 1 :], strict=True) for x in pair]
    return np.mean(r**2) + 10 * np.mean(off**2), np.concatenate(ordered)


# %%
# Training with L-BFGS.

start = np.concatenate(
    [
        rng.standard_normal(s).ravel() * np.sqrt(2 / sum(s)) if len(s) == 2 else np.zeros(s)
        for s in SHAPES
    ]
)
began = time.perf_counter()
found = minimize(
    loss_and_gradient, start, jac=True, method="L-BFGS-B",
    options={"maxiter": 650, "maxfun": 750, "maxcor": 30, "gtol": 1e-9, "ftol": 0},
)  # fmt: skip
took = time.perf_counter() - began
print(f"{found.nfev} gradients in {took:.0f} s; loss {found.fun:.1e}")

# %%
# The exact solution by Cole and Hopf, as integrals by Gauss-Hermite quadrature.


def exact(x, t):
    nodes, weights = np.polynomial.hermite.hermgauss(120)
    eta = x[:, None] - np.sqrt(4 * NU * t) * nodes
    kernel = weights * np.exp(-np.cos(np.pi * eta) / (2 * np.pi * NU))
    return -(np.sin(np.pi * eta) * kernel).sum(axis=1) / kernel.sum(axis=1)


x = np.linspace(-1, 1, 201)
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
errors = []
for axis, t in zip(axes, (0.25, 0.5, 1.0), strict=True):
    points = np.stack([x, np.full_like(x, t)], axis=1)
    made = nf.mlp_jet(points, *layers(found.x), "tanh", **NONE).u[:, 0]
    errors.append(np.linalg.norm(made - exact(x, t)) / np.linalg.norm(exact(x, t)))
    axis.plot(x, exact(x, t), "k", lw=3, alpha=0.3, label="Cole-Hopf")
    axis.plot(x, made, "C1--", label="network")
    axis.set_title(f"t = {t}, off by {errors[-1]:.1e}")
    axis.set_xlabel("x")
axes[0].set_ylabel("u(x, t)")
axes[0].legend()
print("relative errors:", ", ".join(f"{e:.1e}" for e in errors))
assert max(errors) < 0.02

# %%
# The same gradient as users of PyTorch and of JAX write it, by turns: of the residual alone.

ways = {}


def ours(theta):
    weights, biases = layers(theta)
    found, kept = nf.mlp_jet(inside, weights, biases, "tanh", second=SECOND, keep=True)
    u, (u_x, u_t), (u_xx,) = found
    g = 2 / len(u) * (u_t + u * u_x - NU * u_xx)
    grads = g * u_x, np.stack([g * u, g]), -NU * g[None]
    return nf.mlp_jet_bwd(*grads, inside, weights, biases, "tanh", second=SECOND, kept=kept)[1][0]


ways["numfuse"] = ours
try:
    import torch

    points = torch.from_numpy(inside)

    def with_torch(theta):
        weights, biases = ([torch.from_numpy(y).requires_grad_() for y in g] for g in layers(theta))
        p = points.clone().requires_grad_()
        h = p
        for w, b in zip(weights[:-1], biases[:-1], strict=True):
            h = torch.tanh(torch.addmm(b, h, w))
        u = torch.addmm(biases[-1], h, weights[-1])
        (first,) = torch.autograd.grad(u.sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), p, create_graph=True)
        r = first[:, 1] + u[:, 0] * first[:, 0] - NU * second[:, 0]
        return torch.autograd.grad((r**2).mean(), [*weights, *biases])[0].numpy()

    def with_torch_and_numfuse(theta):
        weights, biases = ([torch.from_numpy(y).requires_grad_() for y in g] for g in layers(theta))
        u, (u_x, u_t), (u_xx,) = nf.mlp_jet(points, weights, biases, "tanh", second=SECOND)
        r = u_t + u * u_x - NU * u_xx
        return torch.autograd.grad((r**2).mean(), [*weights, *biases])[0].numpy()

    ways["numfuse, from PyTorch"] = with_torch_and_numfuse
    ways["PyTorch, grad of grad"] = with_torch
except ImportError:
    print("PyTorch is not installed")
try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def residual(parameters, p):
        def u(p):
            for w, b in zip(*(g[:-1] for g in parameters), strict=True):
                p = jnp.tanh(p @ w + b)
            return p @ parameters[0][-1] + parameters[1][-1]

        e_x, e_t = (jnp.broadcast_to(e, p.shape) for e in jnp.eye(2))
        u_t = jax.jvp(u, (p,), (e_t,))[1]
        (v, u_x), (_, u_xx) = jax.jvp(lambda p: jax.jvp(u, (p,), (e_x,)), (p,), (e_x,))
        return jnp.mean((u_t + v * u_x - NU * u_xx) ** 2)

    compiled = jax.jit(jax.grad(residual))
    ways["JAX, jit of jvp of jvp"] = lambda theta: np.asarray(compiled(layers(theta), inside)[0][0])
except ImportError:
    print("JAX is not installed")

times = {name: [] for name in ways}
for run in ways.values():
    np.testing.assert_allclose(run(found.x), ours(found.x), rtol=1e-6, atol=1e-9)
for _ in range(9):
    for name, run in ways.items():
        at = time.perf_counter()
        run(found.x)
        times[name].append(time.perf_counter() - at)
for name, spent in times.items():
    print(f"{name:24} {1e3 * statistics.median(spent):6.1f} ms a gradient")

plt.show()
