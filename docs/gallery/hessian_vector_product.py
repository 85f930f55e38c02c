"""
Hessian-vector products: the spectrum of a network's Hessian
============================================================

The Hessian of a loss by all weights is too large to be made, but its product with a vector costs as
much as a few gradients. `autograd.hessian_vector_product` goes through the fused double backward;
Lanczos' method makes the largest eigenvalues of such products.
"""

import itertools
import statistics
import time

import autograd
import autograd.numpy as anp
import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

import numfuse as nf

rng = np.random.default_rng(0)
SIZES = (8, 24, 24, 1)
SHAPES = [s for m, n in itertools.pairwise(SIZES) for s in ((m, n), (n,))]
x = rng.standard_normal((256, SIZES[0]))
y = np.sin(x.sum(axis=1, keepdims=True))
theta = np.concatenate(
    [(rng.standard_normal(s) / np.sqrt(s[0])).ravel() for s in SHAPES]
)  # fmt: skip


def unpacked(theta):
    """The weights and biases that lie behind each other in one vector."""
    found, at = [], 0
    for shape in SHAPES:
        size = int(np.prod(shape))
        found.append(anp.reshape(theta[at : at + size], shape))
        at += size
    return found


def loss(theta):
    parts = unpacked(theta)
    h = x
    for w, b in zip(parts[:-2:2], parts[1:-2:2], strict=True):
        h = nf.matmul_bias_activation(h, w, b, "gelu")
    return anp.mean((nf.matmul_bias_activation(h, parts[-2], parts[-1]) - y) ** 2)


product = autograd.hessian_vector_product(loss)
gradient = autograd.grad(loss)

# %%
# It is exact: a difference of gradients agrees as far as differences can.

v = rng.standard_normal(theta.size)
step = 1e-5
difference = (gradient(theta + step * v) - gradient(theta - step * v)) / (2 * step)
error = np.abs(product(theta, v) - difference).max() / np.abs(difference).max()
print(f"{theta.size} weights; against a difference of gradients: {error:.1e}")
assert error < 1e-7

# %%
# The largest eigenvalues, before and after some steps of gradient descent.


def largest(theta, count=40):
    operator = LinearOperator((theta.size,) * 2, matvec=lambda v: product(theta, np.ravel(v)))
    return np.sort(eigsh(operator, k=count, which="LM", return_eigenvectors=False))


plt.figure(figsize=(6, 3.5))
for steps in (0, 300):
    for _ in range(steps):
        theta = theta - 0.05 * gradient(theta)
    plt.plot(largest(theta), ".", label=f"after {steps} steps, loss {loss(theta):.3f}")
plt.axhline(0, color="grey", lw=0.5)
plt.ylabel("eigenvalue of the Hessian")
plt.legend()
plt.tight_layout()

# %%
# The same product in PyTorch, by turns. On two free cores of an AMD EPYC (Zen 5) it took 1.46 ms
# for 1.20. Most of either is Python's, and on a busy machine the order may turn round.

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    torch.set_num_threads(1)  # its fastest for work of this size
    xt, yt, vt = (torch.from_numpy(z) for z in (x, y, v))

    def torch_loss(theta):
        parts, at = [], 0
        for shape in SHAPES:
            size = int(np.prod(shape))
            parts.append(theta[at : at + size].reshape(shape))
            at += size
        h = xt
        for w, b in zip(parts[:-2:2], parts[1:-2:2], strict=True):
            h = torch.nn.functional.gelu(torch.addmm(b, h, w), approximate="tanh")
        return ((torch.addmm(parts[-1], h, parts[-2]) - yt) ** 2).mean()

    def theirs():
        return torch.autograd.functional.hvp(torch_loss, torch.from_numpy(theta), vt)[1]

    np.testing.assert_allclose(theirs().numpy(), product(theta, v), rtol=1e-8, atol=1e-12)
    times = {"numfuse and autograd": [], "torch": []}
    for _ in range(100):
        for name, run in zip(times, (lambda: product(theta, v), theirs), strict=True):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, found in times.items():
        print(f"a Hessian-vector product by {name}: {1e3 * statistics.median(found):.2f} ms")

plt.show()
