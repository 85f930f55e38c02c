"""
An activation of your own
=========================

An activation is one formula. The decorator records it, differentiates it and compiles both into the
kernels: it is as fast as a built-in one, in every function and on every backend.
"""

# %%
# A formula is ordinary Python: arithmetic, and the functions of `numfuse.expr`. This one is mish.

import matplotlib.pyplot as plt
import numpy as np

import numfuse as nf
from numfuse import expr as ex


@nf.activation(source="Misra 2019, arXiv:1908.08681")
def mish(x):
    return x * ex.tanh(ex.log1p(ex.exp(x)))


print(mish)

# %%
# It is called like any other, by its name or as the object. Called with an array, it evaluates its
# formula in float64, which is the reference that the kernels are tested against.

rng = np.random.default_rng(0)
x, w, c = rng.standard_normal((5, 4)), rng.standard_normal((4, 3)), rng.standard_normal(3)
out = nf.matmul_bias_activation(x, w, c, "mish")
print("largest difference:", np.abs(out - mish(x @ w + c)).max())

# %%
# So is its gradient, and nobody wrote a derivative. A small step agrees with it:

grad = np.ones((5, 3))
d_w = nf.matmul_bias_activation_bwd(grad, x, w, c, mish).d_b
step = 1e-6 * rng.standard_normal(w.shape)
there = nf.matmul_bias_activation(x, w + step, c, mish).sum()
back = nf.matmul_bias_activation(x, w - step, c, mish).sum()
print(f"{(there - back) / 2:.6e} by a step, {np.sum(d_w * step):.6e} by the gradient")

# %%
# At infinity the formula above is inf times 0. One for production holds its argument where such
# products cannot be, and its derivative, which is found from the formula unless written down, may
# be given a form that is stable in the tails. A redefinition replaces the old one.


@nf.activation(source="Misra 2019, arXiv:1908.08681", name="mish")
def mish(x):
    return ex.maximum(x, -750.0) * ex.tanh(ex.log1p(ex.exp(ex.clamp(x, -750.0, 40.0))))


@mish.derivative
def _(x):
    y = ex.clamp(x, -750.0, 40.0)
    t = ex.tanh(ex.log1p(ex.exp(y)))
    return t + y * ex.sigmoid(y) * (1.0 - t * t)


for value in (-np.inf, -1e4, 1e4, np.inf):
    print(f"{value:9}: {mish(np.array([value]))[0]}, slope {mish.derivative(np.array([value]))[0]}")

# %%
# Value and derivatives.

line = np.linspace(-6, 4, 400)
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
axes.plot(line, mish(line), label="mish(x)")
axes.plot(line, mish.derivative(line), "--", label="mish'(x)")
axes.plot(line, mish.second_derivative(line), ":", label="mish''(x)")
axes.set(xlabel="x", ylabel="value", title="mish and its derivatives")
axes.grid(alpha=0.3)
_ = axes.legend()

# %%
# In Numba code of your own, the compiled function is there too:

import numba  # noqa: E402

value = mish.njit


@numba.njit
def total(x):
    s = 0.0
    for v in x:
        s += value(v)
    return s


print(total(line), mish(line).sum())
