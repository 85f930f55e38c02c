"""
A gated network
===============

A gated layer multiplies two products, ``silu(x @ w_gate) * (x @ w_up)``. Here one learns a pattern
of waves from its values at random points, beside a plain layer with as many parameters. The pattern
is a product itself, which suits the gate; on a spiral, say, neither is ahead. At the end the time
of a step is measured beside PyTorch's.
"""

# %%
# The function to learn.

import statistics
import time

import matplotlib.pyplot as plt
import numpy as np

import numfuse as nf


def wave(points):
    return np.prod(np.sin(5 * points), axis=1, keepdims=True)


rng = np.random.default_rng(1)
points = rng.uniform(-1, 1, (2048, 2))
values = wave(points)

# %%
# Both networks are dictionaries of weights and biases, and a function that gives loss and
# gradients. The gated one has three products where the plain one has two, so it is narrower.


def layer(rows, columns):
    return [rng.standard_normal((rows, columns)) / np.sqrt(rows), rng.standard_normal(columns)]


def features(x, net):
    """A first layer that both networks have: 2 -> 64."""
    return nf.matmul_bias_activation(x, *net["in"], "tanh", return_pre_activation=True)


def backward(name, net, grad, x, activation="none", **saved):
    d_x, *net[name + "'"] = nf.matmul_bias_activation_bwd(grad, x, *net[name], activation, **saved)
    return d_x


def plain(net, x, y):
    first, first_pre = features(x, net)
    hidden, pre = nf.matmul_bias_activation(
        first, *net["hidden"], "silu", return_pre_activation=True
    )
    out = nf.matmul_bias_activation(hidden, *net["out"])
    d_out = 2 * (out - y) / len(y)
    d_hidden = backward("out", net, d_out, hidden)
    d_first = backward("hidden", net, d_hidden, first, "silu", pre_activation=pre)
    backward("in", net, d_first, x, "tanh", pre_activation=first_pre)
    return out, np.mean((out - y) ** 2)


def gated(net, x, y):
    first, first_pre = features(x, net)
    gate = nf.matmul_bias_activation(first, *net["gate"])
    up = nf.matmul_bias_activation(first, *net["up"])
    hidden = nf.silu_mul(gate, up)
    out = nf.matmul_bias_activation(hidden, *net["out"])
    d_out = 2 * (out - y) / len(y)
    d_hidden = backward("out", net, d_out, hidden)
    d_gate, d_up = nf.silu_mul_bwd(d_hidden, gate, up)
    d_first = backward("gate", net, d_gate, first) + backward("up", net, d_up, first)
    backward("in", net, d_first, x, "tanh", pre_activation=first_pre)
    return out, np.mean((out - y) ** 2)


networks = {
    "plain, 96 wide": (plain, {"in": layer(2, 64), "hidden": layer(64, 96), "out": layer(96, 1)}),
    "gated, 48 wide": (
        gated,
        {"in": layer(2, 64), "gate": layer(64, 48), "up": layer(64, 48), "out": layer(48, 1)},
    ),
}

# %%
# Adam, on each array of a network.


def train(step, net, epochs=400, rate=5e-3):
    names = list(net)
    moments = {name: [(0.0, 0.0)] * 2 for name in names}
    losses = []
    for epoch in range(1, epochs + 1):
        losses.append(step(net, points, values)[1])
        for name in names:
            for i, (p, d) in enumerate(zip(net[name], net[name + "'"], strict=True)):
                mean, square = moments[name][i]
                mean, square = 0.9 * mean + 0.1 * d, 0.99 * square + 0.01 * d * d
                moments[name][i] = mean, square
                scale = np.sqrt(square / (1 - 0.99**epoch)) + 1e-8
                p -= rate * mean / (1 - 0.9**epoch) / scale
    return losses


curves = {name: train(step, net) for name, (step, net) in networks.items()}
for name, losses in curves.items():
    print(f"{name}: mean squared error {losses[-1]:.2e} after {len(losses)} steps")

# %%
# The error over the steps, and what each has learned on a grid.

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, losses), style in zip(curves.items(), ("--", "-"), strict=True):
    axes.semilogy(np.arange(1, len(losses) + 1), losses, style, label=name)
axes.set(xlabel="step", ylabel="mean squared error", title="Training")
axes.grid(alpha=0.3)
axes.legend()

# %%

line = np.linspace(-1, 1, 80)
grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
pictures = {"the waves": wave(grid)}
for name, (step, net) in networks.items():
    pictures[name] = step(net, grid, wave(grid))[0]
figure, row = plt.subplots(1, 3, figsize=(6.6, 2.9), layout="constrained", sharey=True)
for axes, (name, picture) in zip(row, pictures.items(), strict=True):
    image = axes.imshow(
        picture.reshape(80, 80), extent=(-1, 1, -1, 1), origin="lower", vmin=-1, vmax=1,
        cmap="RdBu",
    )  # fmt: skip
    axes.set(title=name, xlabel="x")
row[0].set_ylabel("y")
_ = figure.colorbar(image, ax=row, label="value", location="bottom", shrink=0.6)

# %%
# The gradients of the gated network in PyTorch, which are the same, and the time of each, by turns.

try:
    import torch
except ImportError:
    print("PyTorch is not installed")
else:
    torch.set_num_threads(1)  # its fastest for work of this size
    step, net = networks["gated, 48 wide"]
    x, y = torch.from_numpy(points), torch.from_numpy(values)
    names = ("in", "gate", "up", "out")
    theirs = {name: [torch.from_numpy(p).requires_grad_() for p in net[name]] for name in names}

    def linear(name, rows):
        weights, bias = theirs[name]
        return torch.addmm(bias, rows, weights)

    def torch_gradients():
        first = torch.tanh(linear("in", x))
        hidden = torch.nn.functional.silu(linear("gate", first)) * linear("up", first)
        loss = ((linear("out", hidden) - y) ** 2).mean()
        return torch.autograd.grad(loss, [p for name in names for p in theirs[name]])

    step(net, points, values)
    mine = [d for name in names for d in net[name + "'"]]
    for d, other in zip(mine, torch_gradients(), strict=True):
        np.testing.assert_allclose(d, other.numpy(), rtol=1e-7, atol=1e-12)

    times = {"numfuse": [], "torch": []}
    for _ in range(100):
        for name, run in (
            ("numfuse", lambda: step(net, points, values)),
            ("torch", torch_gradients),
        ):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    print(", ".join(f"{name} {1e3 * statistics.median(t):.2f} ms" for name, t in times.items()))
