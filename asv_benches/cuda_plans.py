"""What numfuse would launch for a call on a GPU that is not there: tiers, tiles and kernels."""

from __future__ import annotations

import itertools
from functools import partialmethod
from math import prod
from typing import Any, NamedTuple

import numpy as np
from sweep_cases import Case

import numfuse as nf
from numfuse.backends import OneRun, Traits, latest
from numfuse.backends.cuda.call.arrays import ghost
from numfuse.backends.cuda.call.record import recorded
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch
from numfuse.backends.cuda.plan.program import Recorder, View, strides_of
from numfuse.problem.fields import FIELDS
from numfuse.problem.fused import FusedProblem
from numfuse.problem.jets import JetProblem
from numfuse.runtime.replay import Replay
from numfuse.runtime.views import dtype_of

GPUS = {
    "h100": DeviceInfo("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 228 << 10, 50 << 20),
    "h200": DeviceInfo("NVIDIA H200", (9, 0), 132, 227 << 10, 228 << 10, 60 << 20),
    "a100": DeviceInfo("NVIDIA A100", (8, 0), 108, 163 << 10, 164 << 10, 40 << 20),
    "rtx3090": DeviceInfo("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 << 10, 100 << 10, 6 << 20),
    "rtx4090": DeviceInfo("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 << 10, 100 << 10, 72 << 20),
    "t4": DeviceInfo("Tesla T4", (7, 5), 40, 64 << 10, 64 << 10, 4 << 20),
}
NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


class _Noted(NamedTuple):
    """A launch that nobody starts, as `plan.program` wants one."""

    name: str
    table: tuple[str, ...]
    module: Any
    handles: tuple[int, ...] = (0, 0, 0)
    slots: tuple[Any, ...] = ()
    maps: tuple[Any, ...] = ()


class _Nothing:
    uses = 0


class Absent:
    """A stand-in for a device: its properties, and a list of what was to be launched."""

    ordinal, entries, lost = 0, (), None

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.kept_products: Replay[Any] = Replay(4096, 0)
        self.launches: list[Launch] = []

    def prepare(self, launch: Launch) -> _Noted:
        self.launches.append(launch)
        return _Noted(launch.kernel.name, launch.table, _Nothing)

    def memory(self) -> tuple[int, int]:
        """Return free and all bytes."""
        return 80 << 30, 80 << 30


class Planner(OneRun):
    """A backend that plans a problem and runs nothing."""

    name = "cuda"

    def __init__(self, info: DeviceInfo, precision: str = "ieee") -> None:
        self.device, self.precision = Absent(info), precision

    @property
    def traits(self) -> Traits:
        return Traits(grad_pre=("float16", "bfloat16"), order=("tier", "axes", "saved"))

    jet = partialmethod(OneRun._run, "jet")

    def run(self, kind: str, p: Any) -> None:
        if isinstance(p, FusedProblem | JetProblem):
            names = tuple(x for x in p.arrays if x != "weights")
        else:
            names = sum(FIELDS[kind], ())

        def bind(rec: Recorder, name: str, x: np.ndarray) -> View:
            steps = strides_of(x)
            return View(rec.number(name), 0, x.shape, steps, x.dtype.name, x.itemsize, 16)

        device: Any = self.device
        _, latest.call = recorded(device, self.precision, kind, p, bind, names)


_ADDRESSES = itertools.count(1 << 44, 1 << 40)


def absent(dtype: str, *shape: int, turned: bool = False) -> np.ndarray:
    """Return an array of memory that is not there."""
    kind = dtype_of(dtype)
    stored = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    steps = [kind.itemsize * prod(stored[i + 1 :]) for i in range(len(stored))]
    if turned:
        steps[-2:] = steps[:-3:-1]
    return ghost(next(_ADDRESSES), shape, steps, kind, True)


def planned(case: Case, info: DeviceInfo) -> tuple[str, list[Launch]]:
    """Return the tiers, kernel and tile of a case on such a device, and its launches."""
    planner = Planner(info)
    call(case, planner)
    told = nf.last_call()
    return f"{told.tier}: {told.kernel}, {told.tiling}", planner.device.launches


def call(case: Case, planner: Planner) -> None:
    """Make the call of a case on arrays that are not there."""
    dtype, lead = NAMES[case.dtype], (case.batch,) if case.batch else ()
    acc = "float64" if case.dtype == "f64" else "float32"
    own = () if case.shared else lead
    gated, backward = case.operation.startswith("gated"), "backward" in case.operation
    a = absent(dtype, *lead, case.m, case.k)
    count = 1 + gated
    weights = [absent(dtype, *own, case.k, case.n, turned=case.turned) for _ in range(count)]
    biases = [absent(dtype, case.n) if case.bias else None for _ in range(count)]
    out = (*lead, case.m, case.n)
    options: dict[str, Any] = {"backend": planner}
    if "saved" in case.operation:
        pres = [absent(dtype if gated else acc, *out) for _ in range(count)]
        options["pre_activation"] = tuple(pres) if gated else pres[0]
    given = [*([absent(dtype, *out)] if backward else []), a, *weights, *biases, case.activation]
    function: Any = {
        (False, False): nf.matmul_bias_activation, (False, True): nf.matmul_bias_activation_bwd,
        (True, False): nf.matmul_activation_mul, (True, True): nf.matmul_activation_mul_bwd,
    }[gated, backward]  # fmt: skip
    function(*given, **options)
