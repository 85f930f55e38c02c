"""How `numfuse.tune` finds the fastest ways of a function's products on a CUDA device.

The function runs once, and its products are met as its calls are recorded. Then, one product after
the other, the one with the most work first, every way of it is recorded, its results are compared
with the first run's, and all that agree are timed by turns, the second-level cache flushed before
each, as their programs alone: no Python is in the times.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends import Choice
from numfuse.backends.cuda.call.memory import Pool
from numfuse.backends.cuda.call.record import NOTES, forget
from numfuse.backends.cuda.compile.toolchain import SIMULATED
from numfuse.backends.cuda.plan import tiers, tuned
from numfuse.backends.cuda.plan.product import Product
from numfuse.backends.cuda.plan.program import Part, Program, joined
from numfuse.errors import DeviceError

#: What brings an array of any library to the host.
_Host = Callable[[Any], np.ndarray]
#: Ways of one product that are timed, those that the model expects the least of: the model orders
#: tiles within a tier to some 20%, and a dozen is all tiles of one with their copies.
MOST = 12
#: Turns of each; the median of so many is good to 1 or 2% on an H200.
ROUNDS = 2 if SIMULATED else 25
#: The share of the time that another way must save to be taken: more than turns differ by.
GAIN = 0.02
#: Elements of a result that are compared: float64 copies of them take the host tenths of a second.
SAMPLE = 1 << 22
#: Bytes that flush the second-level cache: so many times its size. They take 70 us on an H200, in
#: which the host gets ahead of the device.
FLUSH = 4


@dataclass
class _Calls:
    """The programs that a function launched, as one, and what they read and write."""

    program: Program
    addresses: list[int]
    stream: int
    #: Its result, which holds the arrays at these addresses.
    result: Any
    held: list[Any]


class _Noted:
    """A list of a function's calls, to which `entry.run` adds; see `series.Notes`."""

    def __init__(self) -> None:
        self.programs: list[tuple[Program, list[int]]] = []
        self.made: list[Any] = []
        self.constants: list[Any] = []
        self.kind: Any = None

    def add(
        self, kind: Any, program: Program, addresses: list[int], numbers: int, made: Iterable[Any]
    ) -> None:
        """Note a call."""
        self.kind = kind
        self.programs.append((program, list(addresses)))
        self.made += [x for x in made if x is not None]


def tune(function: Callable[[], Any], reorder: bool, to_numpy: _Host) -> list[Choice]:
    """Return what was found for each product of a function's calls; and keep it.

    Raise ValueError if the function makes no call on device arrays, and OSError if nothing can be
    kept.
    """
    with tuned.trial(reorder) as trial:
        best = _recorded(function)
        try:
            wanted = _arrays(best.result, to_numpy)
            choices = []
            for key in sorted(trial.seen, key=lambda x: -_work(trial.seen[x][0])):
                found, best = _product(function, trial, key, best, wanted, to_numpy)
                choices.append(found)
        finally:
            forget()  # later calls are recorded without the trial
    return choices


def measured(
    function: Callable[[], Any], to_numpy: _Host, most: int = MOST, rounds: int = ROUNDS
) -> tuple[Product, dict[str, float]]:
    """Return the one product of a function's calls, and their seconds by each of its ways.

    "" is the way that no one asked for. Nothing is kept: it is for fits of the models. Raise
    ValueError if there is not one product.
    """
    with tuned.trial(True) as trial:
        best = _recorded(function)
        try:
            if len(trial.seen) != 1:
                raise ValueError(f"function must have one product, got {len(trial.seen)}")
            ((key, (product, _)),) = trial.seen.items()
            wanted = _arrays(best.result, to_numpy)
            runs = _runs(function, trial, key, best, wanted, to_numpy, most)
            return product, _times(runs, rounds)
        finally:
            forget()


def _product(
    function: Callable[[], Any], trial: tuned.Trial, key: str, best: _Calls,
    wanted: list[np.ndarray], to_numpy: _Host,
) -> tuple[Choice, _Calls]:  # fmt: skip
    """Return what was found for a product, and the calls that go by it."""
    runs = _runs(function, trial, key, best, wanted, to_numpy, MOST)
    times = _times(runs)
    fastest = min(times, key=lambda x: times[x])
    if times[fastest] > (1 - GAIN) * times[""]:
        fastest = ""
    trial.ways[key] = fastest
    facts = {"seconds": times[fastest], "before": times[""], "tried": len(runs)}
    file = tuned.write(key, fastest, **facts)
    product, _ = trial.seen[key]
    sizes = f"{product.places} x ({product.m} x {product.k} x {product.n}) {product.x.dtype}"
    shown = f"{sizes}, {product.epilogue.name}"
    found = Choice(shown, fastest, times[""], times[fastest], len(runs), str(file))
    return found, runs[fastest]


def _runs(
    function: Callable[[], Any], trial: tuned.Trial, key: str, best: _Calls,
    wanted: list[np.ndarray], to_numpy: _Host, most: int,
) -> dict[str, _Calls]:  # fmt: skip
    """Return a function's calls by each way of a product that gives what is wanted."""
    runs, (product, info) = {"": best}, trial.seen[key]
    for name, _, _ in tiers.ways(product, info, trial.reorder)[:most]:
        trial.ways[key] = name
        try:
            calls = _recorded(function)
        except (MemoryError, DeviceError):  # a tile that a device has no room for
            continue
        if agree(wanted, _arrays(calls.result, to_numpy), product):
            runs[name] = calls
    return runs


def _work(product: Product) -> int:
    return product.m * product.n * max(1, product.k) * product.places


def _recorded(function: Callable[[], Any]) -> _Calls:
    """Return a function's calls, recorded anew."""
    forget()
    function()
    # again, as what is recorded: a network's calls are one program from their second time on
    noted: Any = _Noted()
    before = NOTES.set(noted)
    try:
        result = function()
    finally:
        NOTES.reset(before)
    if not noted.programs:
        raise ValueError(
            "function must make calls on arrays of a CUDA device, got none: "
            "numfuse.to_device(x, 'cuda') copies an array there"
        )
    parts: list[Part] = []
    addresses: list[Any] = []
    for program, own in noted.programs:
        parts.append(Part(program, [(2 + len(addresses) + i, 0) for i in range(len(own))]))
        addresses += own
    owner = noted.programs[0][0].device
    kind, ordinal = noted.kind, owner.ordinal
    stream = 0 if kind.stream is None else kind.stream(ordinal)
    # (a program of its own: an adapter recalls one that is alive, and would record no other)
    program = joined(owner, parts, 0, len(addresses))
    return _Calls(program, addresses, stream, result, [*noted.made, *noted.constants])


def _times(runs: dict[str, _Calls], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median of the device's seconds of each, which take turns."""
    first = next(iter(runs.values()))
    owner, stream = first.program.device, first.stream
    pool = Pool(owner, 0)
    nbytes = FLUSH * owner.info.l2_bytes
    block = pool.take(nbytes, stream, "what flushes the cache")
    events: dict[str, list[tuple[int, int]]] = {name: [] for name in runs}
    try:
        for turn in range(rounds + 1):
            for name, calls in random.sample(list(runs.items()), len(runs)):
                owner.clear(block.address, nbytes, stream)
                begin = owner.event(stream, timing=True)
                calls.program.launch(stream, calls.addresses)
                pair = begin, owner.event(stream, timing=True)
                if turn:  # the first loads what the others find
                    events[name].append(pair)
        owner.synchronize()
        return {
            name: statistics.median(owner.seconds(*pair) for pair in pairs)
            for name, pairs in events.items()
        }
    finally:
        for event in (event for pairs in events.values() for pair in pairs for event in pair):
            owner.forget(event)
        pool.give(block)
        pool.release()


# --- results --------------------------------------------------------------------------------------
def _arrays(result: Any, to_numpy: _Host) -> list[np.ndarray]:
    """Return the arrays of a result, inside of tuples, lists and dicts too, on the host.

    Of one with more elements than `SAMPLE` every so many-th.
    """
    if result is None or isinstance(result, (str, bool, int, float)):
        return []
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in _arrays(part, to_numpy)]
    if hasattr(result, "requires_grad"):  # a tensor of PyTorch's
        result = result.detach()
    made = to_numpy(result)
    # (an odd step meets every column of an even number)
    step = made.size // SAMPLE | 1 if made.size > SAMPLE else 1
    return [made.reshape(-1)[::step].copy() if step > 1 else np.array(made)]


def agree(wanted: list[np.ndarray], given: list[np.ndarray], product: Product) -> bool:
    """Return whether results are as near to each other as two orders of a sum may bring them.

    Each of two sums of K terms is within K u of the exact one, relative to the magnitudes of the
    terms, whose norm is at most sqrt(K) that of sums of random signs. A store rounds once more. The
    factor 4 is for what an epilogue makes of that.
    """
    unit = 2.0**-53 if product.accumulator == "float64" else 2.0**-24
    stored = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(product.x.dtype, unit)
    # of 16 bits and tf32 tensor cores cut sums off at 2^-22
    if stored != unit or product.precision == "tf32":
        unit = 2.0**-22
    bound = 4 * (2 * min(1.0, product.k**1.5 * unit) + 2 * stored)
    if [x.shape for x in wanted] != [x.shape for x in given]:
        return False
    for x, y in zip(wanted, given, strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(x)
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return False
        size = np.linalg.norm(x[finite])
        if not np.linalg.norm(y[finite] - x[finite]) <= min(bound, 0.5) * size:
            return False
    return True
