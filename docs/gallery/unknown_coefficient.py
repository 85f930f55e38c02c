"""
An inverse problem: unknown coefficients
========================================

``u_t + c u_x = kappa u_xx``: a drop is carried along and spreads. It was measured at some places
and times, with noise; the speed c and the diffusivity kappa are to be found. A network u(x, t) is
fitted to the measurements while the equation holds for it, and the two coefficients are parameters
of the loss as the weights are.

The loss is written over `autograd.numpy`, and `mlp_jet` is one operation in it: HIPS autograd
differentiates the rest.
"""

import itertools
import statistics
import time

import autograd
import autograd.numpy as anp
import matplotlib.pyplot as plt
import numpy as np
from autograd.misc.flatten import flatten
from scipy.optimize import minimize

import numfuse as nf

SPEED, KAPPA, NOISE = 0.7, 0.05, 0.02
rng = np.random.default_rng(3)


def exact(p):
    x, t = p[:, :1] - SPEED * p[:, 1:], p[:, 1:]
    wide = 0.1 + 4 * KAPPA * t
    return np.sqrt(0.1 / wide) * np.exp(-(x**2) / wide)


measured = rng.uniform((-1, 0), (2, 1), (300, 2))
values = exact(measured) + NOISE * rng.standard_normal((300, 1))
inside = rng.uniform((-1, 0), (2, 1), (2000, 2))

# %%
# `second` leaves u_tt out. The coefficients begin at wrong values. kappa is positive, so its
# logarithm is the parameter.

SECOND = [[1.0, 0.0]]
SIZES = (2, 32, 32, 32, 1)
weights = [rng.standard_normal(pair) / np.sqrt(pair[0]) for pair in itertools.pairwise(SIZES)]
biases = [np.zeros(n) for n in SIZES[1:]]
begin, unflatten = flatten((weights, biases, np.array([0.0, np.log(0.5)])))


def loss(theta):
    weights, biases, coefficients = unflatten(theta)
    speed, kappa = coefficients[0], anp.exp(coefficients[1])
    _, (u_x, u_t), (u_xx,) = nf.mlp_jet(inside, weights, biases, "tanh", second=SECOND)
    residual = u_t + speed * u_x - kappa * u_xx
    off = network(weights, biases, measured) - values
    return anp.mean(residual**2) + 10 * anp.mean(off**2)


def network(weights, biases, points):
    h = points
    for w, b in zip(weights[:-1], biases[:-1], strict=True):
        h = nf.matmul_bias_activation(h, w, b, "tanh")
    return nf.matmul_bias_activation(h, weights[-1], biases[-1])


gradient = autograd.value_and_grad(loss)
history = []


def followed(theta):
    speed, logarithm = theta[-2:]
    history.append((speed, np.exp(logarithm)))
    return gradient(theta)


began = time.perf_counter()
found = minimize(
    followed, begin, jac=True, method="L-BFGS-B",
    options={"maxiter": 350, "maxfun": 450, "maxcor": 30, "gtol": 1e-9, "ftol": 0},
)  # fmt: skip
took = time.perf_counter() - began
speed, kappa = history[-1]
print(f"{found.nfev} gradients in {took:.0f} s; loss {found.fun:.1e}")
print(f"speed {speed:.3f} (it is {SPEED}), diffusivity {kappa:.4f} (it is {KAPPA})")
assert abs(speed / SPEED - 1) < 0.05
assert abs(kappa / KAPPA - 1) < 0.1

# %%
# The solution between the measurements, and the way to the coefficients.

x = np.linspace(-1, 2, 200)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
solved = unflatten(found.x)
errors = []
for i, t in enumerate((0.0, 0.5, 1.0)):
    points = np.stack([x, np.full_like(x, t)], axis=1)
    made = network(*solved[:2], points)
    errors.append(np.linalg.norm(made - exact(points)) / np.linalg.norm(exact(points)))
    left.plot(x, exact(points), "k", lw=3, alpha=0.2, label=None if i else "exact")
    left.plot(x, made, f"C{i}--", label=f"network, t = {t}")
near = np.abs(measured[:, 1] - 0.5) < 0.04
left.plot(measured[near, 0], values[near, 0], "C1.", label="measured near t = 0.5")
left.set(xlabel="x", ylabel="u")
left.legend(fontsize=8)
track = np.array(history)
for i, (name, true) in enumerate((("speed", SPEED), ("diffusivity", KAPPA))):
    right.semilogy(np.abs(track[:, i] / true - 1) + 1e-6, label=name)
right.set(xlabel="gradients", title="relative error of the coefficients")
right.legend()
print("relative errors of u:", ", ".join(f"{e:.1e}" for e in errors))
assert max(errors) < 0.1

# %%
# The gradient of the same loss as users of PyTorch and of JAX write it, by turns.

ways = {"numfuse in autograd": autograd.grad(loss)}
try:
    import torch

    there, seen, at = (torch.from_numpy(z) for z in (inside, values, measured))

    def with_torch(theta):
        parts = [torch.from_numpy(np.array(z)) for g in unflatten(theta)[:2] for z in g]
        parts.append(torch.from_numpy(np.array(theta[-2:])))
        for z in parts:
            z.requires_grad_()
        *rest, coefficients = parts
        count = len(rest) // 2

        def u(p):
            for w, b in zip(rest[: count - 1], rest[count:-1], strict=True):
                p = torch.tanh(torch.addmm(b, p, w))
            return torch.addmm(rest[-1], p, rest[count - 1])

        p = there.clone().requires_grad_()
        (first,) = torch.autograd.grad(u(p).sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), p, create_graph=True)
        r = first[:, 1] + coefficients[0] * first[:, 0] - coefficients[1].exp() * second[:, 0]
        total = (r**2).mean() + 10 * ((u(at) - seen) ** 2).mean()
        return np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(total, parts)])

    ways["PyTorch, grad of grad"] = with_torch
except ImportError:
    print("PyTorch is not installed")
try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def jax_loss(parts):
        weights, biases, coefficients = parts

        def u(p):
            for w, b in zip(weights[:-1], biases[:-1], strict=True):
                p = jnp.tanh(p @ w + b)
            return p @ weights[-1] + biases[-1]

        e_x, e_t = (jnp.broadcast_to(e, inside.shape) for e in jnp.eye(2))
        u_t = jax.jvp(u, (inside,), (e_t,))[1]
        u_x, u_xx = jax.jvp(lambda p: jax.jvp(u, (p,), (e_x,))[1], (inside,), (e_x,))
        r = u_t + coefficients[0] * u_x - jnp.exp(coefficients[1]) * u_xx
        return jnp.mean(r**2) + 10 * jnp.mean((u(measured) - values) ** 2)

    compiled = jax.jit(jax.grad(jax_loss))
    ways["JAX, jit of jvp of jvp"] = lambda theta: flatten(
        jax.tree.map(np.asarray, compiled(unflatten(theta)))
    )[0]
except ImportError:
    print("JAX is not installed")

times = {name: [] for name in ways}
for run in ways.values():
    np.testing.assert_allclose(run(found.x), gradient(found.x)[1], rtol=1e-6, atol=1e-8)
for _ in range(9):
    for name, run in ways.items():
        at_time = time.perf_counter()
        run(found.x)
        times[name].append(time.perf_counter() - at_time)
for name, spent in times.items():
    print(f"{name:24} {1e3 * statistics.median(spent):6.1f} ms a gradient")

plt.show()
