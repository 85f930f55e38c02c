"""The demo's picture: the learning curve beside test digits with their predictions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from numfuse.cli.network import CLASSES, SMOOTHING, Parameters, predict

if TYPE_CHECKING:
    from numfuse.cli.demo import Curve, Digits

# Blue and orange of the Okabe-Ito palette: apart for every kind of colour vision.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
ROWS, COLUMNS = 4, 6


def note(axes: Any, text: str, at: Any, *, dx: int, dy: int, **style: Any) -> None:
    """Write a text at a point, to its left, moved by some points of print."""
    va = "bottom" if dy > 0 else "top"
    axes.annotate(text, at, xytext=(dx, dy), textcoords="offset points", ha="right", va=va, **style)


def draw(path: Path, parameters: Parameters, digits: Digits, curve: Curve) -> None:
    """Write the picture. Wrong predictions come first in the grid, so that none hides."""
    from matplotlib.figure import Figure  # not pyplot: no display is needed, nothing stays open
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    predicted = predict(parameters, digits.x_test).argmax(axis=1)
    wrong = predicted != digits.y_test
    losses, accuracies = zip(*curve, strict=True)
    epochs = np.arange(1, len(curve) + 1)

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    left, right = cast(Any, figure.subfigures(1, 2, width_ratios=(1, 1.12), wspace=0.04))

    loss_axes, accuracy_axes = left.subplots(2, 1, sharex=True)
    left.suptitle("Learning curve", fontsize=13, weight="bold")
    marker = "o" if len(epochs) < 3 else None
    loss_axes.plot(epochs, losses, color=BLUE, linewidth=2, marker=marker)
    loss_axes.set(ylabel="training loss\n(cross-entropy, nats)", ylim=(0, None))
    # Against smoothed labels a perfect network still pays their entropy.
    right_class, other = 1 - SMOOTHING + SMOOTHING / CLASSES, SMOOTHING / CLASSES
    floor = -right_class * math.log(right_class) - (CLASSES - 1) * other * math.log(other)
    loss_axes.axhline(floor, color=GREY, linewidth=1, linestyle=":")
    least = f"least possible with smoothed labels: {floor:.2f}"
    note(loss_axes, least, (epochs[-1], floor), dx=-4, dy=-4, color=GREY, fontsize=9)
    accuracy_axes.plot(epochs, accuracies, color=ORANGE, linewidth=2, marker=marker)
    low = min(0.9, 0.1 * int(10 * min(accuracies)))
    accuracy_axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(low, 1.003))
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    accuracy_axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    place, reached = (epochs[-1], accuracies[-1]), f"{accuracies[-1]:.2%} after {len(curve)} epochs"
    note(accuracy_axes, reached, place, dx=-4, dy=-26, color=ORANGE, weight="bold")
    for axes in (loss_axes, accuracy_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)

    title = f"Test digits and predictions   ({wrong.sum()} of {len(wrong)} wrong)"
    right.suptitle(title, fontsize=13, weight="bold")
    # A stable sort keeps the test set's own order on either side.
    shown = np.argsort(~wrong, kind="stable")[: ROWS * COLUMNS]
    for axes, index in zip(right.subplots(ROWS, COLUMNS).flat, shown, strict=True):
        axes.imshow(digits.x_test[index].reshape(8, 8), cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        title, style, edge = str(predicted[index]), {"color": BLUE}, ("#cccccc", 0.8)
        if wrong[index]:
            title += f", is {digits.y_test[index]}"
            style, edge = {"color": ORANGE, "weight": "bold"}, (ORANGE, 2.5)
        axes.set_title(title, fontsize=11, pad=3, **style)
        axes.spines[:].set(color=edge[0], linewidth=edge[1])
    figure.savefig(path, format="png")
