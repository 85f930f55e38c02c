"""The CPU backend: each kind of problem as a program, which is recorded once and launched often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse import epilogues, moduli
from numfuse.backends import OneRun, Traits
from numfuse.backends.cpu import (
    fused,
    host,
    jets,
    layers,
    network_calls,
    networks,
    residues,
    second_calls,
    tiling,
)
from numfuse.backends.cpu.kernels import gemm, library, rows
from numfuse.backends.cpu.launch import sequence, threads
from numfuse.backends.cpu.launch.sequence import Program
from numfuse.errors import BackendUnavailable
from numfuse.problem import gates
from numfuse.problem.operands import format_of
from numfuse.problem.results import without_terms
from numfuse.runtime import specialise
from numfuse.runtime.replay import Recording, Replay

if TYPE_CHECKING:
    from numfuse.activations import Activation

#: How products are made: as IEEE 754 says; those of float32 of three or two bfloat16 parts each
#: (six or three products), those of float64 of residues of 8 bits, both by AMX tiles.
PRECISIONS = ("ieee", *tiling.PARTS, *moduli.precisions())

#: What records each kind of problem.
_RECORD: dict[str, Callable[[Any, Sequence[str], int, str], Program]] = {
    "forward": layers.forward,
    "backward": layers.backward,
    "double_backward": layers.double_backward,
    "tangent": layers.tangent,
    "jet": jets.jet,
    **dict.fromkeys(("fused", *epilogues.GATES), fused.fused),
}


class CpuBackend(OneRun):
    """Fused kernels on the host's vector units, parallel over cells of the output.

    Parameters
    ----------
    precision : {"ieee", "bf16x6", "bf16x3", "int8", "int8:8" to "int8:20"}
        Of float32 products, or ("int8", with so many moduli) of float64 products.
    """

    name = "cpu"
    jet = partialmethod(OneRun._run, "jet")
    network_jet = network_calls.forward
    network_jet_bwd = network_calls.backward
    network_jvp = second_calls.tangent
    network_double_bwd = second_calls.double_backward
    #: Columns of the widest layer of a network that these run.
    widest_network = networks.WIDEST

    def __init__(self, precision: str = "ieee") -> None:
        self.precision = precision
        self.replay: Replay[Any] = Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES)

    def __repr__(self) -> str:
        return f"CpuBackend({self.precision!r})"

    def configure(self, device: Any = None, precision: str | None = None) -> CpuBackend:
        """Return this backend with another precision of products.

        Raises
        ------
        ValueError
            A device is named, or the precision is none that processors have.
        BackendUnavailable
            This processor, or its system, lacks what the precision needs.
        """
        if device is not None:
            raise ValueError(f"device must be None for the backend 'cpu', got {device!r}")
        if precision not in (None, *PRECISIONS):
            known = ", ".join(map(repr, (*PRECISIONS[:3], moduli.NAME)))
            raise ValueError(
                f"precision must be one of {known}, 'int8:{moduli.FEWEST}' to "
                f"'int8:{moduli.MOST}' or None for the backend 'cpu', got {precision!r}"
            )
        if precision not in (None, "ieee") and not _has_tiles(precision):
            what = "bfloat16" if precision in tiling.PARTS else "8 bits"
            raise BackendUnavailable(
                self.name,
                f"precision {precision!r} needs AMX tiles of {what}, and "
                f"{host.tiles_refused(precision)}",
            )
        return _of(self.precision if precision is None else precision)

    @property
    def traits(self) -> Traits:
        """Return what the processor's products leave open."""
        halves = ("float16", "bfloat16")
        return Traits(grad_pre=tuple(x for x in halves if library.grad_pre_format(x) == x))

    def record(self, kind: str, p: Any, names: Sequence[str]) -> Recording:
        """Return the program of a problem; see :class:`numfuse.backends.Replaying`."""
        zeroed = without_terms(p)
        if zeroed is not None:  # (a result that nobody asks for has no name here)
            return Recording(
                sequence.nothing([names.index(x) for x in zeroed if x in names]), (), 0
            )
        large = _takes_threads(p)
        precision = self.precision
        if precision != "ieee" and not _splits(p, precision):
            precision = "ieee"
        made = _RECORD[kind](p, names, threads.number() if large else 1, precision)
        # (`sequence.formulas_of`, written here: a first call passes as few functions as it can)
        formulas, redefined = [], False
        for kernel in made.kernels:
            for ref in kernel.formulas:
                formula = ref()
                if formula is None:
                    redefined = True
                else:
                    formulas.append(formula)
        varies = threads.number if large else None
        return Recording(made, None if redefined else formulas, made.nbytes, varies)

    launch = staticmethod(sequence.run)

    def run(self, kind: str, p: Any) -> None:
        """Run a problem once."""
        arrays = getattr(p, "arrays", None)
        if arrays is None:
            every = {f.name: getattr(p, f.name) for f in fields(p) if f.name != "result"}
            arrays = {name: x for name, x in every.items() if isinstance(x, np.ndarray)}
        self.launch(self.record(kind, p, tuple(arrays)).program, tuple(arrays.values()))

    def describe(self) -> dict[str, Any]:
        """Return what `python -m numfuse info` tells about this backend, by name."""
        return {
            "device": host.name(),
            "vector width": f"{8 * host.vector_bytes()} bits ({host.vector_name()})",
            "half products": {
                fmt: host.product_name(host.product(fmt), fmt) for fmt in ("float16", "bfloat16")
            },
            "precisions": ", ".join(
                x for x in (*PRECISIONS[:3], moduli.NAME) if x == "ieee" or _has_tiles(x)
            ),
            "register tile": {
                acc: f"{r.held_rows} x {r.held_vectors * r.vl}"
                for acc in ("float32", "float64")
                for r in [library.registers(acc)]
            },
            "level-2 cache": f"{tiling.level2_bytes() >> 10} KiB",
            "threads": threads.number(),
            "threading layer": threads.layer(),
            "kernel cache": specialise.cache_directory(gemm.gemm_cell),
        }

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Compile every kernel that calls with these activations and dtypes can take."""
        for what, compile_one in self.warmup_steps(activations, dtypes):
            if progress is not None:
                progress(what)
            compile_one()

    def warmup_steps(
        self, activations: Sequence[Activation], dtypes: Sequence[np.dtype[Any]]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """(what is compiled, the call that compiles it): a progress bar counts them first."""
        yield "launching", threads.warmup
        yield "elementwise", library.elementwise_cell
        for fmt in dict.fromkeys(dtype.name for dtype in dtypes):
            acc = library.accumulator(fmt)
            kind = library.kind(fmt, fmt)
            yield f"gemm {acc}", partial(library.gemm_cell, acc, kind, fmt)
            for source in dict.fromkeys((fmt, library.grad_pre_format(fmt))):
                for pack in (library.pack_a, library.pack_b):
                    yield f"packing {source}", partial(pack, source, acc, kind)
            yield f"store {fmt}", partial(rows.store, fmt)
            yield f"copy {fmt}", partial(rows.copy, fmt, fmt)
            yield f"add {acc}", partial(rows.add, acc)
            if acc != fmt:
                yield f"store {acc}", partial(rows.store, acc)
                yield f"copy {acc}", partial(rows.copy, acc, acc)
                yield f"add and store {fmt}", partial(rows.add_and_store, fmt)
            yield f"column sums {fmt}", partial(rows.column_sums, fmt)
            yield f"joined sums {fmt}", partial(library.join_cell, fmt)
            for act in activations:
                for call in rows.of_activation(act, fmt):
                    yield f"{act.name} {fmt}", call
                yield f"gates {act.name} {fmt}", partial(self._gates, act, np.dtype(fmt))

    def _gates(self, act: Activation, dtype: np.dtype[Any]) -> None:
        """Compile the kernels of gates of small and of large arrays, which nobody reads."""
        for size in (1, tiling.STREAM_BYTES):
            x = np.empty(size, dtype)
            problems: dict[str, Any] = {
                "gated": gates.gated(x, x, act),
                "gated_backward": gates.gated_backward(x, x, x, act),
            }
            for kind, p in problems.items():
                self.record(kind, p, tuple(p.arrays))


def _splits(p: Any, precision: str) -> bool:
    """Whether the products of a problem are made of parts or residues, as a precision asks.

    All of them or none, whatever blocks they come in: so a row, and a pre-activation that is made
    again, have the same bits.
    """
    fmt, rows_ = format_of(p.dtype), p.m * math.prod(p.batch) * (getattr(p, "members", None) or 1)
    if precision not in tiling.PARTS:
        return fmt == "float64" and residues.takes(rows_, p.n, p.k, precision)
    if fmt != "float32":
        return False
    return bool(min(rows_, p.n, p.k) >= tiling.LEAST_SPLIT[precision])


def _has_tiles(precision: str) -> bool:
    """Whether this process has the tiles of a precision."""
    parts = precision in tiling.PARTS
    return (host.tiles_of_parts() if parts else host.tiles_of_residues()) is not None


def _takes_threads(p: Any) -> bool:
    """Whether a program of the problem may take more threads than one: small ones never ask."""
    members = getattr(p, "members", None) or 1
    if not p.k:
        return math.prod(p.batch) * members * p.m * p.n >= tiling.PARALLEL_ELEMENTS
    r = library.registers_of(format_of(p.dtype))
    elements = math.prod(p.batch) * members * p.m * max(p.n, p.k)
    return elements * p.n >= tiling.parallel_fmas(r) or elements >= tiling.PARALLEL_ELEMENTS


if (_refused := host.refused_setting()) is not None:
    raise BackendUnavailable("cpu", _refused)
BACKEND = CpuBackend()
_BACKENDS = {BACKEND.precision: BACKEND}


def _of(precision: str) -> CpuBackend:
    """Return the one backend object of a precision."""
    return _BACKENDS.setdefault(precision, CpuBackend(precision))
