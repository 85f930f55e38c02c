"""
The Helmholtz equation by a network
===================================

``u_xx + u_yy + k^2 u = q`` on the square -1 < x, y < 1 with ``u = 0`` on its edge, and a source q
of which the solution is known: ``sin(pi x) sin(2 pi y)``. The loss holds the Laplacian of the
network, and nothing else of the second order: one row of `second` asks for that sum.
"""

import itertools
import statistics
import time

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize

import numfuse as nf

K, SIZES = 2.0, (2, 32, 32, 32, 1)
rng = np.random.default_rng(1)
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def layers(theta):
    """Return weights and biases as views of one vector."""
    parts = [theta[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(SHAPES, ENDS, strict=True)]
    return parts[::2], parts[1::2]


def exact(p):
    return np.sin(np.pi * p[:, :1]) * np.sin(2 * np.pi * p[:, 1:])


# %%
# On the edge the solution is zero. A factor ``h = (1 - x^2) (1 - y^2)`` makes it so without a term
# in the loss: ``u = h v`` with a network v, and by the product rule
# ``Laplacian u = h Laplacian v + 2 grad h . grad v + v Laplacian h``.

points = rng.uniform(-1, 1, (1500, 2))
x, y = points[:, :1], points[:, 1:]
h = (1 - x**2) * (1 - y**2)
h_x, h_y = -2 * x * (1 - y**2), -2 * y * (1 - x**2)
bend = -2 * (1 - y**2) - 2 * (1 - x**2)
source = (K**2 - 5 * np.pi**2) * exact(points)
LAPLACIAN = np.ones((1, 2))

# %%
# The residual is linear in what `mlp_jet` returns, so the arrays that multiply the value, the
# slopes and the Laplacian are also what the gradient is weighted with.


def loss_and_gradient(theta):
    weights, biases = layers(theta)
    found, kept = nf.mlp_jet(points, weights, biases, "tanh", second=LAPLACIAN, keep=True)
    v, (v_x, v_y), (laplacian,) = found
    r = h * laplacian + 2 * (h_x * v_x + h_y * v_y) + (bend + K**2 * h) * v - source
    g = 2 * r / len(r)
    grads = (bend + K**2 * h) * g, np.stack([2 * h_x * g, 2 * h_y * g]), (h * g)[None]
    made = nf.mlp_jet_bwd(*grads, points, weights, biases, "tanh", second=LAPLACIAN, kept=kept)
    pairs = zip(made.d_weights, made.d_biases, strict=True)
    return np.mean(r**2), np.concatenate([d.ravel() for pair in pairs for d in pair])


start = np.concatenate(
    [
        rng.standard_normal(s).ravel() * np.sqrt(2 / sum(s)) if len(s) == 2 else np.zeros(s)
        for s in SHAPES
    ]
)
began = time.perf_counter()
found = minimize(
    loss_and_gradient, start, jac=True, method="L-BFGS-B",
    options={"maxiter": 600, "maxfun": 700, "maxcor": 30, "gtol": 1e-9, "ftol": 0},
)  # fmt: skip
took = time.perf_counter() - began
print(f"{found.nfev} gradients in {took:.0f} s; loss {found.fun:.1e}")

# %%
# Beside the exact solution, on a grid.

line = np.linspace(-1, 1, 81)
grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
edge = np.prod(1 - grid**2, axis=1, keepdims=True)
NONE = {"directions": np.zeros((0, 2)), "second": np.zeros((0, 0))}  # the value alone
made = edge * nf.mlp_jet(grid, *layers(found.x), "tanh", **NONE).u
error = np.linalg.norm(made - exact(grid)) / np.linalg.norm(exact(grid))
print(f"relative error {error:.1e}")
assert error < 0.01

figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
titles = "network", f"its error ({error:.1e} of the solution)"
for axis, values, title in zip(axes, (made, made - exact(grid)), titles, strict=True):
    largest = np.abs(values).max()
    image = axis.imshow(
        values.reshape(81, 81), extent=(-1, 1, -1, 1), origin="lower", cmap="RdBu",
        vmin=-largest, vmax=largest,
    )  # fmt: skip
    axis.set(title=title, xlabel="x", ylabel="y")
    figure.colorbar(image, ax=axis, shrink=0.9)

# %%
# The same gradient as users of PyTorch and of JAX write it, by turns.

ways = {"numfuse": lambda theta: loss_and_gradient(theta)[1]}
try:
    import torch

    q, factors = torch.from_numpy(source), [torch.from_numpy(z) for z in (h, h_x, h_y, bend)]

    def with_torch(theta):
        theta = torch.from_numpy(theta).requires_grad_()
        weights, biases = layers(theta)
        p = torch.from_numpy(points).requires_grad_()
        z = p
        for w, b in zip(weights[:-1], biases[:-1], strict=True):
            z = torch.tanh(torch.addmm(b, z, w))
        v = torch.addmm(biases[-1], z, weights[-1])
        (slope,) = torch.autograd.grad(v.sum(), p, create_graph=True)
        laplacian = 0
        for i in range(2):
            (row,) = torch.autograd.grad(slope[:, i].sum(), p, create_graph=True)
            laplacian = laplacian + row[:, i : i + 1]
        a, a_x, a_y, a_bend = factors
        along = a_x * slope[:, :1] + a_y * slope[:, 1:]
        r = a * laplacian + 2 * along + (a_bend + K**2 * a) * v - q
        return torch.autograd.grad((r**2).mean(), theta)[0].numpy()

    ways["PyTorch, grad of grad"] = with_torch
except ImportError:
    print("PyTorch is not installed")
try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def mean_square(theta):
        weights, biases = layers(theta)

        def v(p):
            for w, b in zip(weights[:-1], biases[:-1], strict=True):
                p = jnp.tanh(p @ w + b)
            return (p @ weights[-1] + biases[-1])[0]

        def residual(p, a, a_x, a_y, a_bend, q):
            slope, laplacian = jax.grad(v)(p), jnp.trace(jax.hessian(v)(p))
            along = a_x * slope[0] + a_y * slope[1]
            return a * laplacian + 2 * along + (a_bend + K**2 * a) * v(p) - q

        columns = (z[:, 0] for z in (h, h_x, h_y, bend, source))
        return jnp.mean(jax.vmap(residual)(points, *columns) ** 2)

    compiled = jax.jit(jax.grad(mean_square))
    ways["JAX, jit of hessian"] = lambda theta: np.asarray(compiled(theta))
except ImportError:
    print("JAX is not installed")

times = {name: [] for name in ways}
for run in ways.values():
    np.testing.assert_allclose(run(found.x), ways["numfuse"](found.x), rtol=1e-6, atol=1e-9)
for _ in range(9):
    for name, run in ways.items():
        at = time.perf_counter()
        run(found.x)
        times[name].append(time.perf_counter() - at)
for name, spent in times.items():
    print(f"{name:24} {1e3 * statistics.median(spent):6.1f} ms a gradient")

plt.show()
