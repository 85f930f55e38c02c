"""
Where a physics-informed network needs float64
==============================================

The Helmholtz equation ``u_xx + u_yy + k^2 u = q`` with k = 6, two wavelengths across the square
-1 < x, y < 1, with ``u = 0`` on its edge and a source q whose solution is known. The same program
trains the same network in float32 and in float64. In float32 it stops at an error of about 1e-5, as
no step makes the loss smaller any more; float64 goes on to 1e-7, and takes no longer for a step.
"""

import itertools
import statistics
import sys
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import blas
from scipy.optimize import line_search
from threadpoolctl import threadpool_limits

import numfuse as nf

K, SIZES = 6.0, (2, 20, 20, 1)
STEPS = int(sys.argv[1]) if sys.argv[1:] else 3000
PI, PRECISIONS = np.pi, (np.float32, np.float64)
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def layers(theta):
    """Return weights and biases as views of one vector."""
    parts = [theta[e - int(np.prod(s)) : e].reshape(s) for s, e in zip(SHAPES, ENDS, strict=True)]
    return parts[::2], parts[1::2]


def exact(p):
    return np.cos(PI * p[:, :1] / 2) * np.cos(PI * p[:, 1:] / 2) * (1 + np.sin(PI * p[:, :1]) / 2)


def source(p):
    """The equation's left side at the exact solution, a sum of three products of waves."""
    x, low, high = p[:, :1], K**2 - PI**2 / 2, K**2 - 2.5 * PI**2
    across = low * (np.cos(PI * x / 2) + np.sin(PI * x / 2) / 4) + high * np.sin(1.5 * PI * x) / 4
    return across * np.cos(PI * p[:, 1:] / 2)


# %%
# As in `the example with k = 2 <helmholtz.html>`_, ``u = h v`` with ``h = (1 - x^2) (1 - y^2)`` and
# a network v has the right values on the edge, and the residual of the equation is linear in v, its
# slopes and its Laplacian.

nodes = np.polynomial.legendre.leggauss(20)[0]
points = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
x, y = points[:, :1], points[:, 1:]
h = (1 - x**2) * (1 - y**2)
h_x, h_y = -2 * x * (1 - y**2), -2 * y * (1 - x**2)
of_value = -2 * (1 - y**2) - 2 * (1 - x**2) + K**2 * h
GIVEN = points, h, 2 * h_x, 2 * h_y, of_value, source(points)
LAPLACIAN = np.ones((1, 2))


def loss_in(dtype):
    """Return the loss and its gradient, whose network and derivatives are of this dtype."""
    p, of_laplacian, of_x, of_y, of_value, q = (z.astype(dtype) for z in GIVEN)

    def loss(theta):
        weights, biases = layers(theta.astype(dtype))
        found, kept = nf.mlp_jet(p, weights, biases, "tanh", second=LAPLACIAN, keep=True)
        v, (v_x, v_y), (laplacian,) = found
        r = of_laplacian * laplacian + of_x * v_x + of_y * v_y + of_value * v - q
        g = r * dtype(2 / len(r))
        grads = of_value * g, np.stack([of_x * g, of_y * g]), (of_laplacian * g)[None]
        made = nf.mlp_jet_bwd(*grads, p, weights, biases, "tanh", second=LAPLACIAN, kept=kept)
        pairs = zip(made.d_weights, made.d_biases, strict=True)
        # The mean and all that the optimiser keeps are float64 in both cases.
        gradient = np.concatenate([d.ravel() for pair in pairs for d in pair]).astype(float)
        return np.mean(r**2, dtype=float), gradient

    return loss


# %%
# The optimiser is BFGS with the inverse Hessian scaled by Oren and Luenberger's factor in each
# step, which a loss of this kind needs: its curvatures are many powers of ten apart. SciPy searches
# along a line, and BLAS keeps one triangle of the matrix. A search that fails is tried once more
# along the gradient itself. Where that fails too, the digits are used up. BLAS has one thread: for
# a matrix of 500 rows a second one gains nothing, and waits in the way of other programs.


threadpool_limits(1, user_api="blas")


def steps(loss, theta):
    """Yield the parameters of each step, and the number of gradients so far."""
    values, count = {}, 0

    def at(theta):
        nonlocal count
        key = theta.tobytes()
        if key not in values:
            values[key], count = loss(theta), count + 1
        return values[key]

    inverse, fresh = np.eye(len(theta), order="F"), True
    while True:
        value, gradient = at(theta)
        values = {theta.tobytes(): (value, gradient)}
        direction = -blas.dsymv(1.0, inverse, gradient, lower=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a search failed: it is looked at
            length = line_search(
                lambda z: at(z)[0], lambda z: at(z)[1],
                theta, direction, gradient, value, maxiter=20,
            )[0]  # fmt: skip
        if length is None:
            if fresh:
                return
            inverse, fresh = np.eye(len(theta), order="F"), True
            continue
        step = length * direction
        theta, fresh = theta + step, False
        turn = at(theta)[1] - gradient
        curved = step @ turn
        factor = min(1.0, curved / (-length * (step @ gradient)))
        through = blas.dsymv(1.0, inverse, turn, lower=1)
        both = through / curved - (turn @ through) / (2 * curved**2) * step
        inverse = blas.dsyr2(-1.0, both, step, a=inverse, lower=1, overwrite_a=1)
        inverse /= factor
        inverse = blas.dsyr(1 / curved, step, a=inverse, lower=1, overwrite_a=1)
        yield theta, count


# %%
# Both begin at the same weights, take turns step by step, and each has its own clock.

rng = np.random.default_rng(1)
start = np.concatenate(
    [
        rng.standard_normal(s).ravel() * np.sqrt(2 / sum(s)) if len(s) == 2 else np.zeros(s)
        for s in SHAPES
    ]
)
losses = {dtype: loss_in(dtype) for dtype in PRECISIONS}
tracks = {dtype: [(0.0, start, 0)] for dtype in PRECISIONS}
running = {dtype: steps(loss, start) for dtype, loss in losses.items()}
for loss in losses.values():
    loss(start)  # compiles the kernels, or loads them from the disk
for _ in range(STEPS):
    for dtype, run in list(running.items()):
        began = time.perf_counter()
        done = next(run, None)
        if done is None:
            del running[dtype]
        else:
            spent = tracks[dtype][-1][0] + time.perf_counter() - began
            tracks[dtype].append((spent, *done))

# %%
# Errors are those of u on a grid, computed in float64: they say how far the training came, not how
# a value is rounded.

line = np.linspace(-1, 1, 41)
grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
NONE = {"directions": np.zeros((0, 2)), "second": np.zeros((0, 0))}  # the value alone


def solution(theta, dtype):
    held = layers(theta.astype(dtype).astype(float))
    edge = np.prod(1 - grid**2, axis=1, keepdims=True)
    return edge * nf.mlp_jet(grid, *held, "tanh", **NONE).u


curves = {}
for dtype, track in tracks.items():
    every = sorted({*range(0, len(track), 20), len(track) - 1})
    off = [solution(track[i][1], dtype) - exact(grid) for i in every]
    errors = np.linalg.norm(off, axis=(1, 2)) / np.linalg.norm(exact(grid))
    curves[dtype.__name__] = np.array(every), np.array([track[i][0] for i in every]), errors
    seconds, theta, count = track[-1]
    print(f"{dtype.__name__}: {len(track) - 1} steps, {count} gradients in {seconds:.1f} s, "
          f"loss {losses[dtype](theta)[0]:.1e}, error {errors[-1]:.1e}")  # fmt: skip

assert len(tracks[np.float32]) <= STEPS, "float32 has stopped"
reached = {name: errors[-1] for name, (_, _, errors) in curves.items()}
if STEPS >= 3000:
    assert reached["float64"] < 3e-7
assert reached["float64"] < reached["float32"] / (10 if STEPS >= 3000 else 3)

# %%
# Why float32 stops: the loss is nearly flat there, so its gradient is a sum of terms that cancel,
# and their rounding errors are a good part of what is left.

last = tracks[np.float32][-1][1].astype(np.float32).astype(float)
rounded, right = (losses[dtype](last)[1] for dtype in PRECISIONS)
wrong = np.linalg.norm(rounded - right) / np.linalg.norm(right)
print(f"the gradient of float32 is off by {wrong:.0%} there")

# %%
# Before float32 stops, both go the same way, step by step and second by second.

figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
image = axes[0].imshow(solution(theta, np.float64).reshape(41, 41), extent=(-1, 1, -1, 1),
                       origin="lower", cmap="RdBu", vmin=-1.3, vmax=1.3)  # fmt: skip
axes[0].set(title="solution", xlabel="x", ylabel="y")
figure.colorbar(image, ax=axes[0], shrink=0.8)
for axis, i, what in ((axes[1], 0, "steps"), (axes[2], 1, "seconds")):
    for (name, curve), colour in zip(curves.items(), ("#D55E00", "#0072B2"), strict=True):
        axis.semilogy(curve[i], curve[2], color=colour, label=name)
        axis.semilogy(curve[i][-1], curve[2][-1], "o", color=colour)
    axis.set(xlabel=what, title=f"relative error over {what}")
    axis.grid(alpha=0.25)
axes[1].legend()

# %%
# A gradient as users of PyTorch and of JAX write it, by turns, in both precisions.


def with_numfuse(dtype):
    return lambda theta: losses[dtype](theta)[1]


ways = {("numfuse", d.__name__): with_numfuse(d) for d in PRECISIONS}
try:
    import torch

    torch.set_num_threads(1)  # its fastest for work of this size

    def with_torch(dtype):
        p, of_laplacian, of_x, of_y, of_value, q = (
            torch.from_numpy(z.astype(dtype)) for z in GIVEN
        )

        def gradient(theta):
            theta = torch.from_numpy(theta.astype(dtype)).requires_grad_()
            weights, biases = layers(theta)
            at = p.clone().requires_grad_()
            z = at
            for w, b in zip(weights[:-1], biases[:-1], strict=True):
                z = torch.tanh(torch.addmm(b, z, w))
            v = torch.addmm(biases[-1], z, weights[-1])
            (slope,) = torch.autograd.grad(v.sum(), at, create_graph=True)
            laplacian = 0
            for i in range(2):
                (row,) = torch.autograd.grad(slope[:, i].sum(), at, create_graph=True)
                laplacian = laplacian + row[:, i : i + 1]
            along = of_x * slope[:, :1] + of_y * slope[:, 1:]
            r = of_laplacian * laplacian + along + of_value * v - q
            return torch.autograd.grad((r**2).mean(), theta)[0].numpy()

        return gradient

    ways |= {("PyTorch", d.__name__): with_torch(d) for d in PRECISIONS}
except ImportError:
    print("PyTorch is not installed")
try:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def with_jax(dtype):
        p, *columns = (z.astype(dtype) for z in GIVEN)

        def mean_square(theta):
            weights, biases = layers(theta)

            def v(p):
                for w, b in zip(weights[:-1], biases[:-1], strict=True):
                    p = jnp.tanh(p @ w + b)
                return (p @ weights[-1] + biases[-1])[0]

            def residual(p, of_laplacian, of_x, of_y, of_value, q):
                slope, laplacian = jax.grad(v)(p), jnp.trace(jax.hessian(v)(p))
                return (
                    of_laplacian * laplacian
                    + of_x * slope[0]
                    + of_y * slope[1]
                    + of_value * v(p)
                    - q
                )

            return jnp.mean(jax.vmap(residual)(p, *(z[:, 0] for z in columns)) ** 2)

        compiled = jax.jit(jax.grad(mean_square))
        return lambda theta: np.asarray(compiled(theta.astype(dtype)))

    ways |= {("JAX", d.__name__): with_jax(d) for d in PRECISIONS}
except ImportError:
    print("JAX is not installed")

# Compared away from the minimum, where the gradient is no difference of nearly equal numbers.
for (_, name), run in ways.items():
    right, allowed = losses[np.float64](start)[1], 1e-3 if name == "float32" else 1e-9
    assert np.linalg.norm(run(start) - right) < allowed * np.linalg.norm(right)
times = {way: [] for way in ways}
for _ in range(31):
    for way, run in ways.items():
        began = time.perf_counter()
        run(theta)
        times[way].append(time.perf_counter() - began)
for library in dict.fromkeys(library for library, _ in ways):
    short, long = (1e3 * statistics.median(times[library, n]) for n in ("float32", "float64"))
    print(f"{library:8} {short:6.2f} ms a gradient in float32, {long:6.2f} in float64")

# %%
# So small a network is not bound by arithmetic. A larger one takes up to twice the time in float64
# on a processor, whose vectors hold half as many values, and as long as in float32 on GPUs whose
# float64 is as fast as their float32: :doc:`Numerics </numerics>` has the figures, and tells which
# precision to choose.

plt.show()
