"""
A multilayer perceptron and a gated network
===========================================

Two small networks for handwritten digits, made of fused layers and their backwards alone: no tape,
no framework. The first is ``gelu(x W + b)`` and a linear layer; the second has a gate,
``silu(x G) * (x U)``, in its middle (SwiGLU). Each step's time is measured beside PyTorch's.
"""

import statistics
import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import numfuse as nf

rng = np.random.default_rng(0)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = rng.permutation(len(images))
train, test = order[:1500], order[1500:]
HIDDEN = 128


def weights(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def softmax_loss(scores, wanted):
    """The mean cross-entropy and its gradient by the scores."""
    scores = scores - scores.max(axis=1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(wanted))
    loss = -np.log(p[rows, wanted]).mean()
    p[rows, wanted] -= 1
    return loss, p / np.float32(len(wanted))


# %%
# Each model is a list of parameters and a function that returns scores, or loss and gradients.


class MLP:
    def __init__(self):
        self.parameters = [weights(64, HIDDEN), np.zeros(HIDDEN, np.float32),
                           weights(HIDDEN, 10), np.zeros(10, np.float32)]  # fmt: skip

    def scores(self, x):
        w1, b1, w2, b2 = self.parameters
        return nf.matmul_bias_activation(nf.matmul_bias_activation(x, w1, b1, "gelu"), w2, b2)

    def gradients(self, x, wanted):
        w1, b1, w2, b2 = self.parameters
        h, pre = nf.matmul_bias_activation(x, w1, b1, "gelu", return_pre_activation=True)
        loss, grad = softmax_loss(nf.matmul_bias_activation(h, w2, b2), wanted)
        d_h, d_w2, d_b2 = nf.matmul_bias_activation_bwd(grad, h, w2, b2)
        _, d_w1, d_b1 = nf.matmul_bias_activation_bwd(
            d_h, x, w1, b1, "gelu", pre_activation=pre, needs=("b", "bias")
        )
        return loss, [d_w1, d_b1, d_w2, d_b2]


class Gated:
    def __init__(self):
        self.parameters = [weights(64, HIDDEN), weights(64, HIDDEN), weights(HIDDEN, 10)]

    def scores(self, x):
        gate, up, down = self.parameters
        h = nf.silu_mul(nf.matmul_bias_activation(x, gate), nf.matmul_bias_activation(x, up))
        return nf.matmul_bias_activation(h, down)

    def gradients(self, x, wanted):
        gate, up, down = self.parameters
        g, u = nf.matmul_bias_activation(x, gate), nf.matmul_bias_activation(x, up)
        h = nf.silu_mul(g, u)
        loss, grad = softmax_loss(nf.matmul_bias_activation(h, down), wanted)
        d_h, d_down, _ = nf.matmul_bias_activation_bwd(grad, h, down)
        d_g, d_u = nf.silu_mul_bwd(d_h, g, u)
        d_gate, d_up = (
            nf.matmul_bias_activation_bwd(d, x, w, needs=("b",)).d_b
            for d, w in ((d_g, gate), (d_u, up))
        )
        return loss, [d_gate, d_up, d_down]


# %%
# Stochastic gradient descent with momentum.


def fit(model, epochs=30, rate=0.1, size=100):
    moving = [np.zeros_like(p) for p in model.parameters]
    accuracy = []
    for _ in range(epochs):
        for start in range(0, len(train), size):
            batch = train[start : start + size]
            _, gradients = model.gradients(images[batch], labels[batch])
            for p, v, g in zip(model.parameters, moving, gradients, strict=True):
                v *= np.float32(0.9)
                v -= np.float32(rate) * g
                p += v
        accuracy.append((model.scores(images[test]).argmax(axis=1) == labels[test]).mean())
    return accuracy


curves = {name: fit(model) for name, model in (("MLP", MLP()), ("gated", Gated()))}
for name, curve in curves.items():
    print(f"{name}: {curve[-1]:.1%} of the test images are right")
    assert curve[-1] > 0.93

plt.figure(figsize=(6, 3.5))
for name, curve in curves.items():
    plt.plot(range(1, len(curve) + 1), curve, label=name)
plt.xlabel("epoch")
plt.ylabel("test accuracy")
plt.legend()
plt.tight_layout()

# %%
# The same step in PyTorch, by turns.


def medians(**steps):
    """The median time of each, in microseconds; all of them by turns."""
    found = {name: [] for name in steps}
    for _ in range(300):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(times) for name, times in found.items()}


try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    torch.set_num_threads(1)  # its fastest for work of this size
    gelu, silu, loss_of = (
        torch.nn.functional.gelu, torch.nn.functional.silu, torch.nn.functional.cross_entropy,
    )  # fmt: skip
    batch = train[:100]
    x, y = torch.from_numpy(images[batch]), torch.from_numpy(labels[batch])

    def mlp(w1, b1, w2, b2):
        h = gelu(torch.addmm(b1, x, w1), approximate="tanh")
        return torch.addmm(b2, h, w2)

    def gated(gate, up, down):
        return (silu(x @ gate) * (x @ up)) @ down

    for name, model, scores in (("MLP", MLP(), mlp), ("gated network", Gated(), gated)):
        theirs = [torch.from_numpy(p).requires_grad_() for p in model.parameters]

        def step(scores=scores, theirs=theirs):
            return torch.autograd.grad(loss_of(scores(*theirs), y), theirs)

        def ours(model=model):
            return model.gradients(images[batch], labels[batch])[1]

        for mine, other in zip(ours(), step(), strict=True):
            np.testing.assert_allclose(mine, other.numpy(), rtol=1e-3, atol=1e-6)
        times = medians(numfuse=ours, torch=step)
        print(f"a step of the {name}:", ", ".join(f"{n} {t:.0f} us" for n, t in times.items()))

plt.show()
