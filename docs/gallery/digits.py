"""
Handwritten digits
==================

A network of two layers learns the 8 x 8 digits of scikit-learn. There is no framework: each layer
is one call forward and one call backward, and the optimiser is gradient descent with momentum.
"""

# %%
# The data: pictures as rows, a quarter of them held out for the test.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import numfuse as nf

pictures, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(
    (pictures / 16).astype(np.float32), labels, stratify=labels, random_state=0
)

# %%
# Weights and biases of 64 -> 96 -> 10, in float32 like the data.

rng = np.random.default_rng(0)


def layer(rows, columns):
    weight = rng.standard_normal((rows, columns)) / np.sqrt(rows)
    return weight.astype(np.float32), np.zeros(columns, np.float32)


w1, b1 = layer(64, 96)
w2, b2 = layer(96, 10)

# %%
# A step. The first layer's pre-activation is saved for the backward, and the gradient by the
# pictures, which nobody needs, is not asked for.


def gradients(x, y):
    hidden, pre = nf.matmul_bias_activation(x, w1, b1, "gelu", return_pre_activation=True)
    logits = nf.matmul_bias_activation(hidden, w2, b2)

    # softmax and cross-entropy, in NumPy
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(p[rows, y]).mean()
    p[rows, y] -= 1
    p /= len(y)

    d_hidden, d_w2, d_b2 = nf.matmul_bias_activation_bwd(p, hidden, w2, b2)
    _, d_w1, d_b1 = nf.matmul_bias_activation_bwd(
        d_hidden, x, w1, b1, "gelu", pre_activation=pre, needs=("b", "bias")
    )
    return loss, (d_w1, d_b1, d_w2, d_b2)


def predict(x):
    hidden = nf.matmul_bias_activation(x, w1, b1, "gelu")
    return nf.matmul_bias_activation(hidden, w2, b2).argmax(axis=1)


parameters = (w1, b1, w2, b2)
speed = [np.zeros_like(p) for p in parameters]
losses, accuracies = [], []
for _epoch in range(40):
    order = rng.permutation(len(x_train))
    for batch in np.array_split(order, 12):
        loss, steps = gradients(x_train[batch], y_train[batch])
        for p, v, d in zip(parameters, speed, steps, strict=True):
            v *= 0.9
            v -= 0.05 * d
            p += v
    losses.append(loss)
    accuracies.append((predict(x_test) == y_test).mean())
print(f"test accuracy: {accuracies[-1]:.3f}")

# %%
# What it learned.

figure, (curve, share) = plt.subplots(2, 1, figsize=(6, 5), layout="constrained", sharex=True)
epochs = np.arange(1, len(losses) + 1)
curve.semilogy(epochs, losses, color="#0072B2")
curve.set(ylabel="training loss (nats)", title="Loss of the last batch")
share.plot(epochs, 100 * np.array(accuracies), color="#D55E00")
share.set(xlabel="epoch", ylabel="test accuracy (%)", title="Held-out digits")
for axes in (curve, share):
    axes.grid(alpha=0.3)

# %%
# The test digits of which the network is wrong first, then others.

predicted = predict(x_test)
order = np.argsort(predicted == y_test, kind="stable")[:15]
figure, grid = plt.subplots(3, 5, figsize=(6, 4.6), layout="constrained")
figure.suptitle("Test digits and what the network takes them for")
for axes, index in zip(grid.flat, order, strict=True):
    axes.imshow(x_test[index].reshape(8, 8), cmap="gray_r")
    right = predicted[index] == y_test[index]
    text = f"{predicted[index]}" if right else f"{predicted[index]}, is {y_test[index]}"
    axes.set_title(text, color="#0072B2" if right else "#D55E00")
    axes.set(xticks=[], yticks=[])
