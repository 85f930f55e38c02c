"""The uses that ``bench`` times: a whole step, through the library that a person calls.

Wall time, the host's part included, beside the peers that do the same step in the same process.
`asv_benches/uses.py` has many more rows of the same kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numfuse.cli import timing
from numfuse.cli.steps import Maker, demo, inference, jax_layer, torch_step
from numfuse.cli.timing import Runs

#: Idle threads of OpenBLAS look for work for 2**28 cycles, on the cores of the next contestant: it
#: waits for so many seconds where a peer calls BLAS. A shorter timeout changes NumPy itself: beside
#: numfuse, a step of autograd took 1178 ms instead of 60, as its threads fell asleep.
BLAS_REST = 0.15


def tolerance(dtype: str, best: float) -> float:
    """Return how far from float64 a result may be, where the best peer's is `best` away.

    Beside 8 times that, a peer whose arithmetic is that of the exact results has none: 32 steps of
    float32 and float64, whose errors add up along a network, 4 of a half type, which sums wider.
    """
    step = float(ml_dtypes.finfo(dtype).eps)
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


def measure(
    use: Use,
    generator: np.random.Generator,
    seconds: float,
    rounds: int = 15,
    memory: Callable[[Runs], dict[str, int]] | None = None,
    sample: float = timing.SAMPLE,
) -> dict[str, Any]:
    """Check every contestant of a use against float64 and time them in interleaved rounds.

    There are as many rounds as fit into `seconds`: at least 3, at most `rounds`. `memory` returns
    the bytes that each of the contestants takes. `sample` is how long a stretch is, in seconds.
    """
    work = use.make(generator)
    runs, found = timing.checked(work.runs, work.runs.__getitem__, work.exact)
    runs |= work.unlike
    once = timing.interleave(runs, rounds=1, sample=0.0, rest=0.0, settle=work.settle)
    each = sum(2 * max(figures[0], sample) + use.rest for figures in once.values())
    figures = timing.interleave(
        runs,
        rounds=int(min(max(seconds / each, 3), rounds)) if runs else 0,
        sample=sample,
        rest=use.rest,
        seed=int(generator.integers(1 << 30)),
        settle=work.settle,
    )
    peers = [error for name, error in found["error"].items() if not name.startswith("numfuse")]
    return {
        "use": use.name,
        "dtype": work.dtype,
        **timing.summary(figures),
        **found,
        "tolerance": tolerance(work.dtype, min(peers, default=0.0)),
        "memory": memory(runs) if memory else {},
    }


def training(kind: str, rows: int, sizes: tuple[int, int, int], **options: Any) -> Use:
    """Return the row of a training step of PyTorch's modules."""
    layers = {"gated": "SwiGLU"}.get(kind, kind)
    name = f"torch modules, {layers} training step, {rows} rows, {'-'.join(map(str, sizes))}"
    return Use(name, ("torch",), torch_step(kind, rows, sizes, **options))


#: The rows of ``python -m numfuse bench``.
USES = (
    Use("the demo's training step, 128 rows", ("numpy",), demo),
    Use("NumPy, 1 row through 64-64-64-1 relu", ("numpy",), inference(1, (64, 64, 64, 1))),
    Use("NumPy, a head, 20000 x 100 -> 1", ("numpy",), inference(20000, (100, 1))),
    training("MLP", 64, (256, 1024, 256)),
    training("MLP", 2048, (256, 1024, 256)),
    training("gated", 1024, (256, 688, 256), activation="silu", block=True),
    Use("jax.jit, one 8 x 8 layer", ("jax",), jax_layer(8, 8)),
)


def chosen(words: list[str] | None) -> list[Use]:
    """Return the rows whose names hold one of these words, of the installed libraries."""
    found = [use for use in USES if use.installed()]
    return [use for use in found if not words or any(word in use.name for word in words)]
