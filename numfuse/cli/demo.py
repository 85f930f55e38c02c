"""Train a gated network on scikit-learn's handwritten digits with numfuse's forward and backward
calls, time its training step beside those of unfused NumPy, scikit-learn and, if it is installed,
PyTorch, and draw the learning curve and some of the test digits with their predictions.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

import numfuse as nf
from numfuse.cli import missing_extra, network
from numfuse.cli.network import Parameters
from numfuse.cli.timing import readable
from numfuse.cli.ufuncs import Array

RATE = 3e-3  # Adam's, at the start; it falls along a half cosine to 0
TEST_SHARE = 0.25
TIMED_ROUNDS = 9
# Seconds of a stretch: as in a training, most of its steps find awake threads and filled caches.
# (On a virtual machine the first 10 ms after a rest took 1.2 to 1.6 times as long, call by call.)
STRETCH = 0.06
# Single precision, sums of at most 256 terms: 1e-5 is what was seen between any two of the three.
GRADIENT_TOLERANCE = 1e-4
UNLIKE = "a network of these widths with relu and no gate"
Curve = list[tuple[float, float]]  # loss and test accuracy after each epoch


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "where to write the picture (default: %(default)s)"
    add("--output", type=Path, default=Path("numfuse_demo.png"), metavar="PATH", help=text)
    add("--backend", metavar="NAME", help="cpu (the default), cuda, webgpu or reference")
    add("--epochs", type=positive, default=60, help="default: %(default)s")
    text = "rows per training step (default: %(default)s)"
    add("--batch", type=positive, default=128, help=text)
    add("--seed", type=int, default=0, help="default: %(default)s")
    text = "time PyTorch's step under torch.compile, too"
    add("--compile", action="store_true", help=text)


class Digits(NamedTuple):
    """8 x 8 pictures as rows of 64 pixels about zero; a quarter of them held out for the test."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    background: float


def load_digits(seed: int) -> Digits:
    """Every class has the same share of the training and of the test set (a stratified split)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pictures, labels = load_digits(return_X_y=True)
    x = (pictures / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        x, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    mean = x_train.mean()
    return Digits(x_train - mean, y_train, x_test - mean, y_test, -float(mean))


def shifted(x: Array, background: float, generator: np.random.Generator) -> Array:
    """Each picture moved by at most one pixel each way, half of them not at all in a direction.

    A training set of 1347 pictures is small: this takes the test accuracy from 98 % to 99 %.
    """
    rows = np.arange(len(x))[:, None, None]
    padded = np.pad(
        x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)), constant_values=np.float32(background)
    )
    moves = generator.choice(3, size=(2, len(x), 1), p=(1 / 6, 2 / 3, 1 / 6))
    down, right = moves + np.arange(8)
    return padded[rows, down[:, :, None], right[:, None, :]].reshape(-1, 64)


def accuracy(parameters: Parameters, x: Array, labels: Array) -> float:
    return float((network.predict(parameters, x).argmax(axis=1) == labels).mean())


def train(
    digits: Digits, parameters: Parameters, epochs: int, batch: int, seed: int
) -> Iterator[tuple[float, float]]:
    """Train the parameters by Adam; yield loss and test accuracy after each epoch.

    The test set is looked at for the curve, never for a decision.
    """
    generator = np.random.default_rng(seed)
    gradients = Parameters.zeros()
    adam = network.FusedAdam(parameters, RATE)
    rows = len(digits.x_train)
    total = epochs * (rows // batch)
    for _ in range(epochs):
        order = generator.permutation(rows)
        losses = []
        for first in range(0, rows - batch + 1, batch):
            chosen = order[first : first + batch]
            x = shifted(digits.x_train[chosen], digits.background, generator)
            adam.rate = RATE * 0.5 * (1 + math.cos(math.pi * adam.steps / total))
            losses.append(network.fused_gradients(parameters, gradients, x, digits.y_train[chosen]))
            adam.update(gradients)
        yield sum(losses) / len(losses), accuracy(parameters, digits.x_test, digits.y_test)


def with_bar(results: Iterator[tuple[float, float]], epochs: int) -> Curve:
    """Train; a moving bar on a terminal, a line per sixth of the training in a file or a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    curve: Curve = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"epoch   0/{epochs}", total=epochs)
        for epoch, (loss, accuracy) in enumerate(results, 1):
            curve.append((loss, accuracy))
            text = f"epoch {epoch:3d}/{epochs}   loss {loss:.4f}   test accuracy {accuracy:.4f}"
            bar.update(task, completed=epoch, description=text)
            if bar.disable and (epoch == epochs or epoch % max(1, epochs // 6) == 0):
                print(text, flush=True)
    return curve


def compare_steps(start: Parameters, x: Array, labels: Array, compiled: bool) -> None:
    """Print the time of a training step: numfuse's, and those of NumPy and other libraries."""
    from numfuse.cli.steps import Work
    from numfuse.cli.uses import Use, measure

    runs = network.steps(start, x, labels, compiled)
    other = {"scikit-learn": network.sklearn_step(x, labels)}
    work = Work(runs, runs["numfuse"], "float32", unlike=other)
    use = Use("demo", ("numpy",), lambda _: work)
    generator = np.random.default_rng(0)
    found = measure(use, generator, math.inf, TIMED_ROUNDS, sample=STRETCH)
    medians, errors = found["seconds"], found["error"]
    base, width = medians["numfuse"], max(map(len, medians))
    print(
        f"\ntime per training step ({len(x)} rows, float32; median of {TIMED_ROUNDS} rounds, "
        "one after the other in each):"
    )
    for name, seconds in medians.items():
        text = f"  {name:{width}} {readable(seconds):>8}"
        if name != "numfuse":
            text += f"   {seconds / base:.2f} x numfuse's time; "
            how = f"gradients agree to {errors[name]:.0e}" if name in errors else UNLIKE
            text += how
        print(text)
    for name, reason in found["failed"].items():
        print(f"  {name:{width}} failed: {reason}")
    if "PyTorch" not in runs:
        print(f"  {'PyTorch':{width}} is not installed: not compared")
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
    from numfuse.cli.picture import draw

    try:
        chosen = nf.use_backend(arguments.backend) if arguments.backend else nullcontext()
        if not arguments.output.parent.is_dir():
            raise ValueError(f"no directory {arguments.output.parent}")
    except (nf.BackendUnavailable, ValueError) as error:
        print(f"numfuse demo: {error}", file=sys.stderr)
        return 2

    digits = load_digits(arguments.seed)
    print(
        f"{len(digits.x_train)} digits to learn, {len(digits.x_test)} held out for the test; "
        f"{network.PIXELS} pixels -> gated layer of {network.HIDDEN} -> {network.MIXED} -> "
        f"{network.CLASSES} classes"
    )
    with chosen:
        parameters = Parameters.random(np.random.default_rng(arguments.seed))
        start = parameters.copy()
        batch = min(arguments.batch, len(digits.x_train))
        x, labels = digits.x_train[:batch], digits.y_train[:batch]

        print("compiling kernels, once; cached afterwards ...", flush=True)
        began = time.perf_counter()
        network.fused_gradients(start, Parameters.zeros(), x, labels)
        accuracy(start, digits.x_test, digits.y_test)
        print(f"ready after {time.perf_counter() - began:.1f} s")
        call = nf.last_call()
        if call is not None:
            print(f"running on {call.backend}: {call.device}")

        began = time.perf_counter()
        epochs = arguments.epochs
        curve = with_bar(train(digits, parameters, epochs, batch, arguments.seed), epochs)
        print(f"trained in {time.perf_counter() - began:.1f} s")
        compare_steps(start, x, labels, arguments.compile)
        draw(arguments.output, parameters, digits, curve)
        print(f"\npicture: {arguments.output}")
        print(f"test accuracy: {curve[-1][1]:.4f}")
    return 0
