"""
A physics-informed network for the Burgers equation
===================================================

``u_t + u u_x = nu u_xx`` on -1 < x < 1 with ``u(0, x) = -sin(pi x)``: a network u(x, t) is
trained so that the equation holds at points of the domain. The loss holds second derivatives of the
network, so its gradient by the weights holds third ones: numfuse's double backward is itself
differentiated, and the table of activations has third derivatives. The exact solution is that of
Cole and Hopf.
"""

import itertools
import statistics
import time

import autograd
import autograd.numpy as anp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize

import numfuse as nf

NU, WIDTH, DEPTH = 0.1 / np.pi, 20, 3
rng = np.random.default_rng(0)
SIZES = (2, *(WIDTH,) * DEPTH, 1)
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def network(theta, points, layer=nf.matmul_bias_activation):
    parts = [
        anp.reshape(theta[end - int(np.prod(s)) : end], s)
        for s, end in zip(SHAPES, ENDS, strict=True)
    ]
    h = points
    for w, b in zip(parts[:-2:2], parts[1:-2:2], strict=True):
        h = layer(h, w, b, "tanh")
    return layer(h, parts[-2], parts[-1], "none")


# %%
# The residual of the equation. `elementwise_grad` is the gradient of the sum, which for a network
# that treats its rows alone is the derivative of every row.


def residual(theta, points):
    du = autograd.elementwise_grad(network, 1)
    d2u = autograd.elementwise_grad(lambda theta, p: du(theta, p)[:, 0], 1)
    u, first, second = network(theta, points), du(theta, points), d2u(theta, points)
    return first[:, 1] + u[:, 0] * first[:, 0] - NU * second[:, 0]


inside = rng.uniform((-1, 0), (1, 1), (1000, 2))
begin = np.stack([np.linspace(-1, 1, 101), np.zeros(101)], axis=1)
walls = np.stack([np.repeat([-1.0, 1.0], 40), np.tile(np.linspace(0, 1, 40), 2)], axis=1)
edge = np.concatenate([begin, walls])
on_edge = np.concatenate([-np.sin(np.pi * begin[:, :1]), np.zeros((len(walls), 1))])


def loss(theta):
    return anp.mean(residual(theta, inside) ** 2) + 10 * anp.mean(
        (network(theta, edge) - on_edge) ** 2
    )


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
    autograd.value_and_grad(loss), start, jac=True, method="L-BFGS-B",
    options={"maxiter": 350, "maxfun": 420, "maxcor": 30, "gtol": 1e-9, "ftol": 0},
)  # fmt: skip
took = time.perf_counter() - began
print(f"{found.nfev} gradients in {took:.0f} s; loss {found.fun:.1e}")

# %%
# The exact solution by Cole and Hopf, as integrals by Gauss-Hermite quadrature.


def exact(x, t):
    if t == 0:
        return -np.sin(np.pi * x)
    nodes, weights = np.polynomial.hermite.hermgauss(120)
    eta = x[:, None] - np.sqrt(4 * NU * t) * nodes
    kernel = weights * np.exp(-np.cos(np.pi * eta) / (2 * np.pi * NU))
    return -(np.sin(np.pi * eta) * kernel).sum(axis=1) / kernel.sum(axis=1)


x = np.linspace(-1, 1, 201)
figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
errors = []
for axis, t in zip(axes, (0.25, 0.5, 1.0), strict=True):
    made = network(found.x, np.stack([x, np.full_like(x, t)], axis=1))[:, 0]
    errors.append(np.linalg.norm(made - exact(x, t)) / np.linalg.norm(exact(x, t)))
    axis.plot(x, exact(x, t), "k", lw=3, alpha=0.3, label="Cole-Hopf")
    axis.plot(x, made, "C1--", label="network")
    axis.set_title(f"t = {t}, off by {errors[-1]:.1%}")
    axis.set_xlabel("x")
axes[0].set_ylabel("u(x, t)")
axes[0].legend()
figure.tight_layout()
print("relative errors:", ", ".join(f"{e:.2%}" for e in errors))
assert max(errors) < 0.1

# %%
# The same gradient in PyTorch, by turns.

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    torch.set_num_threads(1)  # its fastest for work of this size
    points, border, values = (torch.from_numpy(z) for z in (inside, edge, on_edge))

    def torch_gradient(theta):
        theta = torch.from_numpy(theta).requires_grad_()
        parts = [
            theta[end - int(np.prod(s)) : end].reshape(s)
            for s, end in zip(SHAPES, ENDS, strict=True)
        ]

        def u(p):
            for w, b in zip(parts[:-2:2], parts[1:-2:2], strict=True):
                p = torch.tanh(torch.addmm(b, p, w))
            return torch.addmm(parts[-1], p, parts[-2])

        p = points.clone().requires_grad_()
        value = u(p)
        (first,) = torch.autograd.grad(value.sum(), p, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), p, create_graph=True)
        r = first[:, 1] + value[:, 0] * first[:, 0] - NU * second[:, 0]
        total = (r**2).mean() + 10 * ((u(border) - values) ** 2).mean()
        return torch.autograd.grad(total, theta)[0].numpy()

    ours = autograd.grad(loss)
    np.testing.assert_allclose(torch_gradient(found.x), ours(found.x), rtol=1e-6, atol=1e-9)
    times = {"numfuse and autograd": [], "torch": []}
    for _ in range(30):
        for name, run in zip(times, (ours, torch_gradient), strict=True):
            begin_time = time.perf_counter()
            run(found.x)
            times[name].append(time.perf_counter() - begin_time)
    for name, spent in times.items():
        print(f"a gradient by {name}: {1e3 * statistics.median(spent):.1f} ms")

plt.show()
