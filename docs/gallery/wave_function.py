"""
The local energy of a wave function
===================================

A chain of 24 oscillators, each coupled to the next one, has the ground state energy half the sum of
its frequencies. Here a network finds it: ``psi(x) = exp(n(x) - a |x|^2 / 2)`` with a network n of
24 inputs. The local energy ``-(Laplacian log psi + |grad log psi|^2) / 2 + V(x)`` of an eigenstate
is the same everywhere, so its variance over random points is the loss. It holds a Laplacian in 24
dimensions, and its gradient by the weights holds third derivatives.
"""

import itertools
import statistics
import time

import matplotlib.pyplot as plt
import numpy as np

import numfuse as nf
from numfuse import expr as ex

D, COUPLING, SIZES = 24, 1.0, (24, 48, 48, 1)
rng = np.random.default_rng(0)
stiffness = np.eye(D) * (1 + 2 * COUPLING)
stiffness -= COUPLING * (np.eye(D, k=1) + np.eye(D, k=-1))
frequencies = np.sqrt(np.linalg.eigvalsh(stiffness))
EXACT, A = frequencies.sum() / 2, frequencies.mean()
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def layers(theta):
    """Return weights and biases as views of one vector."""
    parts = [theta[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(SHAPES, ENDS, strict=True)]
    return parts[::2], parts[1::2]


def drawn(count):
    return rng.standard_normal((count, D)) * np.sqrt(0.5 / A)


# %%
# The directions are the 24 unit vectors, as nothing else is said. One row of ones is the Laplacian:
# the network is run once, with 1 + 24 + 1 numbers for each unit and point. The loss does not depend
# on n itself, so its cotangent is None.

LAPLACIAN = np.ones((1, D))


def local_energies(x, n_dot, laplacian):
    slopes = n_dot[..., 0] - A * x.T
    potential = np.einsum("mi,ij,mj->m", x, stiffness, x) / 2
    return slopes, -(laplacian[:, 0] - A * D + (slopes**2).sum(axis=0)) / 2 + potential


def variance_and_gradient(theta, x):
    weights, biases = layers(theta)
    found, kept = nf.mlp_jet(x, weights, biases, "silu", second=LAPLACIAN, keep=True)
    slopes, energies = local_energies(x, found.u_dot, found.u_ddot[0])
    off = energies - energies.mean()
    g = 2 * off / len(x)
    grads = None, -(g * slopes)[..., None], -0.5 * g[None, :, None]
    made = nf.mlp_jet_bwd(*grads, x, weights, biases, "silu", second=LAPLACIAN, kept=kept)
    pairs = zip(made.d_weights, made.d_biases, strict=True)
    return np.mean(off**2), np.concatenate([d.ravel() for pair in pairs for d in pair])


# %%
# Is the Laplacian the Laplacian? Each input takes a small step, forwards and backwards.

start = np.concatenate(
    [rng.standard_normal(s).ravel() / np.sqrt(s[0]) if len(s) == 2 else np.zeros(s) for s in SHAPES]
)
start[ENDS[-3] : ENDS[-2]] /= 10
NONE = {"directions": np.zeros((0, D)), "second": np.zeros((0, 0))}  # the value alone
x, step = drawn(3), 1e-4 * np.eye(D)
near = (x[:, None, None] + np.stack([step, -step])).reshape(-1, D)
values = nf.mlp_jet(near, *layers(start), "silu", **NONE).u.reshape(3, 2, D)
centre = nf.mlp_jet(x, *layers(start), "silu", second=LAPLACIAN)
by_steps = (values.sum(axis=1) - 2 * centre.u).sum(axis=1) / 1e-8
print("by steps:", by_steps, " by mlp_jet:", centre.u_ddot[0, :, 0])
np.testing.assert_allclose(centre.u_ddot[0, :, 0], by_steps, atol=1e-5)

# %%
# Training by Adam, on new points in every step.


def adam(p, g, mean, square, rate):
    mean = 0.9 * mean + 0.1 * g
    square = 0.99 * square + 0.01 * g * g
    return p - rate * mean / (ex.sqrt(square) + 1e-8), mean, square


theta = start.copy()
mean, square = np.zeros_like(theta), np.zeros_like(theta)
STEPS, variances = 500, []
began = time.perf_counter()
for i in range(STEPS):
    variance, gradient = variance_and_gradient(theta, drawn(400))
    rate = 4e-3 * (1 - i / STEPS) * min(1, (i + 1) / 20)
    nf.elementwise(adam, theta, gradient, mean, square, rate, out=(theta, mean, square))
    variances.append(variance)
took = time.perf_counter() - began
print(f"{STEPS} steps in {took:.0f} s; variance {variances[0]:.2f} at first, {variances[-1]:.4f}")

x = drawn(4000)
found = nf.mlp_jet(x, *layers(theta), "silu", second=LAPLACIAN)
_, energies = local_energies(x, found.u_dot, found.u_ddot[0])
_, without = local_energies(x, 0 * found.u_dot, 0 * found.u_ddot[0])
print(f"energy {energies.mean():.4f}, exact {EXACT:.4f}, off by {energies.mean() / EXACT - 1:.1e}")
assert abs(energies.mean() / EXACT - 1) < 0.01

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
left.semilogy(variances)
left.set(xlabel="steps", ylabel="variance of the local energy")
bins = np.linspace(EXACT - 6, EXACT + 6, 121)
right.hist(without, bins, alpha=0.4, label="without the network")
right.hist(energies, bins, alpha=0.7, label="with it")
right.axvline(EXACT, color="k", ls=":", label="exact")
right.set(xlabel="local energy", ylabel="points", yscale="log")
right.legend(loc="upper left", fontsize=8)

# %%
# The same gradient as users of PyTorch and of JAX write it, by turns.

x = drawn(400)
ways = {"numfuse": lambda theta: variance_and_gradient(theta, x)[1]}
try:
    import torch

    matrix = torch.from_numpy(stiffness)

    def with_torch(theta):
        theta = torch.from_numpy(theta).requires_grad_()
        weights, biases = layers(theta)
        p = torch.from_numpy(x).requires_grad_()
        z = p
        for w, b in zip(weights[:-1], biases[:-1], strict=True):
            z = torch.nn.functional.silu(torch.addmm(b, z, w))
        n = torch.addmm(biases[-1], z, weights[-1])
        (slope,) = torch.autograd.grad(n.sum(), p, create_graph=True)
        laplacian = 0
        for i in range(D):
            (row,) = torch.autograd.grad(slope[:, i].sum(), p, create_graph=True)
            laplacian = laplacian + row[:, i]
        slope = slope - A * p
        energies = -(laplacian - A * D + (slope**2).sum(1)) / 2 + ((p @ matrix) * p).sum(1) / 2
        return torch.autograd.grad(energies.var(correction=0), theta)[0].numpy()

    ways["PyTorch, grad of grad"] = with_torch
except ImportError:
    print("PyTorch is not installed")
try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def jax_variance(theta):
        weights, biases = layers(theta)

        def log_psi(p):
            z = p
            for w, b in zip(weights[:-1], biases[:-1], strict=True):
                z = jax.nn.silu(z @ w + b)
            return (z @ weights[-1] + biases[-1])[0] - A * p @ p / 2

        def energy(p):
            slope, push = jax.linearize(jax.grad(log_psi), p)
            laplacian = jnp.trace(jax.vmap(push)(jnp.eye(D)))
            return -(laplacian + slope @ slope) / 2 + p @ stiffness @ p / 2

        return jnp.var(jax.vmap(energy)(x))

    compiled = jax.jit(jax.grad(jax_variance))
    ways["JAX, jit of grad"] = lambda theta: np.asarray(compiled(theta))
except ImportError:
    print("JAX is not installed")

times = {name: [] for name in ways}
for run in ways.values():
    np.testing.assert_allclose(run(theta), ways["numfuse"](theta), rtol=1e-6, atol=1e-7)
for _ in range(5):
    for name, run in ways.items():
        at = time.perf_counter()
        run(theta)
        times[name].append(time.perf_counter() - at)
for name, spent in times.items():
    print(f"{name:24} {1e3 * statistics.median(spent):6.1f} ms a gradient")

plt.show()
