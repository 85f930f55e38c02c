"""The demo's network and its training step: by numfuse, by unfused NumPy and by PyTorch.

    hidden = silu(x @ W + b) * (x @ W' + b')    (64 -> 256)
    mixed  = gelu(hidden @ W + b)               (256 -> 128)
    logits = mixed @ W + b                      (128 -> 10)

The loss is the softmax cross-entropy against smoothed labels, the optimiser is Adam. A step is
forward, loss, backward and update; all start from the same parameters and give the same
gradients.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import numfuse as nf
from numfuse import expr
from numfuse.cli.timing import Runs
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

    SIZE = sum(rows * columns + columns for rows, columns in LAYERS.values())

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
        return cls(np.zeros(cls.SIZE, np.float32))

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


@functools.cache
def smoothed(dtype: Any) -> tuple[Array, Array]:
    """Return what is wanted for each label, in its row, and a column of ones."""
    wanted = (1 - SMOOTHING) * np.eye(CLASSES) + SMOOTHING / CLASSES
    return wanted.astype(dtype), np.ones((CLASSES, 1), dtype)


def cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Mean softmax cross-entropy against smoothed labels, and its gradient by the logits."""
    targets, ones = smoothed(logits.dtype)
    count, wanted = len(labels), targets.take(labels, axis=0)
    # (of ten columns NumPy finds the largest, and their sum, faster than along rows)
    largest = np.ascontiguousarray(logits.T).max(axis=0)
    shifted = logits - largest[:, None]
    d_logits = np.exp(shifted)
    total = d_logits @ ones
    # -log p is log(total) - shifted, each as often as it is wanted
    loss = (np.log(total).sum() - np.vdot(wanted, shifted)) / count
    d_logits /= total
    d_logits -= wanted
    d_logits /= count
    return float(loss), d_logits


def gated(p: Parameters) -> tuple[Array, Array, Array, Array]:
    """Return the operands of the gated layer, behind its rows."""
    w, b = p.weight, p.bias
    return w["gate"], w["up"], b["gate"], b["up"]


def rest(part: dict[str, Array]) -> list[Array]:
    """Return what the layers behind the gated one have, for a call of the whole network."""
    return [part["mix"], part["head"]]


def predict(p: Parameters, x: Array) -> Array:
    """The logits of a batch, with numfuse."""
    hidden = nf.matmul_activation_mul(x, *gated(p))
    return np.asarray(nf.mlp(hidden, rest(p.weight), rest(p.bias), "gelu"))


def fused_gradients(p: Parameters, g: Parameters, x: Array, labels: Array) -> float:
    """Forward and backward with numfuse: four calls, each gradient written where Adam reads it."""
    d_w, d_b = g.weight, g.bias
    hidden, gates = nf.matmul_activation_mul(x, *gated(p), return_pre_activation=True)
    layers = hidden, rest(p.weight), rest(p.bias), "gelu"
    logits, kept = nf.mlp(*layers, keep=True)

    loss, d_logits = cross_entropy(logits, labels)

    needs, out = ("x", "weights", "biases"), (None, rest(d_w), rest(d_b))
    d_hidden = nf.mlp_bwd(d_logits, *layers, needs=needs, kept=kept, out=out).d_x
    nf.matmul_activation_mul_bwd(
        d_hidden,
        x,
        *gated(p),
        pre_activation=gates,
        needs=("b_gate", "b_up", "bias_gate", "bias_up"),
        out=(None, *gated(g)),
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


@nf.epilogue(name="adam", source="Kingma and Ba 2014, arXiv:1412.6980")
def adam(p: Any, mean: Any, square: Any, g: Any, rate: Any, scale: Any, root_scale: Any) -> Any:
    """Return parameters, mean and square after a step; the scales undo that both began at 0."""
    mean = mean + (1 - BETA_MEAN) * (g - mean)
    square = square + (1 - BETA_SQUARE) * (g * g - square)
    return p - rate * (mean * scale) / (expr.sqrt(square * root_scale) + EPSILON), mean, square


class FusedAdam(Adam):
    """Adam in one pass over memory, in place."""

    def update(self, gradients: Parameters) -> None:
        self.steps += 1
        state = self.parameters.flat, self.mean, self.square
        scales = (1 / (1 - beta**self.steps) for beta in (BETA_MEAN, BETA_SQUARE))
        nf.elementwise(adam, *state, gradients.flat, self.rate, *scales, out=state)


def array_step(
    gradients_of: Gradients,
    start: Parameters,
    x: Array,
    labels: Array,
    optimiser: type[Adam] = Adam,
) -> Callable[[], Any]:
    """Return a training step on one batch; it returns loss and gradients.

    At a rate of 0 every step does the whole arithmetic, on the same numbers.
    """
    gradients = Parameters(np.zeros_like(start.flat))
    state = optimiser(start.copy(), 0.0)

    def step() -> Any:
        loss = gradients_of(state.parameters, gradients, x, labels)
        state.update(gradients)
        return loss, gradients.weight, gradients.bias

    return step


def torch_step(
    start: Parameters, x: Array, labels: Array, compiled: bool = False
) -> Callable[[], Any]:
    """Return the step as PyTorch's users write it: autograd and PyTorch's fused Adam.

    `compiled`: forward and loss, and by that their backward, by torch.compile.
    """
    import torch
    from torch.nn import functional

    weight, bias = (
        {name: torch.tensor(values, requires_grad=True) for name, values in part.items()}
        for part in (start.weight, start.bias)
    )
    every = [*weight.values(), *bias.values()]
    betas = (BETA_MEAN, BETA_SQUARE)
    adam = torch.optim.Adam(every, lr=0.0, betas=betas, eps=EPSILON, fused=True)
    rows, classes = torch.tensor(x), torch.tensor(labels)

    def layer(name: str, x: Any) -> Any:
        return torch.addmm(bias[name], x, weight[name])

    def forward() -> Any:
        hidden = functional.silu(layer("gate", rows)) * layer("up", rows)
        mixed = functional.gelu(layer("mix", hidden), approximate="tanh")
        logits = layer("head", mixed)
        return functional.cross_entropy(logits, classes, label_smoothing=SMOOTHING)

    run = torch.compile(forward) if compiled else forward

    def step() -> Any:
        adam.zero_grad()
        loss = run()
        loss.backward()
        adam.step()
        return loss.item(), [z.grad for z in every]

    return step


def sklearn_step(x: Array, labels: Array) -> Callable[[], Any]:
    """Return a step of scikit-learn's network of these widths, which has relu and no gate."""
    from sklearn.neural_network import MLPClassifier

    sizes = HIDDEN, MIXED
    network = MLPClassifier(sizes, batch_size=len(x), alpha=0.0, random_state=0)
    classes = np.arange(CLASSES)
    network.partial_fit(x, labels, classes=classes)
    return lambda: network.partial_fit(x, labels).loss_


def steps(start: Parameters, x: Array, labels: Array, compiled: bool = False) -> Runs:
    """Return the step by numfuse, by unfused NumPy and, if installed, by PyTorch."""
    found = {
        "numfuse": array_step(fused_gradients, start, x, labels, FusedAdam),
        "NumPy": array_step(unfused_gradients, start, x, labels),
    }
    if importlib.util.find_spec("torch") is not None:
        found["PyTorch"] = torch_step(start, x, labels)
        if compiled:
            found["PyTorch, compiled"] = torch_step(start, x, labels, True)
    return found
