"""The demo's network and its training step, three times: numfuse, unfused NumPy, PyTorch.

    gate   = x @ W + b               (64 -> 256)
    up     = x @ W + b               (64 -> 256)
    hidden = silu(gate) * up
    mixed  = gelu(hidden @ W + b)    (256 -> 128)
    logits = mixed @ W + b           (128 -> 10)

The loss is the softmax cross-entropy against smoothed labels, the optimiser is Adam. A step is
forward, loss, backward and update; the three steps start from the same parameters and give the same
gradients, which :func:`gradient_error` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import numfuse as nf
from numfuse.cli.ufuncs import Array

PIXELS, HIDDEN, MIXED, CLASSES = 64, 256, 128, 10
LAYERS = {
    "gate": (PIXELS, HIDDEN),
    "up": (PIXELS, HIDDEN),
    "mix": (HIDDEN, MIXED),
    "head": (MIXED, CLASSES),
}
# A target of 0.9 + 0.1 / 10 for the right class: 0.5 to 1 % more test accuracy on the digits.
SMOOTHING = 0.1
# Adam's usual decay of the mean; the squares forget faster than the usual 0.999, since the whole
# training is a few hundred steps.
BETA_MEAN, BETA_SQUARE, EPSILON = 0.9, 0.99, 1e-8


class Parameters:
    """Every weight and bias as a view of one flat vector, so that an update is one expression."""

    def __init__(self, flat: Array) -> None:
        self.flat = flat
        self.weight: dict[str, Array] = {}
        self.bias: dict[str, Array] = {}
        start = 0
        for name, (rows, columns) in LAYERS.items():
            middle = start + rows * columns
            self.weight[name] = flat[start:middle].reshape(rows, columns)
            self.bias[name] = flat[middle : middle + columns]
            start = middle + columns

    @classmethod
    def zeros(cls) -> Parameters:
        size = sum(rows * columns + columns for rows, columns in LAYERS.values())
        return cls(np.zeros(size, np.float32))

    @classmethod
    def random(cls, generator: np.random.Generator) -> Parameters:
        """Weights of variance 1 / rows, which keeps the size of the signal; biases of zero."""
        parameters = cls.zeros()
        for weight in parameters.weight.values():
            weight[:] = generator.standard_normal(weight.shape) / math.sqrt(len(weight))
        return parameters

    def copy(self) -> Parameters:
        return Parameters(self.flat.copy())


# A function (parameters, gradients to write, x, labels) -> loss
Gradients = Callable[[Parameters, Parameters, Array, Array], float]


def cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Mean softmax cross-entropy against smoothed labels, and its gradient by the logits."""
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    right = -log_p[rows, labels].mean()
    loss = (1 - SMOOTHING) * right - SMOOTHING * log_p.mean()
    d_logits = np.exp(log_p)
    d_logits -= SMOOTHING / CLASSES
    d_logits[rows, labels] -= 1 - SMOOTHING
    d_logits /= len(labels)
    return float(loss), d_logits


def forward(p: Parameters, x: Array) -> tuple[Array, ...]:
    """Return the logits of a batch, with numfuse, and what the backward needs before them."""
    w, b = p.weight, p.bias
    gate = nf.matmul_bias_activation(x, w["gate"], b["gate"])
    up = nf.matmul_bias_activation(x, w["up"], b["up"])
    hidden = nf.silu_mul(gate, up)
    mixed, pre = nf.matmul_bias_activation(
        hidden, w["mix"], b["mix"], "gelu", return_pre_activation=True
    )
    return gate, up, hidden, pre, mixed, nf.matmul_bias_activation(mixed, w["head"], b["head"])


def predict(p: Parameters, x: Array) -> Array:
    """The logits of a batch, with numfuse."""
    return forward(p, x)[-1]


def fused_gradients(p: Parameters, g: Parameters, x: Array, labels: Array) -> float:
    """Forward and backward with numfuse: ten calls, each gradient written where Adam reads it."""
    w, b, d_w, d_b = p.weight, p.bias, g.weight, g.bias
    gate, up, hidden, pre, mixed, logits = forward(p, x)

    loss, d_logits = cross_entropy(logits, labels)

    d_mixed = nf.matmul_bias_activation_bwd(
        d_logits, mixed, w["head"], b["head"], out=(None, d_w["head"], d_b["head"])
    ).d_a
    d_hidden = nf.matmul_bias_activation_bwd(
        d_mixed,
        hidden,
        w["mix"],
        b["mix"],
        "gelu",
        pre_activation=pre,
        out=(None, d_w["mix"], d_b["mix"]),
    ).d_a
    d_gate, d_up = nf.silu_mul_bwd(d_hidden, gate, up)
    for name, grad in (("gate", d_gate), ("up", d_up)):
        nf.matmul_bias_activation_bwd(
            grad, x, w[name], b[name], needs=("b", "bias"), out=(None, d_w[name], d_b[name])
        )
    return loss


def unfused_gradients(p: Parameters, g: Parameters, x: Array, labels: Array) -> float:
    """Forward and backward in NumPy: a pass over memory per operation, products by NumPy's BLAS."""
    w, b = p.weight, p.bias
    gate = x @ w["gate"] + b["gate"]
    up = x @ w["up"] + b["up"]
    s = 1 / (1 + np.exp(-gate))
    hidden = gate * s * up
    pre = hidden @ w["mix"] + b["mix"]
    c = np.float32(math.sqrt(2 / math.pi))
    square = pre * pre
    t = np.tanh(c * pre * (1 + np.float32(0.044715) * square))
    mixed = 0.5 * pre * (1 + t)
    logits = mixed @ w["head"] + b["head"]

    loss, d_logits = cross_entropy(logits, labels)

    d_mixed = d_logits @ w["head"].T
    slope = 0.5 * (1 + t) + 0.5 * pre * (1 - t * t) * c * (1 + np.float32(3 * 0.044715) * square)
    d_pre = d_mixed * slope
    d_hidden = d_pre @ w["mix"].T
    d_up = d_hidden * gate * s
    d_gate = d_hidden * up * s * (1 + gate * (1 - s))
    for name, rows, grad in (
        ("head", mixed, d_logits),
        ("mix", hidden, d_pre),
        ("gate", x, d_gate),
        ("up", x, d_up),
    ):
        np.matmul(rows.T, grad, out=g.weight[name])
        np.sum(grad, axis=0, out=g.bias[name])
    return loss


class Adam:
    """Adam over the flat vector; ``rate`` may change between steps."""

    def __init__(self, parameters: Parameters, rate: float) -> None:
        self.parameters = parameters
        self.rate = rate
        self.steps = 0
        self.mean = np.zeros_like(parameters.flat)
        self.square = np.zeros_like(parameters.flat)

    def update(self, gradients: Parameters) -> None:
        g = gradients.flat
        self.steps += 1
        self.mean += (1 - BETA_MEAN) * (g - self.mean)
        self.square += (1 - BETA_SQUARE) * (g * g - self.square)
        mean = self.mean / (1 - BETA_MEAN**self.steps)
        square = self.square / (1 - BETA_SQUARE**self.steps)
        self.parameters.flat -= self.rate * mean / (np.sqrt(square) + EPSILON)


def array_step(
    gradients_of: Gradients,
    start: Parameters,
    rate: float,
    x: Array,
    labels: Array,
    gradients: Parameters | None = None,
) -> Callable[[], float]:
    """A training step on one batch, with NumPy's Adam; each call continues from the last.

    The gradients of a step are left in `gradients`.
    """
    parameters = start.copy()
    gradients = gradients or Parameters.zeros()
    adam = Adam(parameters, rate)

    def step() -> float:
        loss = gradients_of(parameters, gradients, x, labels)
        adam.update(gradients)
        return loss

    return step


class TorchNetwork:
    """The network and its step as PyTorch's users write them: autograd and PyTorch's fused Adam."""

    def __init__(self, start: Parameters, rate: float, x: Array, labels: Array) -> None:
        import torch

        self.torch = torch
        self.x, self.labels = torch.tensor(x), torch.tensor(labels)
        self.layers: dict[str, Any] = {
            name: tuple(
                torch.tensor(part[name], requires_grad=True) for part in (start.weight, start.bias)
            )
            for name in LAYERS
        }
        self.adam = torch.optim.Adam(
            [x for layer in self.layers.values() for x in layer],
            lr=rate,
            betas=(BETA_MEAN, BETA_SQUARE),
            eps=EPSILON,
            fused=True,
        )

    def backward(self) -> Any:
        """Forward, loss and backward; the loss as a tensor of one element."""

        def layer(name: str, x: Any) -> Any:
            weight, bias = self.layers[name]
            return self.torch.addmm(bias, x, weight)

        functional = self.torch.nn.functional
        self.adam.zero_grad()
        hidden = functional.silu(layer("gate", self.x)) * layer("up", self.x)
        mixed = functional.gelu(layer("mix", hidden), approximate="tanh")
        logits = layer("head", mixed)
        loss = functional.cross_entropy(logits, self.labels, label_smoothing=SMOOTHING)
        loss.backward()
        return loss

    def step(self) -> float:
        loss = self.backward()
        self.adam.step()
        return float(loss.item())

    def gradients(self) -> Parameters:
        self.backward()
        gradients = Parameters.zeros()
        for name, (weight, bias) in self.layers.items():
            gradients.weight[name][:] = weight.grad.numpy()
            gradients.bias[name][:] = bias.grad.numpy()
        return gradients


def gradient_error(ours: Parameters, theirs: Parameters) -> float:
    """Largest difference of any parameter's gradient, relative to its layer's largest gradient."""
    worst = 0.0
    for part in ("weight", "bias"):
        for name, mine in getattr(ours, part).items():
            other = getattr(theirs, part)[name]
            worst = max(worst, float(np.abs(mine - other).max() / np.abs(other).max()))
    return worst
