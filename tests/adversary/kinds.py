"""Where a call runs: a backend, or the arrays of another library."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
from numpy import ndarray

import numfuse as nf
from numfuse.backends import Traits, resolve

from .bounded import Rules
from .cases import Case, mapped
from .draws import LAYOUTS, VALUES, Draw, Limits, Palette

#: Cases of a run, which has few variants of each way to draw a call.
RUN = 10_000
#: What a library's arrays can be of; a result that a CPU's arrays of it give is the CPU's.
LIBRARIES = ("torch", "jax", "autograd", "dask")
#: Places that are a processor's other ways to make products.
PRECISIONS = {f"cpu-{precision}": precision for precision in ("bf16x6", "bf16x3", "int8")}
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
_ALL = ("float64", "float32", "float16", "bfloat16")
_DTYPES = {"float64": np.dtype(np.float64), "float32": np.dtype(np.float32)}
_DTYPES |= {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass
class Place:
    """A backend or a library, and what may be asked of it."""

    name: str
    limits: Limits
    traits: Traits
    #: What `backend=` gets; None: nothing is said.
    backend: Any = None
    out: bool = True
    #: Errors that tell what a library's arrays cannot be given to, and are no faults.
    refuses: tuple[type[Exception], ...] = ()
    #: Whether a result has the same bits whatever the operands' strides are.
    bits: bool = True
    #: That of its products.
    precision: str = "ieee"

    def rules(self, palette: Palette) -> Rules:
        """Draw a dtype, and return what the arithmetic promises in it."""
        dtype = palette.one("dtype", self.limits.dtypes)
        own = self.traits.subnormals, self.traits.division
        return Rules(_DTYPES[dtype], *own, self.precision)

    def serves(self, module: str) -> bool:
        """Return whether the calls of a module are for this place."""
        return True

    def options(self) -> dict[str, Any]:
        return {} if self.backend is None else {"backend": self.backend}

    def call(self, case: Case, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call on NumPy arrays."""
        return getattr(nf, case.function)(*args, **kwargs, **self.options())


class OnDevice(Place):
    """Half of the calls get arrays of the device, of any strides."""

    def call(self, case: Case, args: Any, kwargs: dict[str, Any]) -> Any:
        if case.draw.rng.random() < 0.4 or "out" in kwargs:
            return super().call(case, args, kwargs)
        from on_device import Memory

        there: dict[int, Any] = {}

        def moved(x: Any) -> Any:
            if not isinstance(x, ndarray) or any(x is y for y in case.constants):
                return x
            if id(x) not in there:
                there[id(x)] = Memory(x, "device", self.name).view(x)
            return there[id(x)]

        found = getattr(nf, case.function)(*mapped(args, moved), **mapped_values(kwargs, moved))
        return mapped(found, lambda x: nf.to_numpy(x) if hasattr(x, "shape") else x)


def mapped_values(kwargs: dict[str, Any], f: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: x if name == "out" else mapped(x, f) for name, x in kwargs.items()}


def available() -> dict[str, str]:
    """Return the places that can be served here, and of those that cannot the reason."""
    found = {}
    for name, status in nf.backends().items():
        found[name] = "" if status or (name == "cuda" and find_spec("numba_cuda")) else str(status)
    for name in LIBRARIES:
        found[name] = "" if find_spec(name) else "not installed"
    for name, precision in PRECISIONS.items():
        try:
            nf.use_backend("cpu", precision=precision)
        except nf.BackendUnavailable as why:
            found[name] = str(why)
        else:
            found[name] = ""
    return found


def _precise(name: str) -> Place:
    """Return the processor with a precision, which small products have as well."""
    from numfuse.backends.cpu import residues, tiling

    precision, traits = PRECISIONS[name], resolve("cpu").traits
    residues.takes = lambda *_: True  # type: ignore[assignment]
    tiling.LEAST_SPLIT = dict.fromkeys(tiling.PARTS, 1)  # type: ignore[assignment]
    backend = nf.use_backend("cpu", precision=precision).backend
    if precision != "int8":
        return Place(name, Limits(("float32",)), traits, backend, precision=precision)
    return Place(name, Limits(("float64",)), traits, backend, precision=precision)


def place(name: str, backend: Any = None) -> Place:
    """Return a place by its name; `backend` is an object in the place of the named one's."""
    if name in PRECISIONS:
        return _precise(name)
    if name in LIBRARIES:
        from .gradients import library

        return library(name)
    traits = resolve(name).traits
    dtypes: Sequence[str] = tuple(x for x in _ALL if x in traits.dtypes)
    bits = not {"tier", "axes"} & {*traits.order}
    if name == "reference":
        # (products in long double by plain loops)
        return Place(name, Limits(dtypes, 60_000, 20_000), traits, backend or name, bits=bits)
    if traits.simulator or SIMULATED:
        kinds = tuple(x for x in LAYOUTS if x != "zero")
        limits = Limits(dtypes, 120, 60, 10**9, 1, kinds, tuple(VALUES), 9, 1)
        return Place(name, limits, traits, name, bits=False)
    if traits.memory == "device":
        limits = Limits(dtypes, 60_000, 20_000, 10**9, variants=2)
        return OnDevice(name, limits, traits, name, bits=False)
    return Place(name, Limits(dtypes), traits, backend or name, bits=bits)


def drawn(place: Place, seed: int, index: int, way: int) -> Draw:
    """Return the beginnings of a case."""
    rng = np.random.default_rng([seed, index, way])
    palette = Palette(seed, index // RUN, way, int(rng.integers(place.limits.variants)))
    rules = place.rules(palette)
    kinds = [x for x in VALUES if x in place.limits.values]
    weights = np.array([VALUES[x] for x in kinds], float)
    kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
    return Draw(rng, rules, place.limits, palette, kind)
