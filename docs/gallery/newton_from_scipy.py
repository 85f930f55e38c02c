"""
Fitting a surrogate with SciPy: L-BFGS and Newton's method
==========================================================

`scipy.optimize.minimize` with `jac` and `hessp`: the gradient and the product of the Hessian with a
vector of a small network's loss on measured data (442 patients: the progression of diabetes a year
after ten measurements). The products come from the fused double backward.
"""

import statistics
import time

import autograd
import autograd.numpy as anp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_diabetes

import numfuse as nf

rng = np.random.default_rng(0)
x, y = load_diabetes(return_X_y=True)
x = x / x.std(axis=0)
y = ((y - y.mean()) / y.std())[:, None]
order = rng.permutation(len(x))
train, test = order[:350], order[350:]
HIDDEN, RIDGE = 12, 0.02
SHAPES = ((x.shape[1], HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,))
ENDS = np.cumsum([int(np.prod(s)) for s in SHAPES])


def surrogate(theta, x):
    w1, b1, w2, b2 = (
        anp.reshape(theta[end - int(np.prod(s)) : end], s)
        for s, end in zip(SHAPES, ENDS, strict=True)
    )
    return nf.matmul_bias_activation(nf.matmul_bias_activation(x, w1, b1, "silu"), w2, b2)


def loss(theta):
    fit = anp.mean((surrogate(theta, x[train]) - y[train]) ** 2)
    return fit + RIDGE * anp.sum(theta**2)


gradient, product = autograd.grad(loss), autograd.hessian_vector_product(loss)
start = 0.3 * rng.standard_normal(ENDS[-1])

# %%
# Both methods from the same point. What is counted is time: a product with the Hessian costs about
# two gradients. A call before that compiles the kernels, or loads them from the disk.

gradient(start), product(start, start)

plt.figure(figsize=(6, 3.5))
best = {}
for method, more in (("L-BFGS-B", {}), ("trust-krylov", {"hessp": product})):
    curve = [(0.0, loss(start))]
    began = time.perf_counter()

    def note(theta, curve=curve, began=began):
        curve.append((time.perf_counter() - began, loss(theta)))

    found = minimize(loss, start, jac=gradient, method=method, callback=note,
                     options={"gtol": 1e-8, "maxiter": 500}, **more)  # fmt: skip
    best[method] = found
    plt.plot(*zip(*curve, strict=True), ".-", label=method)
    print(f"{method}: loss {found.fun:.10f}, |gradient| {np.linalg.norm(gradient(found.x)):.1e}, "
          f"{found.nit} iterations")  # fmt: skip
plt.xscale("symlog", linthresh=1e-2)
plt.xlabel("seconds")
plt.ylabel("loss")
plt.legend()
plt.tight_layout()

theta = best["trust-krylov"].x
explained = 1 - np.mean((surrogate(theta, x[test]) - y[test]) ** 2) / np.mean(y[test] ** 2)
print(f"of the variance of the other patients {explained:.0%} is explained")
assert np.linalg.norm(gradient(theta)) < 1e-6
assert explained > 0.35

# %%
# At the minimum the Hessian has no negative eigenvalue: Newton's method has gone all the way.

hessian = np.stack([product(theta, e) for e in np.eye(theta.size)])
print(f"eigenvalues of the Hessian from {np.linalg.eigvalsh(hessian)[0]:.3g} up")
assert np.linalg.eigvalsh(hessian)[0] > -1e-8

# %%
# The product in PyTorch, by turns. For 350 rows of 10 numbers most of the time is Python's, and
# PyTorch is faster: on two free cores of an AMD EPYC (Zen 5) it took 0.78 ms for 0.92.

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    torch.set_num_threads(1)  # its fastest for work of this size
    xt, yt = torch.from_numpy(x[train]), torch.from_numpy(y[train])
    v = rng.standard_normal(theta.size)

    def torch_loss(theta):
        w1, b1, w2, b2 = (
            theta[end - int(np.prod(s)) : end].reshape(s)
            for s, end in zip(SHAPES, ENDS, strict=True)
        )
        h = torch.nn.functional.silu(torch.addmm(b1, xt, w1))
        return ((torch.addmm(b2, h, w2) - yt) ** 2).mean() + RIDGE * (theta**2).sum()

    def theirs():
        return torch.autograd.functional.hvp(
            torch_loss, torch.from_numpy(theta), torch.from_numpy(v)
        )[1]

    np.testing.assert_allclose(theirs().numpy(), product(theta, v), rtol=1e-8, atol=1e-10)
    times = {"numfuse and autograd": [], "torch": []}
    for _ in range(200):
        for name, run in zip(times, (lambda: product(theta, v), theirs), strict=True):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    for name, spent in times.items():
        print(f"a Hessian-vector product by {name}: {1e3 * statistics.median(spent):.2f} ms")

plt.show()
