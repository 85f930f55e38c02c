"""
An epilogue of your own
=======================

What is done with a matrix product before it is stored may be any formula. Here it is a tanh with a
bias for each column, a scale for each row, and a mask: one operation, with an exact backward that
nobody wrote.
"""

# %%
# A formula is ordinary Python over scalars: arithmetic, comparisons, activations and the functions
# of `numfuse.expr`. Its first parameter is an element of the product, the others are operands.

import matplotlib.pyplot as plt
import numpy as np

import numfuse as nf
from numfuse import expr as ex


@nf.epilogue
def masked_tanh(z, bias, scale, mask):
    return ex.where(mask > 0.5, ex.tanh(z + bias) * scale, 0.0)


print(masked_tanh)

# %%
# Operands broadcast to the product as in NumPy: `bias` is a row, `scale` a column, `mask` a matrix.
# NumPy makes four passes over memory after its product, and the fused call none.

rng = np.random.default_rng(0)
x, w = rng.standard_normal((200, 64)), rng.standard_normal((64, 48)) / 8
bias, scale = rng.standard_normal(48), rng.uniform(0.5, 2, (200, 1))
mask = (rng.random((200, 48)) < 0.9).astype(float)

out = nf.matmul_epilogue(x, w, masked_tanh, bias, scale, mask)
plain = np.where(mask > 0.5, np.tanh(x @ w + bias) * scale, 0)
print("largest difference:", np.abs(out - plain).max())

# %%
# The backward takes the gradient of the result and returns one gradient for each operand, summed to
# its shape: over rows for the bias, over columns for the scale. `needs` leaves out the mask's.

grad = rng.standard_normal(out.shape)
d_x, d_w, (d_bias, d_scale, d_mask) = nf.matmul_epilogue_bwd(
    grad, x, w, masked_tanh, bias, scale, mask, needs=("a", "b", 0, 1)
)
print(d_x.shape, d_w.shape, d_bias.shape, d_scale.shape, d_mask)

# %%
# Is it the gradient? Each operand takes a small step, forwards and backwards, along a random
# direction; the loss changes as the gradient says.

STEP = 1e-6
operands = {"x": x, "w": w, "bias": bias, "scale": scale}
gradients = {"x": d_x, "w": d_w, "bias": d_bias, "scale": d_scale}


def loss(x, w, bias, scale):
    return np.sum(grad * nf.matmul_epilogue(x, w, masked_tanh, bias, scale, mask))


for name, value in operands.items():
    direction = rng.standard_normal(value.shape)
    there = loss(**{**operands, name: value + STEP * direction})
    back = loss(**{**operands, name: value - STEP * direction})
    by_step, by_gradient = (there - back) / (2 * STEP), np.sum(gradients[name] * direction)
    print(f"{name:5}: {by_step:12.6f} by a step, {by_gradient:12.6f} by the gradient")
    np.testing.assert_allclose(by_step, by_gradient, rtol=1e-6)

# %%
# A Python number is an operand too. Its value is read when a kernel runs, so that a schedule which
# changes it in every step compiles nothing.


def softened(z, temperature):
    return ex.tanh(z / temperature)


temperatures = 0.25, 1.0, 4.0
curves = [nf.matmul_epilogue(x, w, softened, temperature) for temperature in temperatures]

# %%
# Two or three products of the same left factor may meet in a formula, as in a gated layer. `x` is
# read once for all of them.

w_gate, w_up = rng.standard_normal((2, 64, 48)) / 8
sigmoid = nf.activations()["sigmoid"]
gated = nf.matmul_epilogue(x, (w_gate, w_up), lambda z, u, s: sigmoid(z) * u * s, 0.5)
print("largest difference:", np.abs(gated - sigmoid(x @ w_gate) * (x @ w_up) / 2).max())

# %%
# Without a product the same formulas run over arrays, and may return several results: here both
# moments and the parameters of Adam, each written over its operand in one pass over memory.


def adam(p, d, mean, square, rate, epsilon):
    mean = 0.9 * mean + 0.1 * d
    square = 0.999 * square + 0.001 * d * d
    return p - rate * mean / (ex.sqrt(square) + epsilon), mean, square


mean, square = np.zeros_like(w), np.zeros_like(w)
before = w.copy()
rate = 1e-2 * np.sqrt(1 - 0.999) / (1 - 0.9)  # (with the corrections of the first step)
nf.elementwise(adam, w, d_w, mean, square, rate, 1e-8, out=(w, mean, square))
print("largest step:", np.abs(w - before).max())

# %%
# The formula beside its derivatives, found from it: by z, and along the temperature.

line = np.linspace(-6, 6, 400)
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharex=True)
for temperature in temperatures:
    left.plot(line, nf.elementwise(softened, line, temperature), label=f"T = {temperature}")
    slope, _ = nf.elementwise_bwd(np.ones(400), softened, line, temperature)
    right.plot(line, slope)
left.set(xlabel="z", ylabel="value", title="tanh(z / T)")
right.set(xlabel="z", ylabel="slope", title="its derivative by z")
for axes in (left, right):
    axes.grid(alpha=0.3)
_ = left.legend()
