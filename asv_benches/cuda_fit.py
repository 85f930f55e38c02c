"""The CUDA backend's models of time beside measurements, and their constants fitted to these.

    python asv_benches/cuda_fit.py                         what `cuda_sweep.py` has kept
    python asv_benches/cuda_fit.py run.jsonl --gpu H200    one file, of GPUs whose name holds this
    python asv_benches/cuda_fit.py --steps 0               the error of today's constants alone

A sweep times other ways of one product of some cases: other tiles, parts of K, copies. The models
(`block_tiling.cost`, `hopper.tiling.cycles`, `few_tiling.thin_cost`, `copies.added`) give each a
cost, which a rate and a constant make to seconds, and no way is faster than memory. All constants
are fitted by least squares of log(predicted / measured), one kind of kernels at a time. Printed are
the median and the 95th percentile of its absolute value, and those of the regret: how much longer
the way takes that the model would choose than the fastest one. `--held 4` fits to three quarters of
the products and prints the errors of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "history" / "cuda_sweep.jsonl"
#: Steps of the fit, and the change of a constant's logarithm by which its effect is found.
STEPS, NUDGE = 12, 0.05
#: How far a constant may go from today's, and the weight that holds it there where data say little:
#: a factor of e counts as an error of this much in one measurement.
FARTHEST, HOLD = 1.5, 0.3
#: A residual beyond this counts as one of it: a run that something else disturbed decides nothing.
CLIP = 0.7
#: Fields of a product that are numbers and words, and those that are arrays.
_PLAIN = ("m", "n", "k", "places", "accumulator", "precision", "sums", "free", "whole")
_ARRAYS = ("x", "y", "out", "bias", "extra", "pre")


# --- products as JSON -----------------------------------------------------------------------------
def facts(product: Any) -> dict[str, Any]:
    """Return what a model asks of a product, as JSON has it."""
    found = {name: getattr(product, name) for name in _PLAIN}
    for name in _ARRAYS:
        operand = getattr(product, name)
        found[name] = None if operand is None else asdict(operand)
    return found | {"curved": product.is_curved}


def product_of(known: dict[str, Any]) -> Any:
    """Return the product of such facts; its epilogue is one of their kind."""
    import numfuse as nf
    from numfuse import epilogues
    from numfuse.backends.cuda.plan.product import Operand, Product

    arrays = {
        name: None if known[name] is None else Operand(
            known[name]["dtype"], tuple(known[name]["strides"]), known[name]["alignment"])
        for name in _ARRAYS
    }  # fmt: skip
    act = nf.activations()["gelu" if known["curved"] else "none"]
    epilogue = epilogues.layer(act.curve).select("out")
    return Product(**{name: known[name] for name in _PLAIN}, **arrays, epilogue=epilogue)


# --- measurements ---------------------------------------------------------------------------------
@dataclass
class Measured:
    """One product, and the seconds of its ways by name."""

    product: Any
    info: Any
    chosen: str
    seconds: dict[str, float]

    @property
    def nbytes(self) -> float:
        """Bytes that go through memory at least."""
        p = self.product
        x, y = (p.places if o.strides[0] else 1 for o in (p.x, p.y))
        size = x * p.m * p.k * p.x.itemsize + y * p.k * p.n * p.y.itemsize
        return float(size + p.places * p.m * p.n * p.out.itemsize)


def measured(paths: Iterable[Path], gpu: str = "") -> list[Measured]:
    """Return the products of which ways were timed, on GPUs whose name holds `gpu`."""
    from numfuse.backends.cuda.plan.product import DeviceInfo

    found = []
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the last line of a run that was cut off
                continue
            ways = record.get("ways")
            if not ways or gpu not in ways["device"]["name"]:
                continue
            told = {**ways["device"], "capability": tuple(ways["device"]["capability"])}
            seconds = dict(ways["seconds"])
            untouched = seconds.pop("", None)
            if ways["chosen"] and untouched is not None:
                seconds[ways["chosen"]] = untouched
            made = product_of(ways["product"])
            found.append(Measured(made, DeviceInfo(**told), ways["chosen"], seconds))
    return found


# --- models ---------------------------------------------------------------------------------------
@dataclass
class Constant:
    """A constant of a model: where it is, and what it is now."""

    name: str
    value: float
    put: Callable[[float], None]


def kind_of(name: str, dtype: str) -> str:
    """Return the kind of kernels of a way, which has a rate of its own."""
    tier = name.partition(":")[0]
    if tier == "cores":
        return f"{'few rows' if ' rows, K in ' in name else 'cores'} {dtype}"
    return f"{tier} {dtype}"


def constants(kind: str) -> list[Constant]:
    """Return the constants of a kind's model."""
    from numfuse.backends.cuda import block_tiling, few_tiling
    from numfuse.backends.cuda.kernels.ampere import copies
    from numfuse.backends.cuda.kernels.hopper import tiling as hopper

    def number(module: Any, name: str) -> Constant:
        return Constant(name, getattr(module, name), lambda x: setattr(module, name, x))

    def part(module: Any, name: str, at: Any) -> Constant:
        def put(x: float) -> None:
            old = getattr(module, name)
            if isinstance(old, dict):
                setattr(module, name, {**old, at: x})
            else:
                setattr(module, name, (*old[:at], x, *old[at + 1 :]))

        return Constant(f"{name}[{at}]", getattr(module, name)[at], put)

    def speed(name: str, at: int) -> Constant:
        def put(x: float) -> None:
            old = getattr(block_tiling, name)
            setattr(block_tiling, name, (*old[:at], replace(old[at], speed=x), *old[at + 1 :]))

        tile = getattr(block_tiling, name)[at]
        return Constant(f"speed of {name}[{at}], {tile}", tile.speed, put)

    def cycles(at: int) -> Constant:
        def put(x: float) -> None:
            old = hopper.HOPPER_TILES
            hopper.HOPPER_TILES = (*old[:at], (old[at][0], x), *old[at + 1 :])  # type: ignore

        tile, now = hopper.HOPPER_TILES[at]
        return Constant(f"cycles of {tile}", now, put)

    tier, _, dtype = kind.rpartition(" ")
    if tier == "few rows":
        names = "THIN_FILL", "THIN_BYTES", "FMAS"
        return [*(number(few_tiling, name) for name in names), number(block_tiling, "CORE_LAUNCH")]
    if tier == "wgmma":
        found = [cycles(i) for i in range(1, len(hopper.HOPPER_TILES))]
        for name in ("HOPPER_FINISH", "HOPPER_HIDDEN"):
            found += [part(hopper, name, i) for i in range(2)]
        names = "HOPPER_ROWS", "HOPPER_JOIN", "HOPPER_PLANE"
        return [*found, *(number(hopper, name) for name in names)]
    blocks = {
        "float32": ("CORE_BLOCKS",), "float64": ("DOUBLE_BLOCKS", "DOUBLE_LONG"),
    }.get(dtype, ("HALF_BLOCKS", "HALF_BLOCKS_HELD"))  # fmt: skip
    found = [speed(name, i) for name in blocks for i in range(1, len(getattr(block_tiling, name)))]
    engine = "BUSY_SUMS", "BUSY_SUMS_POWER", "FILL", "LAUNCH_COST", "PLANE_COST"
    if dtype == "float64":
        engine = "DOUBLE_BUSY_SUMS", "DOUBLE_BUSY_POWER", "FILL", "DOUBLE_LAUNCH", "PLANE_COST"
    if tier == "cores":
        engine = "BUSY_WARPS", "BUSY_WARPS_POWER", "CORE_FILL", "CORE_LAUNCH", "CORE_PLANE"
    found += [number(block_tiling, name) for name in engine]
    if tier == "cores":
        found += [part(copies, x, i) for x in ("TURNED", "TURNED_SHORT") for i in range(2)]
        found += [part(copies, "NARROW", i) for i in (1, 2)]
        found += [number(copies, x) for x in ("COPY_COST", "COPY_START")]
    return found


@contextlib.contextmanager
def put(changed: Sequence[Constant], logs: Sequence[float]) -> Iterator[None]:
    """Let constants have their values times e to these powers."""
    try:
        for constant, log in zip(changed, logs, strict=True):
            constant.put(constant.value * math.exp(log))
        yield
    finally:
        for constant in changed:
            constant.put(constant.value)


def costs(item: Measured, names: Sequence[str]) -> list[float]:
    """Return what the models expect of ways today; not a number of one that there is no more."""
    from numfuse.backends.cuda.plan.tiers import TIERS

    found = {}
    for tier in TIERS:
        if any(name.startswith(f"{tier.name}: ") for name in names):
            ways = tier.ways(item.product, item.info)
            found |= {f"{tier.name}: {way.name}": way.cost for way in ways}
    return [found.get(name, math.nan) for name in names]


class Model:
    """The measurements of one kind of kernels, and what its constants make of them."""

    def __init__(self, kind: str, items: Sequence[Measured]) -> None:
        self.kind, self.constants = kind, constants(kind)
        self.rows = []
        for item in items:
            mine = [x for x in item.seconds if kind_of(x, item.product.x.dtype) == kind]
            here = costs(item, mine)
            known = [name for name, cost in zip(mine, here, strict=True) if cost == cost]
            if known:
                self.rows.append((item, known))
        self.seconds = np.array([r.seconds[n] for r, names in self.rows for n in names])
        self.bytes = np.array([r.nbytes for r, names in self.rows for _ in names])

    def costs(self, logs: Sequence[float]) -> np.ndarray:
        """Return the costs of all ways."""
        with put(self.constants, logs):
            return np.array([x for item, names in self.rows for x in costs(item, names)])

    @staticmethod
    def predicted(cost: np.ndarray, nbytes: np.ndarray, scale: Sequence[float]) -> np.ndarray:
        """Return seconds: a launch's, and the longer of the arithmetic's and of memory's."""
        rate, start, memory = np.exp(scale)
        return np.asarray(start + np.hypot(rate * cost, memory * nbytes))

    def begin(self) -> np.ndarray:
        """Return where a fit begins: logarithms of a unit's seconds, of a start and of a byte."""
        rate = np.median(self.seconds / self.costs([0.0] * len(self.constants)))
        return np.log([rate, 3e-6, 1 / 3.5e12])

    def residuals(self, at: np.ndarray) -> np.ndarray:
        """Return log(predicted / measured) of all ways."""
        cost = self.costs(at[3:])
        return np.asarray(np.log(self.predicted(cost, self.bytes, at[:3]) / self.seconds))

    def fit(self, steps: int) -> np.ndarray:
        """Return the logarithms of scale and constants, by damped Gauss-Newton."""
        at = np.concatenate([self.begin(), np.zeros(len(self.constants))])
        free = 3  # first the scale alone, then all
        hold = np.concatenate([np.full(3, 1e-3), np.full(len(self.constants), HOLD)])
        origin, damping = at.copy(), 1e-2

        def loss(x: np.ndarray) -> float:
            r = np.clip(self.residuals(x), -CLIP, CLIP)
            return float(r @ r + np.sum((hold * (x - origin)) ** 2))

        now = loss(at)
        for step in range(8 + steps):
            if step == 8:
                free, origin[:3], damping = len(at), at[:3], 1e-2
                now = loss(at)
            base = self.residuals(at)
            inside = np.abs(base) < CLIP
            jacobian = np.zeros((len(base), free))
            for i in range(free):
                nudged = at.copy()
                nudged[i] += NUDGE
                jacobian[:, i] = (self.residuals(nudged) - base) / NUDGE
            jacobian *= inside[:, None]
            gradient = jacobian.T @ base + hold[:free] ** 2 * (at - origin)[:free]
            normal = jacobian.T @ jacobian + np.diag(hold[:free] ** 2)
            for _ in range(6):
                change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
                tried = at.copy()
                tried[:free] += np.clip(change, -0.5, 0.5)
                tried[3:] = np.clip(tried[3:], -FARTHEST, FARTHEST)
                new = loss(tried)
                if new < now:
                    at, now, damping = tried, new, damping / 3
                    break
                damping *= 4
        return at

    def regrets(self, logs: Sequence[float]) -> list[float]:
        """Return how much longer the way takes that a model chooses than the fastest, less 1."""
        cost, found, at = self.costs(logs), [], 0
        for item, names in self.rows:
            mine = cost[at : at + len(names)]
            times = [item.seconds[name] for name in names]
            at += len(names)
            if len(names) > 1:
                found.append(times[int(np.argmin(mine))] / min(times) - 1)
        return found


# --- what is printed ------------------------------------------------------------------------------
def errors(residuals: np.ndarray, regrets: Sequence[float]) -> str:
    """Return the errors and the regrets in words."""
    found = []
    for name, values in (("|log(predicted / measured)|", np.abs(residuals)), ("regret", regrets)):
        if len(values):
            middle, most = np.quantile(values, [0.5, 0.95])
            found.append(f"{name}: median {middle:.3f}, 95th percentile {most:.3f}")
    return "; ".join(found)


def report(items: Sequence[Measured], steps: int, held: int) -> str:
    """Return the errors of all kinds by today's constants and by fitted ones, and these."""
    kinds: dict[str, int] = defaultdict(int)
    for item in items:
        for name in item.seconds:
            kinds[kind_of(name, item.product.x.dtype)] += 1
    lines = []
    for kind in sorted(kinds):
        if kind.startswith("mirror") or kinds[kind] < 8:
            lines.append(f"{kind}: {kinds[kind]} ways, too few to fit")
            continue
        fitted = Model(kind, [x for i, x in enumerate(items) if not held or i % held])
        if len(fitted.seconds) < 8:
            continue
        today = [0.0] * len(fitted.constants)
        scaled = fitted.fit(0)
        lines += ["", f"{kind}: {len(fitted.seconds)} ways of {len(fitted.rows)} products"]
        lines.append(f"  today: {errors(fitted.residuals(scaled), fitted.regrets(today))}")
        if not steps:
            continue
        at = fitted.fit(steps)
        lines.append(f"  fitted: {errors(fitted.residuals(at), fitted.regrets(at[3:].tolist()))}")
        others = Model(kind, [x for i, x in enumerate(items) if held and not i % held])
        if len(others.seconds):
            told = errors(others.residuals(at), others.regrets(at[3:].tolist()))
            before = errors(others.residuals(scaled), others.regrets(today))
            lines += [f"  held out, today: {before}", f"  held out, fitted: {told}"]
        rate, start, memory = np.exp(at[:3])
        lines.append(
            f"  a unit {rate:.3g} s, a start {start * 1e6:.2g} us, {1 / memory / 1e12:.2f} TB/s"
        )
        for constant, log in zip(fitted.constants, at[3:], strict=True):
            new = constant.value * math.exp(log)
            lines.append(f"  {constant.name}: {constant.value:g} -> {new:.4g}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: what the sweep has kept")
    parser.add_argument("--gpu", default="", help="of GPUs whose name holds this")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the fit; 0: none")
    parser.add_argument("--held", type=int, default=0, metavar="N",
                        help="fit without every Nth product, and print its errors")  # fmt: skip
    arguments = parser.parse_args()
    items = measured(arguments.files or [KEPT], arguments.gpu)
    ways = sum(len(x.seconds) for x in items)
    print(f"{ways} ways of {len(items)} products")
    print(report(items, arguments.steps, arguments.held))


if __name__ == "__main__":
    main()
