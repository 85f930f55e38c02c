"""scikit-learn's perceptrons by numfuse beside its own: whole fits, in one process.

    python asv_benches/sklearn_fit.py                    the table of docs/guide/scikit_learn.md
    python asv_benches/sklearn_fit.py --only digits      rows whose name has a word
    python asv_benches/sklearn_fit.py --draw 7 10        10 rows that seed 7 draws
    python asv_benches/sklearn_fit.py --threads 1        both on one thread

Contestants take turns in a fresh random order each round, after a rest in which the other's threads
fall asleep; figures are medians of whole calls, `fit` with its checks and its labels, `predict`
likewise. Both begin with the same weights and take the same batches, and a row is measured once
their scores agree. A ratio is scikit-learn's time by numfuse's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Seconds before each contestant; idle threads of OpenBLAS look for work on their cores for 1 ms,
#: with the environment that `main` sets.
REST = 0.02
#: How far scores may be apart: of accuracies and of R2, both at most 1. In float32 a unit whose sum
#: rounds to the other side of relu's kink goes another way.
APART = {"float64": 1e-9, "float32": 0.01}


class Row(NamedTuple):
    """A fit, and what is predicted after it."""

    name: str
    data: str
    dtype: str
    epochs: int
    options: dict[str, Any]


def digits(name: str, dtype: str, epochs: int, **options: Any) -> Row:
    return Row(f"{name}, {dtype}", "digits", dtype, epochs, options)


def regression(name: str, dtype: str, epochs: int, **options: Any) -> Row:
    return Row(f"{name}, {dtype}", "20000 x 50", dtype, epochs, options)


ROWS = [
    digits("digits, batches of 64", "float64", 200, batch_size=64),
    digits("digits, batches of 64", "float32", 30, batch_size=64),
    digits("digits, automatic batches", "float64", 30),
    digits("digits, sgd, batches of 64", "float64", 30, batch_size=64, solver="sgd"),
    digits("digits, lbfgs", "float64", 40, solver="lbfgs"),
    regression("regression, 3 x 64", "float64", 3, hidden_layer_sizes=(64,) * 3),
    regression("regression, 3 x 64", "float32", 3, hidden_layer_sizes=(64,) * 3),
    regression("regression, 3 x 64, tanh", "float64", 3, hidden_layer_sizes=(64,) * 3,
               activation="tanh"),
    regression("regression, 512", "float32", 2, hidden_layer_sizes=(512,)),
]  # fmt: skip


def drawn(seed: int, count: int) -> Iterator[Row]:
    """Yield rows that nobody chose."""
    import numpy as np

    generator = np.random.default_rng(seed)
    for _ in range(count):
        dtype = str(generator.choice(["float32", "float64"]))
        hidden = tuple(int(2**x) for x in generator.uniform(3, 8, generator.integers(1, 5)))
        batch, features = (int(2**x) for x in generator.uniform((4, 2), (9, 8)))
        options = {
            "hidden_layer_sizes": hidden, "batch_size": batch,
            "activation": str(generator.choice(["relu", "tanh", "logistic"])),
            "solver": str(generator.choice(["adam", "sgd"])),
        }  # fmt: skip
        data, widths = f"4000 x {features}", " x ".join(map(str, hidden))
        words = f"{options['solver']}, {options['activation']}, {widths}, batches of {batch}"
        yield Row(f"{data}, {words}, {dtype}", data, dtype, 2, options)


def data_of(row: Row) -> tuple[Any, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    if row.data == "digits":
        x, y = load_digits(return_X_y=True)
        return x if row.dtype == "float64" else x.astype(row.dtype), y
    samples, features = map(int, row.data.split(" x "))
    x = np.random.default_rng(0).standard_normal((samples, features))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    return x.astype(row.dtype), y.astype(row.dtype)


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, ratios and scores of a row."""
    from sklearn import neural_network

    from numfuse.adapters import sklearn as adapter
    from numfuse.cli import timing

    x, y = data_of(row)
    kind = "MLPClassifier" if row.data == "digits" else "MLPRegressor"
    how = {"max_iter": row.epochs, "random_state": 0, **row.options}
    made = {"scikit-learn": neural_network, "numfuse": adapter}
    made = {name: getattr(module, kind)(**how).fit(x, y) for name, module in made.items()}
    scores = {name: float(estimator.score(x, y)) for name, estimator in made.items()}
    apart = abs(scores["numfuse"] - scores["scikit-learn"])
    if not apart <= APART[row.dtype]:
        raise SystemExit(f"WRONG RESULT {row.name}: scores {scores}")
    found: dict[str, Any] = {"row": row.name, "scores": scores}
    calls: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "fit": lambda estimator: lambda: estimator.fit(x, y),
        "predict": lambda estimator: lambda: estimator.predict(x),
    }
    for what, call in calls.items():
        runs = {name: call(estimator) for name, estimator in made.items()}
        # (a fit wakes its threads and fills its caches in its first steps)
        seconds = timing.interleave(runs, rounds=rounds, rest=REST, sample=0.0)
        medians = {name: timing.median(times) for name, times in seconds.items()}
        found[what] = {name: 1e3 * t for name, t in medians.items()}
        found[f"{what} ratio"] = medians["scikit-learn"] / medians["numfuse"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="append one object a row")
    arguments = parser.parse_args()
    from numfuse.cli.session import OPENBLAS_TIMEOUT, THREAD_VARIABLES

    # Libraries read these when they are loaded, before anything here could set them.
    wanted = dict.fromkeys(THREAD_VARIABLES, str(arguments.threads))
    wanted["OPENBLAS_THREAD_TIMEOUT"] = OPENBLAS_TIMEOUT
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    from sklearn.exceptions import ConvergenceWarning

    warnings.simplefilter("ignore", ConvergenceWarning)
    rows = list(drawn(*arguments.draw)) if arguments.draw else ROWS
    print("| fit | scikit-learn, ms | numfuse, ms | ratio | of `predict` | score |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        if arguments.only and not any(word in row.name for word in arguments.only):
            continue
        found = measure(row, arguments.rounds)
        fit, score = found["fit"], found["scores"]["numfuse"]
        print(
            f"| {row.name} | {fit['scikit-learn']:.1f} | {fit['numfuse']:.1f} | "
            f"{found['fit ratio']:.2f} | {found['predict ratio']:.2f} | {score:.3f} |",
            flush=True,
        )
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
