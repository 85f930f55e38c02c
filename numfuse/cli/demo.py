"""Train a gated network on scikit-learn's handwritten digits with numfuse's forward and backward
calls, time its training step beside the same step in unfused NumPy and (if installed) PyTorch, and
draw the learning curve and some of the test digits with their predictions.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from numfuse.cli import missing_extra

if TYPE_CHECKING:
    from numfuse.cli.network import Parameters
    from numfuse.cli.ufuncs import Array

RATE = 3e-3  # Adam's, at the start; it falls along a half cosine to 0
TEST_SHARE = 0.25
TIMED_ROUNDS = 25
# Single precision, sums of at most 256 terms: 1e-5 is what was seen between any two of the three.
GRADIENT_TOLERANCE = 1e-4


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("numfuse_demo.png"),
        metavar="PATH",
        help="where to write the picture (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="cpu (the default), cuda, webgpu or reference"
    )
    parser.add_argument("--epochs", type=positive, default=60, help="default: %(default)s")
    parser.add_argument(
        "--batch", type=positive, default=128, help="rows per training step (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


class Digits(NamedTuple):
    """8 x 8 pictures as rows of 64 pixels about zero; a quarter of them held out for the test."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    background: float


class Progress(NamedTuple):
    """The figures of the learning curve, one for each epoch."""

    loss: list[float]
    test_accuracy: list[float]


def load_digits(seed: int) -> Digits:
    """Every class has the same share of the training and of the test set (a stratified split)."""
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pictures, labels = load_digits(return_X_y=True)
    x = (pictures / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    mean = x_train.mean()
    return Digits(x_train - mean, y_train, x_test - mean, y_test, -float(mean))


def shifted(x: Array, background: float, generator: object) -> Array:
    """Each picture moved by at most one pixel each way, half of them not at all in a direction.

    A training set of 1347 pictures is small: this takes the test accuracy from 98 % to 99 %.
    """
    import numpy as np

    assert isinstance(generator, np.random.Generator)
    rows = np.arange(len(x))[:, None, None]
    padded = np.pad(
        x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=np.float32(background)
    )
    down, right = generator.choice(3, size=(2, len(x)), p=(1 / 6, 2 / 3, 1 / 6))
    window = np.arange(8)
    down, right = down[:, None] + window, right[:, None] + window
    return padded[rows, down[:, :, None], right[:, None, :]].reshape(-1, 64)


def accuracy(parameters: Parameters, x: Array, labels: Array) -> float:
    from numfuse.cli.network import predict

    return float((predict(parameters, x).argmax(axis=1) == labels).mean())


def train(
    digits: Digits,
    start: Parameters,
    epochs: int,
    batch: int,
    seed: int,
    after_epoch: Callable[[int, Progress], None],
) -> tuple[Parameters, Progress]:
    """Adam over whole epochs. The test set is looked at for the curve, never for a decision."""
    import numpy as np

    from numfuse.cli.network import Adam, Parameters, fused_gradients

    generator = np.random.default_rng(seed)
    parameters, gradients = start.copy(), Parameters.zeros()
    adam = Adam(parameters, RATE)
    rows = len(digits.x_train)
    batch = min(batch, rows)
    steps = epochs * (rows // batch)
    progress = Progress([], [])
    for epoch in range(1, epochs + 1):
        order = generator.permutation(rows)
        losses = []
        for first in range(0, rows - batch + 1, batch):
            chosen = order[first : first + batch]
            x = shifted(digits.x_train[chosen], digits.background, generator)
            adam.rate = RATE * 0.5 * (1 + math.cos(math.pi * adam.steps / steps))
            losses.append(fused_gradients(parameters, gradients, x, digits.y_train[chosen]))
            adam.update(gradients)
        progress.loss.append(sum(losses) / len(losses))
        progress.test_accuracy.append(accuracy(parameters, digits.x_test, digits.y_test))
        after_epoch(epoch, progress)
    return parameters, progress


def train_with_bar(
    digits: Digits, start: Parameters, epochs: int, batch: int, seed: int
) -> tuple[Parameters, Progress]:
    """A moving bar on a terminal, a line per sixth of the training in a file or a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"epoch   0/{epochs}", total=epochs)

        def tell(epoch: int, progress: Progress) -> None:
            text = (
                f"epoch {epoch:3d}/{epochs}   loss {progress.loss[-1]:.4f}   "
                f"test accuracy {progress.test_accuracy[-1]:.4f}"
            )
            bar.update(task, completed=epoch, description=text)
            if bar.disable and (epoch == epochs or epoch % max(1, epochs // 6) == 0):
                print(text, flush=True)

        return train(digits, start, epochs, batch, seed, tell)


def compare_steps(start: Parameters, x: Array, labels: Array) -> None:
    """Print the time of a training step: numfuse, unfused NumPy and, if installed, PyTorch."""
    from numfuse.cli import network, timing

    ours, numpys = network.Parameters.zeros(), network.Parameters.zeros()
    network.fused_gradients(start, ours, x, labels)
    network.unfused_gradients(start, numpys, x, labels)
    # At a rate of 0 every timed step does the whole arithmetic, on the same numbers.
    steps = {
        "numfuse": network.array_step(network.fused_gradients, start, 0.0, x, labels),
        "NumPy": network.array_step(network.unfused_gradients, start, 0.0, x, labels),
    }
    errors = {"NumPy": network.gradient_error(ours, numpys)}
    if importlib.util.find_spec("torch") is not None:
        torchs = network.TorchNetwork(start, 0.0, x, labels)
        steps["PyTorch"] = torchs.step
        errors["PyTorch"] = network.gradient_error(ours, torchs.gradients())

    seconds = timing.interleave(steps, rounds=TIMED_ROUNDS)
    medians = {name: timing.median(figures) for name, figures in seconds.items()}
    base = medians["numfuse"]
    print(
        f"\ntime per training step ({len(x)} rows, float32; median of {TIMED_ROUNDS} rounds, "
        "one after the other in each):"
    )
    print(f"  {'numfuse':8} {timing.readable(base):>8}")
    for name, error in errors.items():
        print(
            f"  {name:8} {timing.readable(medians[name]):>8}   "
            f"{medians[name] / base:.2f} x numfuse's time; gradients agree to {error:.0e}"
        )
    if "PyTorch" not in steps:
        print("  PyTorch  is not installed: not compared")
    print(verdict(medians))
    wrong = {name: error for name, error in errors.items() if not error < GRADIENT_TOLERANCE}
    if wrong:
        raise ArithmeticError(f"the gradients do not agree: relative difference {wrong}")


def verdict(medians: dict[str, float]) -> str:
    """Who is faster, in words; a difference below 3 % is within the noise of most machines."""
    fastest, second = sorted(medians, key=medians.__getitem__)[:2]
    ratio = medians[second] / medians[fastest]
    if ratio < 1.03:
        return f"{fastest} and {second} take the same time within 3 %."
    return f"{fastest} is the fastest here, {ratio:.2f} times as fast as {second}."


def run(arguments: argparse.Namespace) -> int:
    if missing_extra("demo", ("sklearn", "matplotlib", "rich"), "demo"):
        return 2
    import numpy as np

    import numfuse as nf
    from numfuse.cli.network import CLASSES, HIDDEN, MIXED, PIXELS, Parameters, fused_gradients
    from numfuse.cli.picture import draw

    try:
        chosen = nf.use_backend(arguments.backend) if arguments.backend else nullcontext()
    except (nf.BackendUnavailable, ValueError) as error:
        print(f"numfuse demo: {error}", file=sys.stderr)
        return 2
    if not arguments.output.parent.is_dir():
        print(f"numfuse demo: no directory {arguments.output.parent}", file=sys.stderr)
        return 2

    digits = load_digits(arguments.seed)
    print(
        f"{len(digits.x_train)} digits to learn, {len(digits.x_test)} held out for the test; "
        f"{PIXELS} pixels -> gated layer of {HIDDEN} -> {MIXED} -> {CLASSES} classes"
    )
    with chosen:
        start = Parameters.random(np.random.default_rng(arguments.seed))
        batch = min(arguments.batch, len(digits.x_train))
        x, labels = digits.x_train[:batch], digits.y_train[:batch]

        print("compiling kernels, once; cached afterwards ...", flush=True)
        began = time.perf_counter()
        fused_gradients(start, Parameters.zeros(), x, labels)
        accuracy(start, digits.x_test, digits.y_test)
        print(f"ready after {time.perf_counter() - began:.1f} s")
        call = nf.last_call()
        if call is not None:
            print(f"running on {call.backend}: {call.device}")

        began = time.perf_counter()
        parameters, progress = train_with_bar(
            digits, start, arguments.epochs, arguments.batch, arguments.seed
        )
        print(f"trained in {time.perf_counter() - began:.1f} s")
        compare_steps(start, x, labels)
        draw(arguments.output, parameters, digits, progress)
        print(f"\npicture: {arguments.output}")
        print(f"test accuracy: {progress.test_accuracy[-1]:.4f}")
    return 0
