"""The uses that ``bench`` times: a whole step, through the library that a person calls.

Wall time, the host's part included, beside the peers that do the same step in the same process.
`asv_benches/uses.py` has many more rows of the same kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import numfuse as nf
from numfuse.cli import timing
from numfuse.cli.peers import relative_error
from numfuse.cli.steps import Maker, Runs, demo, inference, jax_layer, torch_step
from numfuse.cli.ufuncs import Array

#: The distance between 1 and the next number, of the dtypes that NumPy has not.
STEPS = {"bfloat16": 2.0**-7}


#: Idle threads of OpenBLAS look for work for 2**28 cycles, on the cores of the next contestant: it
#: waits for so many seconds where a peer calls BLAS. A shorter timeout changes NumPy itself: beside
#: numfuse, a step of autograd took 1178 ms instead of 60, as its threads fell asleep.
BLAS_REST = 0.15


def tolerance(dtype: str, best: float) -> float:
    """Return how far from float64 a result may be, where the best peer's is `best` away.

    Beside 8 times that, a peer whose arithmetic is that of the exact results has none: 32 steps of
    float32 and float64, whose errors add up along a network, 4 of a half type, which sums wider.
    """
    step = STEPS.get(dtype) or float(np.finfo(dtype).eps)
    return 8 * best + (32 if step < 1e-5 else 4) * step


class Use(NamedTuple):
    """A row of the table: its name, the modules it needs, and what makes its contestants."""

    name: str
    modules: tuple[str, ...]
    make: Maker

    def installed(self) -> bool:
        return all(importlib.util.find_spec(module) for module in self.modules)

    @property
    def rest(self) -> float:
        """Seconds before each contestant, for the threads of the one before to fall asleep."""
        return BLAS_REST if {"numpy", "autograd"} & set(self.modules) else timing.REST


def arrays(found: Any) -> tuple[Array, ...]:
    """Return the results of a step, of any library and in any nesting, as float64 arrays."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return tuple(y for x in found for y in arrays(x))
    if hasattr(found, "detach"):
        found = found.detach().double().cpu().numpy()
    elif not isinstance(found, (np.ndarray, np.generic, float)):
        found = nf.to_numpy(found)
    return (np.array(found, np.float64),)


def measure(
    use: Use,
    generator: np.random.Generator,
    seconds: float,
    rounds: int = 15,
    memory: Callable[[Runs], dict[str, int]] | None = None,
) -> dict[str, Any]:
    """Check every contestant of a use against float64 and time them in interleaved rounds.

    There are as many rounds as fit into `seconds`: at least 3, at most `rounds`. `memory` returns
    the bytes that each of the contestants takes.
    """
    work = use.make(generator)
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    runs: Runs = {}
    right = arrays(work.exact())
    for name, run in work.runs.items():
        try:
            errors[name] = relative_error(arrays(run()), right)
        except Exception as error:  # a contestant that cannot is a fact to report
            text = str(error).splitlines() or [""]
            failed[name] = f"{type(error).__name__}: {text[0]}"[:200]
            continue
        runs[name] = run
    del right
    peers = [error for name, error in errors.items() if not name.startswith("numfuse")]

    def settled(run: Callable[[], Any]) -> Callable[[], None]:
        def once() -> None:
            run()
            work.settle()

        return once

    once = timing.interleave(
        {name: settled(run) for name, run in runs.items()}, rounds=1, sample=0.0, rest=0.0
    )
    each = sum(2 * max(figures[0], timing.SAMPLE) + use.rest for figures in once.values())
    figures = timing.interleave(
        runs,
        rounds=int(min(max(seconds / each, 3), rounds)) if runs else 0,
        rest=use.rest,
        seed=int(generator.integers(1 << 30)),
        settle=work.settle,
    )
    return {
        "use": use.name,
        "dtype": work.dtype,
        "seconds": {name: timing.median(x) for name, x in figures.items()},
        "spread": {name: timing.spread(x) for name, x in figures.items()},
        "error": errors,
        "tolerance": tolerance(work.dtype, min(peers, default=0.0)),
        "failed": failed,
        "memory": memory(runs) if memory else {},
    }


#: The rows of ``python -m numfuse bench``.
USES = (
    Use("the demo's training step, 128 rows", ("numpy",), demo),
    Use("NumPy, 1 row through 64-64-64-1 relu", ("numpy",), inference(1, (64, 64, 64, 1))),
    Use("NumPy, a head, 20000 x 100 -> 1", ("numpy",), inference(20000, (100, 1))),
    Use(
        "torch modules, MLP training step, 64 rows, 256-1024-256",
        ("torch",),
        torch_step("MLP", 64, (256, 1024, 256)),
    ),
    Use(
        "torch modules, MLP training step, 2048 rows, 256-1024-256",
        ("torch",),
        torch_step("MLP", 2048, (256, 1024, 256)),
    ),
    Use(
        "torch modules, SwiGLU training step, 1024 rows, 256-688-256",
        ("torch",),
        torch_step("gated", 1024, (256, 688, 256), activation="silu", block=True),
    ),
    Use("jax.jit, one 8 x 8 layer", ("jax",), jax_layer(8, 8)),
)


def chosen(words: list[str] | None) -> list[Use]:
    """Return the rows whose names hold one of these words, of the installed libraries."""
    found = [use for use in USES if use.installed()]
    return [use for use in found if not words or any(word in use.name for word in words)]


def measured(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the rows that a plan names, one after the other."""
    generator = np.random.default_rng(plan["seed"])
    for use in chosen(plan["uses"]):
        yield measure(use, generator, plan["seconds"], plan["rounds"])
