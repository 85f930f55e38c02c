"""Ways of products that `numfuse.tune` has measured: one file for each product, by what it is.

They are looked up where a call is recorded, and only where NUMFUSE_TUNED=1 is in the environment; a
repeated call knows nothing of them. A file names a way as `tiers.ways` does. What no longer has a
way of that name goes as the model of times says.

A way that leaves every bit as it is belongs to a product with its epilogue. One that may add up a
sum in another order ("reorder") belongs to the sum, whatever is made of it: a saved pre-activation,
a bare product and a backward that makes the sum again go by the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from numfuse.backends.cuda.compile.toolchain import cache_directory
from numfuse.backends.cuda.plan import tiers
from numfuse.backends.cuda.plan.product import DeviceInfo, Operand, Plan, Product, Tier

#: The environment's variable that switches it on.
VARIABLE = "NUMFUSE_TUNED"
#: Of the text of a file.
FORMAT = 1


class Trial:
    """The ways by which the products of calls go that are recorded in this context."""

    def __init__(self, reorder: bool) -> None:
        self.reorder = reorder
        #: The products that were met, and the ways of some, by their keys.
        self.seen: dict[str, tuple[Product, DeviceInfo]] = {}
        self.ways: dict[str, str] = {}

    def way(self, product: Product, info: DeviceInfo, runs: bool) -> str:
        """Return the name of a product's way, "" for that of the model; note one that runs."""
        key = key_of(product, info, self.reorder)
        if runs:
            self.seen.setdefault(key, (product, info))
        return self.ways.get(key, "")


_TRIAL: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(reorder: bool) -> Iterator[Trial]:
    """Make a trial, by which all calls go that are recorded in the block."""
    made = Trial(reorder)
    before = _TRIAL.set(made)
    try:
        yield made
    finally:
        _TRIAL.reset(before)


def choose(product: Product, info: DeviceInfo) -> tuple[Tier, Plan] | None:
    """Return how a tier runs a product: by a way of a trial, by a kept one, or as a model says."""
    on_trial = _TRIAL.get()
    if on_trial is not None:
        # (of two sums that are made at once each is asked for alone, and does not run)
        return tiers.choose(product, info, lambda p: on_trial.way(p, info, p is product))
    if os.environ.get(VARIABLE) == "1":
        return tiers.choose(product, info, lambda p: kept(p, info))
    return tiers.choose(product, info)


# --- keys -----------------------------------------------------------------------------------------
def key_of(product: Product, info: DeviceInfo, reorder: bool) -> str:
    """Return all that a choice depends on, in words; with `reorder` nothing of the epilogue."""
    p, major_minor = product, ".".join(map(str, info.capability))
    words = [
        f"{info.name}, {major_minor}, {info.multiprocessors} multiprocessors",
        f"numfuse {sys.modules['numfuse'].__version__}",
        f"{p.places} x ({p.m} x {p.k} x {p.n})",
        f"sums in {p.accumulator}, {p.precision}",
        *(f"{name} {_layout(getattr(p, name))}" for name in ("x", "y", "x1", "y1")),
        f"free {p.free}, whole {p.whole}" + f", alternate {p.alternate}" * p.woven,
    ]
    if not reorder:
        results = " ".join(name for name, _ in p.epilogue.results)
        inputs = " ".join(p.epilogue.inputs)
        words.append(f"{p.epilogue.name} of {inputs} to {results}, curved {p.is_curved}")
        others = "out", "extra", "pre", "pre1", "bias", "bias1"
        words += [f"{name} {_layout(getattr(p, name))}" for name in others]
        words.append(f"column sums {p.sums}")
    return "; ".join(words)


def _layout(operand: Operand | None) -> str:
    if operand is None:
        return "none"
    return f"{operand.dtype} {operand.strides} at {operand.alignment}"


# --- files ----------------------------------------------------------------------------------------
def directory() -> Path:
    """Return where choices are kept."""
    return cache_directory() / "tuned"


def path_of(key: str) -> Path:
    """Return the file of a key."""
    return directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def kept(product: Product, info: DeviceInfo) -> str:
    """Return the name of the way that is kept for a product; "" where there is none.

    One that belongs to the sum comes first: it is that of all products with this sum.
    """
    for reorder in (True, False):
        found = read(key_of(product, info, reorder))
        if found is not None and found["way"]:
            return str(found["way"])
    return ""


def read(key: str) -> dict[str, Any] | None:
    """Return what is kept of a key; None where nothing is, or nothing of use, which is told."""
    path = path_of(key)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or found["key"] != key or not isinstance(found["way"], str):
            raise ValueError("it is that of another product or version")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"numfuse: the tuned choice {path} is ignored ({why}): delete it, or tune again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return dict(found)


def write(key: str, way: str, **facts: Any) -> Path:
    """Keep a way, in one step: who reads meanwhile finds the file before or this one, whole.

    Raises OSError where it cannot be written.
    """
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "key": key, "way": way, **facts}, indent=1)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
