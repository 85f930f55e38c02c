"""Every CUDA kernel compiles without a GPU, to the instructions that it is made for.

The table `CASES` names products as a run makes them; whichever kernels a tier launches for one are
compiled to PTX, and assembled where `ptxas` is on the machine: without spills and without a stack.
A tier adds rows.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import once
import pytest
import weekly
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse import epilogues
from numfuse.backends.cuda.kernels.hopper.tiling import HOPPER_SPLIT_TILES, HOPPER_TILES
from numfuse.language.curves import leaf
from numfuse.problem import jets as jet_problems
from numfuse.problem.networks import NetworkProblem
from numfuse.runtime.replay import Replay
from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import dtype_of

try:
    from cuda_devices import ADA, AMPERE, HOPPER, TURING

    from numfuse.backends.cuda import tiling
    from numfuse.backends.cuda.compile import assembler, elements, schema, toolchain
    from numfuse.backends.cuda.kernels import (
        jet_lines,
        jets,
        joins,
        mirror,
        passes,
        planes,
        pointwise,
        rows,
    )
    from numfuse.backends.cuda.kernels.ampere.outer import SHORT_K
    from numfuse.backends.cuda.kernels.ampere.simt import CORES
    from numfuse.backends.cuda.kernels.ampere.tensor_core import TENSOR_CORES
    from numfuse.backends.cuda.kernels.ampere.thin import FEW_ROWS
    from numfuse.backends.cuda.kernels.ampere.vectors import VECTORS
    from numfuse.backends.cuda.kernels.elementwise import is_short
    from numfuse.backends.cuda.kernels.hopper.tier import WGMMA, plan_with
    from numfuse.backends.cuda.kernels.mirror import MIRROR
    from numfuse.backends.cuda.kernels.pointwise import Result, Source
    from numfuse.backends.cuda.kernels.residues import tier as residue_tier
    from numfuse.backends.cuda.kernels.small import SMALL
    from numfuse.backends.cuda.plan import half_networks, networks
    from numfuse.backends.cuda.plan.group_sizes import Apart
    from numfuse.backends.cuda.plan.jets import jet as record_jet
    from numfuse.backends.cuda.plan.product import (
        NUMBER,
        DeviceInfo,
        Launch,
        Operand,
        Product,
        Slot,
    )
    from numfuse.backends.cuda.plan.program import Recorder, View, strides_of
    from numfuse.moduli import Residues
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no compiler", allow_module_level=True)
try:
    importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
except Exception as error:  # numba-cuda's own, for want of a toolkit
    unavailable("cuda-compiler", f"numba-cuda finds no NVVM: {error}")

ACT = nf.activations()


@dataclass(frozen=True)
class Case:
    """Launches, and what their PTX must hold."""

    name: str
    launches: tuple[Launch, ...]
    info: DeviceInfo
    #: Of the first launch.
    instructions: tuple[str, ...] = ()
    registers: int = 255
    #: Bytes of stack that a kernel may have (0: everything is in registers).
    stack: int = 0


def operand(dtype, rows, columns, turned=False, alignment=16):
    strides = (rows * columns, 1, rows) if turned else (rows * columns, columns, 1)
    return Operand(dtype, strides, alignment)


def product(m, n, k, dtype, *, places=1, x_turned=False, y_turned=False, alignment=16,
            function=None, slope=False, pre=None, **features):  # fmt: skip
    """A product as a run makes it: a layer, its `slope` with sums, or bare.

    `pre`: the dtype of the pre-activation that a layer also stores.
    """
    acc = "float64" if dtype == "float64" else "float32"
    if function is not None:
        made = epilogues.layer(ACT[function].curve)
        made = made.select("out", *(["pre"] if pre else []))
        features["pre"] = operand(pre, m, n, alignment=alignment) if pre else None
        features["bias"] = Operand(dtype, (0, 0, 1), alignment)
        if slope:
            made = made.backward().guarded().select("d_z")
            features |= {"extra": operand(dtype, m, n), "sums": True}
        features["epilogue"] = made
    return Product(
        m, n, k, places, operand(dtype, m, k, x_turned, alignment),
        operand(dtype, k, n, y_turned, alignment), operand(dtype, m, n), acc, **features,
    )  # fmt: skip


def gate(info, dtype, activation, *, backward=False):
    """A gate of 1000 elements, or both of its gradients."""
    acc = "float64" if dtype == "float64" else "float32"
    made, names = epilogues.gate(ACT[activation].curve), ("out",)
    if backward:
        made, names = made.backward().guarded(), ("d_a", "d_b")
    return pointwise.launch(
        info, made, acc, [Source(name, name, dtype) for name in made.inputs],
        [Result(name, name, dtype) for name in names], 1000, 16, is_short(acc, dtype),
    )  # fmt: skip


def elements_of(dtype):
    """A formula of arrays and numbers, with two results."""
    made = epilogues.record(
        lambda x, y, z, p, q: (x + p * (y - x), z * q + y), 0, "elements"
    )  # fmt: skip
    read = [Source(x, x, dtype) for x in "xyz"] + [Source(x, x, NUMBER, True) for x in "pq"]
    results = [Result(f"out_{i}", f"out_{i}", dtype) for i in range(2)]
    return pointwise.launch(HOPPER, made, dtype, read, results, 1000, 16, False)


def by_rows(info, dtype, sums, n=1024, woven=False):
    """A formula of a wide sum and of operands by rows and columns, and a number; with its sums."""
    acc = "float64" if dtype == "float64" else "float32"
    gelu = ACT["gelu"]
    whole = epilogues.record(
        lambda z, bias, scale, factor, g: (gelu(z + bias) * scale * factor, g * scale), 0, "rows"
    )
    steps = {"z": (512 * n, n, 1), "bias": (0, 0, 1), "scale": (512, 1, 0), "g": (512 * n, n, 1)}
    out = (1024 * n, 2 * n, 2) if woven else (512 * n, n, 1)
    steps |= {f"out_{i}": out for i in range(2)}
    dtypes = {"z": acc}
    operands = {x: Operand(dtypes.get(x, dtype), step, 16) for x, step in steps.items()}
    read = [Source(x, x, operands[x].dtype) for x in ("z", "bias", "scale", "g")]
    read.append(Source("factor", "factor", NUMBER, True))
    results = [Result(f"out_{i}", f"out_{i}", dtype) for i in range(2)]
    added = rows.Sums(["out_0"], ["out_0", "out_1"]) if sums else rows.Sums()
    how = read, results, operands, added, (512, n, 3), is_short(acc, dtype)
    return rows.launch(info, whole, acc, *how, {"out_1": "out_0"} if woven else {})[0]


def jet(info, dtype, backward, seconds=2, n=1024, apart=0):
    """The pass of a stacked jet of two directions, as a network has it; a backward's with sums.

    With `apart` it is that of a first layer, which adds up the columns of so many directions.
    """
    acc = "float64" if dtype == "float64" else "float32"
    curve = ACT["tanh"].curve
    of = epilogues.layer_jet_backward(curve) if backward else epilogues.layer_jet(curve)
    of = of.each(lambda part: part.guarded())
    written = ["d_z", "d_z_dot", "d_z_ddot"] if backward else ["out", "out_dot", "out_ddot", "pre"]
    written = ["d_z"] if apart else written
    counts = apart or 2, seconds
    how = of, frozenset(written), backward, counts, seconds == 1, backward
    made = jet_lines.of(*how, apart > 0)
    names = sorted(made.read) + written
    width = n * (3 + seconds)
    operands = {x: Operand(acc if x[0] in "zp" else dtype, (0, width, 1), 16) for x in names}
    operands |= {"bias": Operand(dtype, (0, 0, 1), 16)}
    steps, sizes = dict.fromkeys(operands, n * 4), (512, n, 1)
    return jets.launch(info, made, acc, operands, steps, 4096, sizes, is_short(acc, dtype))[0]


def many(info, dtype, k, backward, keep=True):
    """The launches of a layer's jet of 50 directions and their sum, but the plain product's."""
    members, dtype, m, n = 52, np.dtype(dtype), 2048, 768
    ones, b = np.ones((1, members - 2), dtype), np.empty((k, n), dtype)
    given = {"a": np.empty((m, members, k), dtype), "b": b, "bias": b[0], "a_dot": None}
    given |= {"a_ddot": None, "weights": ones}
    stack = jet_problems.Stack(members - 2, 1, True)
    if backward:
        grads = {"grad": given["a"], "grad_dot": np.empty((n, k), dtype), "grad_ddot": None}
        given |= {**grads, "pre": np.empty((m, members, n), dtype)}
        stack = stack._replace(behind=k, by_sums=True)
    needs = ("a", "bias")
    p = jet_problems.make(backward, given, "tanh", needs, None, True, keep and not backward,
                          (ones != 0).tobytes(), stack)  # fmt: skip
    made = []

    def prepare(launch):
        made.append(launch)
        return SimpleNamespace(table=launch.table, name=launch.kernel.name)

    rec = Recorder(SimpleNamespace(info=info, kept_products=Replay(8, 0), prepare=prepare))
    rec.constant = lambda x: 4096

    def bind(name):
        x = getattr(p, name)
        if x is None:
            return None
        steps = strides_of(x)
        return View(rec.number(name), 0, x.shape, steps, dtype.name, dtype.itemsize, 16)

    record_jet(rec, p, bind)
    # (its product is that of a layer; the tall one comes first here)
    found = [x for x in made if "jet" in x.kernel.name or "direction" in x.kernel.name]
    return tuple(sorted(found, key=lambda x: "direction" not in x.kernel.name))


def network(dtype, widths, backward, saved=False, jet=True, info=HOPPER, precision="ieee",
            several=(), along=False, activation="tanh"):  # fmt: skip
    """A network's jet of two directions and one second derivative, or its value.

    A backward of the value makes the gradient by the points, too. `several` is the axis of
    networks; `along` says that the value has a tangent along one of the points.
    """
    itemsize, points = networks.ITEMSIZES[dtype], 20000
    shapes = {"points": (*several, points, widths[0]), "flat": (*several, 1 << 20)}
    for i, pair in enumerate(itertools.pairwise(widths)):
        shapes |= {f"weights_{i}": (*several, *pair), f"biases_{i}": (*several, 1, pair[1])}
    ends = ("grad", "grad_dot", "grad_ddot") if backward else ("u", "u_dot", "u_ddot")
    value = *several, points, widths[-1]
    shapes |= {x: (*c, *value) for x, c in zip(ends, ((), (2,), (1,)), strict=True)}
    shapes["kept"] = len(widths) - 3, points, 4, widths[1]

    def view(shape, *_):
        return View(1, 0, shape, contiguous(shape), dtype, itemsize, 16)

    made = []
    recorder = SimpleNamespace(
        device=SimpleNamespace(info=info), constant=lambda x: 4096, fresh=view,
        launches=lambda launches, at, work=0, **_: made.extend(launches), precision=precision,
    )  # fmt: skip
    every = (ACT[activation],) * (len(widths) - 2) + (ACT["none"],)
    form = np.eye(2), np.ones((1, 2)), bytes([1, 0]), 1
    if not jet:
        form = np.zeros((int(along), widths[0])), None, b"", 0
        shapes |= {"u": shapes[ends[0]], "d_points": shapes["points"]}
        shapes |= {ends[1]: value, "points_dot": shapes["points"]}
    how = every, widths, points, dtype_of(dtype), *form
    kept = jet and not backward, saved
    arrays = {} if jet or not backward else {"d_points": None}
    arrays |= {"points_dot": np.empty((1, 1))} if along else {}
    arrays |= {"weights_0": np.empty((*several, 1, 1))} if several else {}
    problem = NetworkProblem(*how, True, backward, *kept, arrays, ())
    absent = () if jet else ("kept", ends[2], *(() if along else (ends[1], "points_dot")))
    there = shapes.keys() - set(absent)
    networks.network(recorder, problem, lambda x: view(shapes[x]) if x in there else None)
    return tuple(made)


def apart(how, widths, activation):
    """A network's gradients whose sums one warp group has."""
    rule, half_networks.APART = half_networks.APART, lambda *_: Apart(*how)
    try:
        return network("bfloat16", widths, True, jet=False, activation=activation)
    finally:
        half_networks.APART = rule


def scaled(m, n, k, dtype, strides, pre=None):
    """A layer whose value is scaled by another operand."""
    acc = "float64" if dtype == "float64" else "float32"
    gelu = ACT["gelu"]
    made = epilogues.record(lambda z, bias, extra: (gelu(z + bias) * extra, z + bias), 1, "scaled")
    names = ("out", "pre") if pre else ("out",)
    results = tuple((name, e) for name, (_, e) in zip(names, made.results, strict=False))
    return Product(
        m, n, k, 1, operand(dtype, m, k), operand(dtype, k, n), operand(dtype, m, n), acc,
        epilogue=epilogues.Epilogue("scaled", ("z",), ("bias", "extra"), results),
        bias=Operand(dtype, (0, 0, 1), 16), extra=Operand(dtype, strides, 16),
        pre=operand(pre, m, n) if pre else None,
    )  # fmt: skip


def alternate(p):
    """A gated layer whose factors, and results if they are two, are alternate columns of arrays."""
    even = {
        name: replace(x, strides=(0, 2 * x.strides[1], 2))
        for name in ("y", "y1", "out", "pre")
        if (x := getattr(p, name)) is not None
    }
    two = p.pre is not None and p.pre1 is None
    if not two:
        even = {name: x for name, x in even.items() if name[0] == "y"}
    return replace(p, alternate="y out" if two else "y", **even)


def gated(m, n, k, dtype, *, results=("out",), biases=True, grad=False, alignment=16, **others):
    """A gated layer's two sums, and its value or both gradients of these."""
    act = ACT["silu"]
    made: epilogues.Epilogue = epilogues.record(
        lambda z, z1, bias, bias1: act(z + bias) * (z1 + bias1), 2, "gated"
    )
    (_, value), *_ = made.results
    if grad:
        made = made.pulled_back({made.results[0][0]: "extra"}, {"z": "out", "z1": "pre"}).guarded()
        graphs = made.graphs
    else:
        graphs = value, leaf("z") + leaf("bias"), leaf("z1") + leaf("bias1")
    operands = (*(["bias", "bias1"] if biases else []), *(["extra"] if grad else []))
    whole = epilogues.Epilogue("gated", ("z", "z1"), ("bias", "bias1", *operands[2:]),
                               tuple(zip(results, graphs, strict=False)))  # fmt: skip
    by_rows = operand(dtype, m, n, alignment=alignment)
    given = dict.fromkeys(results, by_rows) | dict.fromkeys(operands, by_rows)
    given |= {x: Operand(dtype, (0, 0, 1), alignment) for x in operands if x != "extra"}
    given |= {"y1": operand(dtype, k, n, alignment=alignment)}
    return Product(
        m, n, k, 1, operand(dtype, m, k, alignment=alignment),
        operand(dtype, k, n, alignment=alignment),
        accumulator="float64" if dtype == "float64" else "float32",
        epilogue=whole.without(*{"bias", "bias1"} - set(operands)), **given, **others,
    )  # fmt: skip


def finish(info, dtype, n, parts, **features):
    """What comes behind the parts of a layer's sum, or of its slope's."""
    made = product(300, n, 7000, dtype, function="gelu", **features)
    return planes.Planes.of(made, parts).plan((), info, "", 0).launches


def slopes(dtype, pre):
    """grad_pre and the sums of its columns, of 512 x 1024, with rows by 16 bytes."""
    acc = "float64" if dtype == "float64" else "float32"
    made = epilogues.layer(ACT["gelu"].curve).select("out").backward().guarded().without("bias")
    grad, kept = operand(dtype, 512, 1024), operand(pre, 512, 1024)
    made = made.select("d_z")
    return passes.slopes(HOPPER, made, acc, kept, grad, grad, 512, 1024, 1, True)[0]


def integers(count, tile, info=HOPPER, **how):
    """The plan of a product of float64 by residues, on Hopper in blocks of a tile."""
    made = product(1024, 1024, 1024, "float64", precision=f"int8:{count}", **how)
    with mock.patch.object(residue_tier, "hopper_tile", lambda *_, **__: (tile, 1)):
        return residue_tier.plan_with(made, Residues(count), info, 1)


def taken(name, tier, made, info, instructions=(), **limits):
    """A row: what a tier launches for a product."""
    plan = tier.take(made, info)
    assert plan is not None, f"{tier.name} does not take {made}"
    return Case(name, plan.launches, info, instructions, **limits)


CASES = [
    taken("mirror f32", MIRROR, product(100, 90, 80, "float32", function="gelu"), AMPERE,
          ("fma.rn.f32",)),
    *[
        Case(f"mirror {dtype}, {tile}", mirror.plan(
            product(100, 90, 80, dtype, function="gelu"), info, tile).launches, info, ("fma.rn",))
        for dtype, info in (("float32", TURING), ("float64", AMPERE), ("float16", TURING))
        for tile in tiling.MIRROR_TILES[1:]
    ],
    taken("mirror f64", MIRROR, product(100, 90, 80, "float64", function="tanh"), HOPPER,
          ("fma.rn.f64",)),
    taken("mirror bf16 slope", MIRROR,
          product(100, 90, 80, "bfloat16", function="silu", slope=True), AMPERE,
          ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32")),
    taken("mirror f16, parts", MIRROR, product(64, 64, 9000, "float16", free=True), HOPPER,
          ("cvt.f32.f16",)),
    taken("cores", CORES, product(4096, 4096, 512, "float32", x_turned=True, function="gelu"),
          AMPERE, ("fma.rn.f32", "cp.async.cg.shared.global.L2::128B", "ld.shared.v4.f32")),
    taken("cores, factors turned by registers", CORES,
          product(256, 512, 512, "float32", y_turned=True, function="silu", slope=True),
          HOPPER, ("fma.rn.f32", "ld.global.v4.f32")),
    taken("cores, factors copied before", CORES,
          product(4095, 4097, 4099, "float32", y_turned=True, alignment=4), HOPPER,
          ("st.shared.v4.f32", "st.global.v4.f32")),
    taken("cores, value by value", CORES,
          product(31, 33, 35, "float32", function="relu", alignment=4), AMPERE,
          ("cp.async.ca.shared.global.L2::128B",)),
    taken("cores, one round", CORES,
          product(4096, 1024, 784, "float32", y_turned=True, function="gelu", pre="float32"),
          HOPPER, ("st.shared.v4.f32",)),
    *[
        taken(f"cores, last columns beside the others{', with sums' * slope}", CORES,
              product(4096, 784, 1024, "float32", function="gelu", slope=slope), HOPPER,
              ("griddepcontrol.launch_dependents",))
        for slope in (False, True)
    ],
    taken("cores, last columns behind the others", CORES,
          product(4096, 784, 1024, "float32", function="gelu"), AMPERE, ("fma.rn.f32",)),
    taken("cores, rows of 8 bytes", CORES,
          product(777, 130, 258, "float32", y_turned=True, function="gelu"), HOPPER,
          ("ld.global.v2.f32",)),
    taken("cores, in parts", CORES, product(512, 512, 65536, "float32", x_turned=True, free=True),
          HOPPER, ("fma.rn.f32",)),
    *[
        taken(f"small {dtype}, {name}", SMALL,
              product(20, 16, 16, dtype, places=10000, function=function, **features), info,
              ("fma.rn",), registers=64 if dtype != "float64" else 128)
        for info, dtype, name, function, features in (
            (HOPPER, "float32", "layer", "gelu", {}),
            (AMPERE, "float32", "slope", "silu", {"slope": True, "y_turned": True}),
            (HOPPER, "float64", "slope", "gelu", {"slope": True, "x_turned": True}),
            (TURING, "float16", "with pre", "relu", {"pre": "float32"}),
            (HOPPER, "bfloat16", "layer", "gelu", {}),
        )
    ],
    taken("tensor cores f64", TENSOR_CORES,
          product(4096, 4096, 512, "float64", function="gelu", slope=True), HOPPER,
          ("mma.sync.aligned.m16n8k8.row.col.f64", "cp.async.cg.shared.global")),
    taken("tensor cores f64 of Ampere", TENSOR_CORES,
          product(1000, 1000, 1000, "float64", x_turned=True, alignment=8), AMPERE,
          ("mma.sync.aligned.m8n8k4.row.col.f64", "cp.async.ca.shared.global")),
    *[
        taken(f"tensor cores f64, {m} rows in clusters", TENSOR_CORES,
              product(m, 4096, 4096, "float64", y_turned=m == 32, function="gelu",
                      slope=True), HOPPER,
              ("mma.sync.aligned.m16n8k8.row.col.f64", "barrier.cluster.arrive",
               "ld.shared::cluster.v2.f64"))
        for m in (16, 32, 64)
    ],
    *[
        taken(f"short K, {dtype}", SHORT_K,
              product(4096, 4096, 3, dtype, x_turned=True, free=True), HOPPER, ("fma.rn", "st."))
        for dtype in ("float64", "float32", "bfloat16")
    ],
    taken("tensor cores bf16", TENSOR_CORES,
          product(4096, 4096, 4096, "bfloat16", y_turned=True, function="gelu"), AMPERE,
          ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "ldmatrix.sync", "cvt.rn.bf16")),
    taken("tensor cores f16, value by value", TENSOR_CORES,
          product(1023, 1025, 1027, "float16", function="silu", slope=True, alignment=2),
          AMPERE, ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "st.shared.u16")),
    *[
        taken(f"few rows, {dtype} {m} {turned:d}", FEW_ROWS,
              product(m, n, 4096 if n == 1024 else 512, dtype, y_turned=turned, function="gelu"),
              info, ("cp.async.cg.shared.global", "fma.rn"))
        for dtype, m, n, turned, info in (
            ("float32", 1, 1024, False, AMPERE), ("float32", 16, 1024, True, HOPPER),
            ("float64", 8, 1024, True, HOPPER), ("float32", 32, 1024, False, HOPPER),
            ("float32", 64, 4096, True, HOPPER), ("float64", 1, 1024, False, AMPERE),
        )
    ],
    *[
        taken(f"few vectors, {dtype}, {m} x {k} x {n}", VECTORS[tier],
              product(m, n, k, dtype, **{"function": "gelu"} | features), info, ("fma.rn",))
        for tier, dtype, m, k, n, features, info in (
            (0, "float32", 17574, 1670, 1, {}, HOPPER),
            (0, "float32", 7, 2606, 12466, {"y_turned": True, "slope": True}, ADA),
            (0, "float64", 17574, 1672, 4, {"slope": True}, AMPERE),
            (0, "float64", 600, 1672, 7, {"slope": True}, AMPERE),
            (0, "float64", 4, 70000, 4100, {"y_turned": True}, HOPPER),
            (0, "float64", 8, 700, 1400, {"y_turned": True}, HOPPER),
            (0, "float16", 17574, 16720, 7, {"slope": True}, HOPPER),
            (0, "bfloat16", 53026, 12, 3, {"slope": True}, AMPERE),
            (1, "bfloat16", 3, 69, 18538, {"pre": "float32"}, HOPPER),
            (1, "bfloat16", 8, 4096, 4098, {}, ADA),
            (1, "float64", 8, 4096, 4098, {"slope": True}, HOPPER),
        )
    ],
    *[
        taken(f"a long sum of one column, {dtype}", VECTORS[1],
              product(1670, 1, 17574, dtype, x_turned=True, free=True), HOPPER, ("fma.rn",))
        for dtype in ("float64", "float32", "bfloat16")
    ],
    taken("a column by 16 bytes", VECTORS[0], product(4000, 1, 1024, "bfloat16"), HOPPER,
          ("ld.global.nc.v4.b32", "ld.shared.v4.f32")),
    *[
        taken(f"{dtype} in layout {x:d}{y:d}", tier,
              product(4096, 4096, 4096, dtype, x_turned=x, y_turned=y, function="gelu"), HOPPER)
        for dtype, tier in (("float32", CORES), ("float64", TENSOR_CORES))
        for x in (False, True)
        for y in (False, True)
    ],
    *[
        Case(f"sums of columns, {info.name}",
             (joins.columns("float32", Slot("planes"), operand("bfloat16", 1, 4096),
                            (1, 512, 1, 4096)),), info)
        for info in (HOPPER, TURING)
    ],
    *[
        Case(f"finish {dtype}, {n}, {info.name}", finish(info, dtype, n, parts, **features), info,
             instructions, 128)
        for dtype, n, parts, info, features, instructions in (
            ("float32", 100, 20, ADA, {"pre": "float32"}, ("st.global.v4.f32",)),
            ("float64", 101, 3, HOPPER, {"slope": True}, ("fma.rn.f64", "st.shared.f64")),
            ("bfloat16", 104, 20, HOPPER, {"slope": True}, ("ld.global",)),
            ("bfloat16", 104, 3, TURING, {"slope": True}, ("ld.global",)),
        )
    ],
    taken("few rows, cut", FEW_ROWS, product(16, 512, 65536, "float32", function="gelu"), ADA,
          ("cp.async.cg.shared.global", "fma.rn")),
    Case("join in stages", joins.joins(AMPERE, "float64", Slot("planes"), operand("float64", 9, 5),
                                       (3, 130, 9, 5), Slot("work"))[0], AMPERE),
    taken("mirror bf16, parts", MIRROR, product(64, 64, 9000, "bfloat16", free=True), TURING),
    taken("wgmma bf16", WGMMA, product(4096, 4096, 1024, "bfloat16", function="gelu"), HOPPER,
          ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "cp.async.bulk.tensor.3d",
           "setmaxnreg.inc.sync.aligned.u32 232", "griddepcontrol.wait")),
    taken("wgmma f16 slope", WGMMA,
          product(4096, 4096, 4096, "float16", function="silu", slope=True), HOPPER,
          ("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", "shfl.sync.bfly")),
    taken("wgmma d_a", WGMMA, product(4096, 4096, 4096, "bfloat16", y_turned=True), HOPPER,
          ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "stmatrix")),
    taken("wgmma d_b in parts", WGMMA,
          product(512, 512, 65536, "bfloat16", x_turned=True, free=True), HOPPER, ("wgmma",)),
    taken("wgmma rows of any alignment", WGMMA,
          product(1023, 1025, 2047, "bfloat16", function="relu", slope=True, alignment=2),
          HOPPER, ("ld.global.nc.b16",)),
    taken("wgmma bf16, few rows", WGMMA, product(16, 4096, 4096, "bfloat16", function="relu"),
          HOPPER, ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",)),
    *[
        taken(f"wgmma bf16 on its side, {what}", WGMMA, product(m, n, k, "bfloat16", **features),
              HOPPER, (f"wgmma.mma_async.sync.aligned.m64n{rows}k16",
                       "stmatrix.sync.aligned.m8n8.x4.trans"))
        for what, m, n, k, rows, features in (
            ("a layer", 257, 5632, 6144, 88, {"function": "gelu", "y_turned": True}),
            ("saved", 257, 5632, 6144, 88, {"function": "gelu", "pre": "float32"}),
            ("a slope", 576, 3528, 2336, 144, {"function": "gelu", "slope": True}),
            ("few", 16, 14336 * 20, 96, 16, {"function": "gelu_erf"}),
        )
    ],
    taken("wgmma bf16x6", WGMMA,
          product(2048, 2048, 2048, "float32", function="gelu", precision="bf16x6"), HOPPER,
          ("cvt.rn.bf16x2.f32",)),
    *[
        Case(f"wgmma {kind} slope, {tile}", plan_with(
                 product(1024, 1024, 1024, "float32", function="gelu", slope=True,
                         alignment=alignment, precision=kind), kind, HOPPER, tile, 1
             ).launches, HOPPER, ("cvt.rn.bf16x2.f32",))
        for (tile, _), alignment in zip(HOPPER_SPLIT_TILES[:2], (4, 16), strict=True)
        for kind in ("bf16x6", "bf16x3")
    ],
    *[
        Case(f"wgmma {kind} of a left factor by columns, {tile}", plan_with(
                 product(2048, 512, 512, "float32", x_turned=True, alignment=16, precision=kind),
                 kind, HOPPER, tile, 1).launches[-1:], HOPPER, ("ld.shared.f32", "bar.red.or.pred"))
        for tile, _ in HOPPER_SPLIT_TILES[:2]
        for kind in ("bf16x6", "bf16x3")
    ],
    *[
        Case(f"int8, {count} moduli, {tile}{', turned' * ('x_turned' in how)}",
             integers(count, tile, **how).launches[-2:], HOPPER,
             (f"wgmma.mma_async.sync.aligned.m64n{tile.block_n}k32.s32.s8.s8",))
        for (tile, _), count in zip(HOPPER_TILES[:6], (15, 14, 8, 16, 20, 15), strict=True)
        for how in ({"function": "gelu", "slope": True}, {"x_turned": True, "alignment": 8})
    ],
    *[
        Case(f"residues, {count} moduli", integers(count, HOPPER_TILES[1][0]).launches[:-2], HOPPER,
             registers=128)
        for count in (15, 20)
    ],
    *[
        Case(f"int8 by mma.sync, {info.name}", integers(count, None, info).launches[-2:], info,
             ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "ldmatrix", "cp.async.cg"), 128)
        for count, info in ((15, AMPERE), (18, ADA))
    ],
    taken("wgmma tf32", WGMMA, product(2048, 2048, 2048, "float32", precision="tf32"), HOPPER,
          ("cvt.rna.tf32.f32",)),
    Case("slopes", (passes.slopes(AMPERE, epilogues.residual_layer().backward().select("d_bias"),
                                  "float32", None, Operand("float32", (1, 1, 1), 4), None, 100, 90,
                                  1, True)[0],), AMPERE),
    *[
        Case(f"slopes {dtype}, {pre}", (slopes(dtype, pre),), HOPPER, ("ld.global.nc.v4.b32",), 128)
        for dtype, pre in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32"),
                           ("float64", "float64"))
    ],
    taken("wgmma bf16, 16-bit pre", WGMMA,
          product(4096, 4096, 512, "bfloat16", function="gelu", pre="bfloat16"), HOPPER,
          ("cp.async.bulk.tensor.3d.global",)),
    taken("wgmma f16, 16-bit pre, single values", WGMMA,
          product(1023, 1025, 1027, "float16", function="gelu", pre="float16", alignment=2),
          HOPPER),
    taken("tensor cores bf16, 16-bit pre", TENSOR_CORES,
          product(512, 512, 512, "bfloat16", function="gelu", pre="bfloat16"), AMPERE),
    Case("copy", (passes.copies(AMPERE, "float32", "bfloat16", "float32", (3, 4), (4, 1), (4, 1)),),
         AMPERE),
    Case("gate", (gate(HOPPER, "bfloat16", "silu"),), HOPPER, ("ex2.approx.ftz.f32",)),
    Case("gate backward", (gate(HOPPER, "float64", "gelu", backward=True),), HOPPER,
         ("fma.rn.f64",)),
    # formulas of a user's own
    Case("elements f32, numbers", (elements_of("float32"),), HOPPER,
         ("ld.global.nc.v4.b32", "cvt.rn.f32.f64"), 64),
    *[
        Case(f"rows {dtype}{', sums' if sums else ''}", (by_rows(HOPPER, dtype, sums),), HOPPER,
             ("ld.global.nc.v4.b32", "st.global.v4.b32"), 168)
        for dtype in ("float32", "float64", "bfloat16", "float16") for sums in (False, True)
    ],
    *[
        Case(f"rows bfloat16 of alternate columns{', sums' if sums else ''}",
             (by_rows(HOPPER, "bfloat16", sums, woven=True),), HOPPER,
             ("ld.global.nc.v4.b32", "st.global.v4.b32"), 168)
        for sums in (False, True)
    ],
    *[
        Case(f"jet {dtype}{' backward' if backward else ''}, {seconds}",
             (jet(info, dtype, backward, seconds),), info, ("ld.global", "st.global"), 128)
        for dtype, info in (("float32", HOPPER), ("float64", HOPPER), ("bfloat16", HOPPER),
                            ("float16", TURING))
        for backward in (False, True)
        for seconds in ((1, 2) if dtype == "float32" else (1,))
    ],
    Case("jet float64 backward, 2, before 9.0", (jet(ADA, "float64", True),), ADA, (), 128),
    *[
        Case(f"jet {dtype}{' backward' * backward} of many directions, {k}, {info.name}",
             many(info, dtype, k, backward, keep), info,
             ("mma.sync" if dtype == "float64" else "fma.rn.f32", "cp.async",
              *(["prefetch.global.L2"] if backward else [])))
        for dtype, k, backward, keep, info in (
            ("float64", 512, False, True, HOPPER), ("float64", 768, False, False, HOPPER),
            ("float64", 512, True, True, HOPPER), ("float64", 768, True, True, AMPERE),
            ("float32", 768, False, True, HOPPER), ("float32", 512, True, True, HOPPER),
            ("float32", 512, True, True, ADA),
        )
    ],
    *[
        Case(f"jet {dtype} backward of a first layer, {count}",
             (jet(info, dtype, True, 1, apart=count),), info, ("ld.global", "st.global"),
             160 if dtype == "float64" else 128)  # (loads of four directions are 16 registers)
        for dtype, info in (("float32", HOPPER), ("float64", HOPPER), ("bfloat16", HOPPER))
        for count in (2, 4)
    ],
    *[
        Case(f"network {dtype} {width}, {'backward' if backward else 'forward'}, {saved:d}",
             network(dtype, (2, *[width] * layers, 1), backward, saved), HOPPER,
             ("mma.sync.aligned.m16n8k8.row.col.f64", "ld.const.f64") if dtype == "float64"
             else ("fma.rn.f32",))
        # (whole networks take seconds each to compile)
        for dtype, width, layers, backward, saved in (
            ("float32", 64, 4, False, False), ("float32", 64, 4, True, False),
            ("float32", 96, 3, True, True), ("float64", 64, 4, True, False),
            ("float32", 128, 5, True, True),
        )
    ],
    *[
        Case(f"network in slices {dtype} {width}, backward, kept",
             network(dtype, (2, *[width] * 3, 1), True, True), HOPPER,
             ("cp.async.cg.shared.global", "cp.async.wait_group"))
        for dtype, width in (("float64", 128), ("float32", 192), ("float32", 256))
    ],
    *[
        Case(f"network's value {dtype} {width}, {'backward' if backward else 'forward'}",
             network(dtype, (4, *[width] * layers, 3), backward, jet=False), HOPPER,
             ("mma.sync.aligned.m16n8k8.row.col.f64", "ld.const.f64") if dtype == "float64"
             else ("fma.rn.f32",))
        for dtype, width, layers, backward in (("float64", 64, 4, True), ("float32", 128, 3, False))
    ],
    *[
        Case(f"network's value {dtype} {widths}, {'backward' if backward else 'forward'}, {where}",
             network(dtype, widths, backward, jet=False, info=info), info,
             (f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", "ldmatrix"))
        for dtype, kind, widths, info, where, backward in (
            ("bfloat16", "bf16", (64, 64, 64, 64, 64), AMPERE, "A100", False),
            ("float16", "f16", (64, 64, 64, 64), AMPERE, "A100", True),
        )
    ],
    *[
        Case(f"network {width} {precision}, {'backward' if backward else 'forward'}, {saved:d}, "
             f"{info.name}",
             network("float32", (2, *[width] * layers, 1), backward, saved, info=info,
                     precision=precision), info, (f"mma.sync.aligned.{kind}",))
        for width, layers, backward, saved, precision, kind, info in (
            (64, 4, True, False, "bf16x6", "m16n8k16.row.col.f32.bf16", AMPERE),
            (96, 3, True, True, "bf16x6", "m16n8k16.row.col.f32.bf16", HOPPER),
            (64, 4, True, False, "tf32", "m16n8k8.row.col.f32.tf32", HOPPER),
        )
    ],
    Case("network's weights in parts",
         network("float32", (2, 64, 64, 64, 1), True, precision="bf16x6")[:1], HOPPER,
         ("griddepcontrol.launch_dependents", "cvt.rn.bf16x2.f32")),
    *[
        Case(f"network {width} bf16x6, {'backward' if backward else 'forward'}, {saved:d}, warp "
             f"groups",
             network("float32", (2, *[width] * layers, 1), backward, saved, jet,
                     precision="bf16x6")[1:], HOPPER,
             (f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16", "cp.async.cg",
              "griddepcontrol.wait"))
        for width, layers, backward, saved, jet in (
            (128, 5, False, False, True), (128, 5, True, True, True), (128, 5, True, False, True),
            (64, 4, False, False, True), (64, 4, True, True, True), (64, 4, True, False, False),
        )
    ],
    *[
        Case(f"networks {dtype} 64, {'backward' if backward else 'forward'}",
             network(dtype, (2, *[64] * 4, 1), backward, several=(16,)), HOPPER)
        for dtype, backward in (("float32", False), ("float32", True), ("float64", True))
    ],
    *[
        Case(f"network along a direction of each point, {dtype}",
             network(dtype, (2, *[64] * 4, 1), True, jet=False, along=True), HOPPER)
        for dtype in ("float32", "float64")
    ],
    *[
        Case(f"network's value {dtype} {widths}, {activation}, warp groups",
             network(dtype, widths, backward, jet=False, activation=activation), HOPPER,
             ("wgmma.mma_async", *instructions))
        for dtype, widths, activation, backward, instructions in (
            ("bfloat16", (64,) * 4, "relu", False, ("m64n64k16.f32.bf16.bf16", "cvt.rn.relu")),
            ("bfloat16", (64, 128, 128, 128, 64), "tanh", False, ("m64n128k16", "ld.global.v4")),
            ("bfloat16", (64,) * 5, "tanh", True, ("m64n72k16", "stmatrix", "cp.async.cg")),
            ("float16", (64,) * 6, "relu", True, ("m64n72k16.f32.f16.f16", "set.gt.f16x2")),
            ("bfloat16", (3, 64, 64, 64, 1), "relu", True, ("m64n8k16", "mul.rn.bf16x2")),
        )
    ],
    *[
        Case(f"network's gradients bfloat16 {widths}, {activation}, sums of one group of {how}",
             apart(how, widths, activation), HOPPER,
             ("m64n72k16.f32.bf16.bf16", "setmaxnreg.inc", "mbarrier.try_wait", *instructions))
        for how, widths, activation, instructions in (
            ((3, False), (64,) * 4, "silu", ()),
            ((3, True), (64,) * 5, "relu", ("set.gt.u32.bf16x2", "prmt.b32")),
            ((3, False), (64,) * 6, "relu", ("mul.rn.bf16x2",)),
            ((2, False), (64,) * 6, "tanh", ()),
        )
    ],
    # no instruction rounds to bfloat16 there, and passes by 16 bytes have no other way
    Case("gate backward bf16, T4", (gate(TURING, "bfloat16", "silu", backward=True),), TURING),
    Case("rows bf16, T4", (by_rows(TURING, "bfloat16", True),), TURING),
    Case("rows, value by value", (by_rows(TURING, "float16", True, 1001),), TURING),
    taken("cores, an operand by rows", CORES, scaled(2048, 2048, 512, "float32", (0, 1, 0)), AMPERE,
          ("st.global.v4.f32",)),
    taken("tensor cores bf16, a number", TENSOR_CORES, scaled(512, 512, 512, "bfloat16", (0, 0, 0)),
          AMPERE),
    taken("mirror f64, an operand by rows", MIRROR, scaled(100, 90, 80, "float64", (0, 1, 0)),
          HOPPER),
    taken("wgmma bf16, an operand by rows", WGMMA,
          scaled(4096, 4096, 512, "bfloat16", (0, 1, 0)), HOPPER,
          ("cp.async.bulk.tensor.3d.global",)),
    taken("wgmma f16, saved, with an operand", WGMMA,
          scaled(4096, 4096, 512, "float16", (0, 4096, 1), pre="float32"), HOPPER),
    *[
        taken(f"wgmma bf16, two sums, {' '.join(results)}, {n}", WGMMA,
              gated(m, n, 2048, "bfloat16", results=results, biases=n > 2048), HOPPER,
              ("cp.async.bulk.tensor.3d.global",))
        for results in (("out",), ("out", "pre", "pre1")) for m, n in ((8192, 5632), (512, 512))
    ],
    taken("wgmma f16, two sums, gradients", WGMMA,
          gated(8192, 5632, 2048, "float16", results=("out", "pre"), grad=True), HOPPER,
          ("cp.async.bulk.tensor.3d.global",)),
    *[taken(f"wgmma bf16, alternate columns, {' '.join(results)}{' gradients' * grad}, {n}",
            WGMMA, alternate(gated(m, n, 2048, "bfloat16", results=results, grad=grad,
                                   biases=biases)), HOPPER,
            ("cp.async.bulk.tensor.3d.global",) if n % 8 == 0 else ())  # (else a copy comes first)
      for results, m, n, biases, grad in (
          (("out",), 8192, 5632, False, False), (("out",), 512, 512, True, False),
          (("out", "pre", "pre1"), 8192, 5632, True, False),
          (("out", "pre"), 8192, 5632, True, True),
          (("out", "pre"), 1333, 1777, True, True),
          (("out", "pre", "pre1"), 1333, 1777, True, False),
      )],
    *[taken(f"{dtype}, alternate columns", tier,
            alternate(gated(4096, 2816, 1024, dtype, results=("out", "pre", "pre1"), whole=True)),
            HOPPER, (instruction,))
      for dtype, tier, instruction in (
          ("float64", TENSOR_CORES, "mma.sync.aligned"), ("float32", CORES, "st.global.v4.f32"),
      )],
    taken("wgmma bf16, alternate columns, sums of float32", WGMMA,
          replace(alternate(gated(4096, 2816, 1024, "bfloat16", results=("out", "pre"))),
                  alternate="y", bias=None, bias1=None,
                  out=operand("float32", 4096, 2816), pre=operand("float32", 4096, 2816),
                  epilogue=epilogues.Epilogue("sums", ("z", "z1"), (),
                                              (("out", leaf("z")), ("pre", leaf("z1"))))), HOPPER),
    taken("wgmma bf16, two sums, gradients of any alignment", WGMMA,
          gated(1333, 1777, 1000, "bfloat16", results=("out", "pre"), grad=True, alignment=2),
          HOPPER),
    taken("wgmma bf16, two sums of any alignment", WGMMA,
          gated(1333, 1777, 1000, "bfloat16", results=("out", "pre", "pre1"), alignment=2),
          HOPPER),
    *[taken(f"{dtype}, two sums, {'gradients' if grad else 'three results'}", tier,
            gated(4096, 2816, 1024, dtype, results=("out", "pre", "pre1")[: 3 - grad], grad=grad,
                  whole=True), info, (instruction,))
      for dtype, tier, instruction, grad, info in (
          ("float64", TENSOR_CORES, "mma.sync.aligned", False, HOPPER),
          ("float64", TENSOR_CORES, "mma.sync.aligned", True, AMPERE),
          ("float32", CORES, "st.global.v4.f32", True, HOPPER),  # (of the copy before it)
      )],
    taken("wgmma bf16, two terms", WGMMA,
          replace(product(8192, 2048, 5632, "bfloat16", y_turned=True),
                  x1=operand("bfloat16", 8192, 5632), y1=operand("bfloat16", 5632, 2048, True)),
          HOPPER, ("wgmma",)),
]  # fmt: skip

#: Its kernel is assembled by the driver.
ASKING = "wgmma bf16"
#: Seconds of a core that a kernel takes to be compiled, by the first word of its name; others 2.
SECONDS = {"network": 15, "wgmma": 12, "cores": 5, "few": 5, "mma.sync": 5, "small": 5, "tensor": 5,
           "vectors": 5}  # fmt: skip
#: Kernels that are alike but for the name of an instruction, or another term of the same kind.
ALIKE = {"float16": "bfloat16", "tf32": "bfloat16", "bf16x6": "bf16x3"}


def _kinds(case: Case) -> set[object]:
    """The GPU, and of kernels two words of their names, but no dtype where another one is alike."""
    found: set[object] = {case.info.capability}
    for launch in case.launches:
        first, *more = launch.kernel.name.split()
        words = more if first == "wgmma" else [x for x in more if x.isalpha()]
        if first == "network":
            words = words or ["jet"]  # (a value is one of no directions)
        # (those that convert differ in little, and come with long ones)
        found.add((first, *(ALIKE.get(x, x) for x in words[: first != "convert"])))
    return found


def _seconds(case: Case) -> float:
    def of(name: str) -> float:
        twice = "backward" in name or "-> rows" in name  # (whose values go one by one)
        return SECONDS.get(name.split()[0], 2) * (1 + twice)

    return sum(map(of, {launch.kernel.name for launch in case.launches}))


if not weekly.ALL:
    # Every kind of kernel, and every GPU. (All take a core 25 minutes.)
    CHOSEN = {ASKING} | weekly.covering(
        {case.name: _kinds(case) for case in CASES},
        {case.name: 0.01 if case.name == ASKING else _seconds(case) for case in CASES},
    )
    CASES = [case for case in CASES if case.name in CHOSEN]


def _compile_all(directory: Path) -> None:
    """Compile each kernel once, however many launches have it."""
    for case in CASES:
        for launch in case.launches:
            path = directory / launch.kernel.key(case.info.capability)
            if not path.exists():
                path.write_text(launch.kernel.ptx(case.info.capability))


COMPILED = once.Process(lambda directory: [sys.executable, __file__, str(directory)], timeout=1800)


def _ptx(kernel: toolchain.Kernel, capability: tuple[int, int]) -> str:
    """Return what a kernel was compiled to, in a process that compiles all of them."""
    done = COMPILED.result()
    assert done.returncode == 0, done.stderr[-5000:]
    return (COMPILED.directory / kernel.key(capability)).read_text()


@pytest.fixture
def compiled_before(monkeypatch):
    """A kernel's text is what the other process has made, and not compiled again."""
    monkeypatch.setattr(toolchain.Kernel, "ptx", _ptx)


def test_numba_cuda_is_the_package_and_not_numbas_own_module():
    import numba_cuda

    assert str(toolchain.cuda.__file__).startswith(str(numba_cuda.__path__[0]))


@pytest.mark.long(shared=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_compiles_to_the_expected_instructions(case):
    for number, launch in enumerate(case.launches):
        made = launch.kernel
        text = _ptx(made, case.info.capability)
        assert len(launch.arguments) == len(made.signature)
        if not number:
            for instruction in case.instructions:
                assert instruction in text, f"{made.name} has no {instruction}"
        assert "__local_depot" not in text or case.stack, f"{made.name}: an array in local memory"
        if shutil.which("ptxas") is not None:
            _check_assembled(case, made)


@functools.cache
def _assembled(made: toolchain.Kernel, capability: tuple[int, int]) -> str:
    """Return what `ptxas` tells of a kernel."""
    ptxas, text = shutil.which("ptxas"), _ptx(made, capability)
    release = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
    major, minor = map(int, re.search(r"release (\d+)\.(\d+)", release.stdout).groups())
    known = f"{major - 4}.{minor}"  # CUDA 13.0 reads PTX 9.0
    version = re.search(r"\.version (\d+)\.(\d+)", text)
    if tuple(map(int, version.groups())) > (major - 4, minor):
        text = text.replace(version[0], f".version {known}")
    source = COMPILED.directory / "kernel.ptx"
    source.write_text(text)
    arch = "sm_" + "".join(map(str, made.architecture(capability)))
    done = subprocess.run(
        [ptxas, f"-arch={arch}", "-v", str(source), "-o", str(source.with_suffix(".cubin"))],
        capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, f"{made.name}: {done.stderr[-2000:]}"
    return done.stderr


def _check_assembled(case, made):
    told = _assembled(made, case.info.capability)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    assert spilled and not any(map(int, spilled)), f"{made.name}: {told}"
    stack = int(re.search(r"(\d+) bytes stack frame", told)[1])
    assert stack <= case.stack, f"{made.name}: {stack} bytes of stack"
    registers = int(re.search(r"Used (\d+) registers", told)[1])
    assert registers <= case.registers, f"{made.name}: {registers} registers"
    # The serialisation of wgmma is a note of the assembler, and costs half of the speed.
    assert "wgmma" not in told, f"{made.name}: {told}"


@pytest.mark.long(shared=True)
@pytest.mark.usefixtures("compiled_before")
@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_what_is_loaded_has_no_spills_either(case):
    """nvJitLink assembles for linking, which is not what `ptxas` does by itself."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    for launch in case.launches:
        made = launch.kernel
        text = _ptx(made, case.info.capability)
        code, _ = made.binary(case.info.capability)
        if "setmaxnreg" in text:  # which nvJitLink ignores: the driver assembles these
            assert code.endswith(b"\0") and b"\n.version 8.0\n" in code
            continue
        assert code.startswith(b"\x7fELF")
        arch = "sm_" + "".join(map(str, made.architecture(case.info.capability)))
        handle = nvjitlink.create(3, [f"-arch={arch}", "-O3", "-verbose"])
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text.encode(), len(text), "test")
            nvjitlink.complete(handle)
            log = bytearray(nvjitlink.get_info_log_size(handle))
            nvjitlink.get_info_log(handle, log)
        finally:
            nvjitlink.destroy(handle)
        spilled = re.findall(rb"(\d+) bytes spill (?:stores|loads)", log)
        # (three registers of the largest jet, once a point, on GPUs that few have)
        most = 12 if case.name == "jet float64 backward, 2, before 9.0" else 0
        assert spilled and max(map(int, spilled)) <= most, f"{made.name}: {log.decode()}"


@pytest.mark.long(shared=True)
@pytest.mark.usefixtures("compiled_before")
def test_the_kernels_that_ask_for_registers_are_assembled_by_the_driver():
    (launch,) = next(case for case in CASES if case.name == ASKING).launches
    code, entry = launch.kernel.binary((9, 0))
    assert code.startswith(b"//") and entry.encode() in code
    assert launch.kernel.linked((9, 0)).startswith(b"\x7fELF")  # where it has no assembler


def test_a_name_that_numpy_dropped_is_there_only_while_numba_cuda_is_imported():
    """numba-cuda 0.30 overloads row_stack, which NumPy 2.5 has no more."""
    code = (
        "import numpy as np\n"
        "before = vars(np).pop('row_stack', None)\n"
        "np.__all__ = [name for name in np.__all__ if name != 'row_stack']\n"
        "names = set(vars(np))\n"
        "from numfuse.backends.cuda.compile import toolchain\n"
        "import sys; assert 'numba.cuda.np.arrayobj' in sys.modules, 'or it would fail later'\n"
        "given = set(vars(np)) - names\n"
        "assert not given & {'row_stack', 'in1d', 'trapz'}, given\n"
        "if before is not None:\n"
        "    np.row_stack = before\n"
        "    from numfuse.backends.cuda.compile.toolchain import _dropped\n"
        "    with _dropped(): assert np.row_stack is before\n"
        "    assert np.row_stack is before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


@pytest.mark.long
def test_a_compiled_kernel_is_found_on_disk_by_the_next_process(tmp_path):
    code = (
        "import numfuse as nf\n"
        "from numfuse import epilogues\n"
        "from numfuse.backends.cuda.kernels import pointwise\n"
        "from numfuse.backends.cuda.kernels.pointwise import Result, Source\n"
        "from numfuse.backends.cuda.compile import toolchain\n"
        "from numfuse.backends.cuda.plan.product import DeviceInfo\n"
        "info = DeviceInfo('A100', (8, 0), 108, 163 << 10, 164 << 10, 40 << 20)\n"
        "gate = epilogues.gate(nf.activations()['relu'].curve)\n"
        "sources = [Source(name, name, 'float32') for name in 'ab']\n"
        "results = [Result('out', 'out', 'float32')]\n"
        "made = pointwise.launch(info, gate, 'float32', sources, results, 10, 16, False).kernel\n"
        "body, entry = made.binary((8, 0))\n"
        "import hashlib; print(made.origin, entry, hashlib.sha256(body).hexdigest())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run(warned=False):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert not done.returncode, done.stderr[-2000:]
        assert (f"{tmp_path}" in done.stderr and "is damaged" in done.stderr) == warned
        return done.stdout.split()

    first, second = run(), run()
    assert (first[0], second[0]) == ("compiled", "disk")
    assert first[1:] == second[1:]
    (file,) = (tmp_path / "numfuse" / "cuda").glob("*.bin")
    file.write_bytes(file.read_bytes()[:-5])  # cut short by a full disk
    assert run(warned=True) == first
    assert run() == second


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_interrupt_comes_when_a_kernel_is_compiled(monkeypatch):
    kernel = gate(AMPERE, "float32", "silu").kernel
    finished = []
    handled = threading.Event()
    plain = assembler.ptx

    def noted(*arguments):
        if not finished:  # the main thread is waiting for this one by now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            handled.wait(60)  # (NVVM lets no other thread run, and may be through before)
        text = plain(*arguments)
        finished.append(text)
        return text

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        assert not finished
        handled.set()
        raise Interrupt

    monkeypatch.setattr(assembler, "ptx", noted)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupt):
            kernel.ptx((8, 0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(finished) == 1
    assert len(kernel.ptx((8, 0))) == len(finished[1]) and ".entry" in finished[1]


@pytest.mark.parametrize("activation", ["none", "relu", "tanh"])
@pytest.mark.parametrize("counts", [(2, 2), (5, 5), (5, 2), (2, 7)])
def test_the_pass_of_a_jet_is_a_program_whatever_is_written(activation, counts):
    """Guards: where nothing is asked of many directions or seconds, there is no loop over them."""
    of = epilogues.layer_jet_backward(ACT[activation].curve)
    for written in (["d_z"], ["d_z_dot"], ["d_z_ddot"], ["d_z", "d_z_ddot"]):
        for weighted in {True, counts[0] != counts[1]}:
            made = jet_lines.of(of, frozenset(written), True, counts, weighted, True)
            compile(jet_lines.text(made, sorted(made.read) + written, True), "a pass", "exec")


def test_a_map_is_an_argument_of_128_bytes_whose_address_the_kernel_gets():
    text = toolchain.kernel(
        _reads_a_map, "u64 map u64", threads=32, LOAD=elements.loads("float32"),
        STORE=elements.stores("float32"),
    ).ptx((9, 0))  # fmt: skip
    assert re.search(r"\.param \.align 64 \.b8 \w+_param_1\[128\]", text)
    assert "cvta.param.u64" in text


def _reads_a_map(out, table, unused):
    STORE(out, 0, LOAD(table, 0))  # noqa: F821


def test_a_launch_names_every_argument_of_a_kernel_and_no_other():
    made = schema.Schema(_reads_a_map, "u64", map="table")
    assert made.signature == "u64 map u64"
    assert made(table=2, unused=3, out=1) == (1, 2, 3)
    with pytest.raises(TypeError, match="the kernel wants arguments out, unused"):
        made(table=2)
    with pytest.raises(TypeError, match="the kernel has no arguments other"):
        made(table=2, unused=3, out=1, other=4)
    with pytest.raises(TypeError, match="the kernel has no arguments pre"):
        schema.Schema(_reads_a_map, map="pre")


Array = schema.Array


def _adds(x: Array, n):
    return x.address + n


def test_a_launch_gives_an_array_as_one_argument():
    made = schema.Schema(_adds, i32="n", u64="x_address")
    assert made.names == ("x_address", "x_place", "x_row", "x_column", "n")
    assert made.signature == "u64 i64 i64 i64 i32"
    assert made(n=5, x=Array(1, 2, 3, 4)) == (1, 2, 3, 4, 5)
    with pytest.raises(TypeError, match="the kernel has no arguments x_row"):
        made(n=5, x_row=3)


def test_what_has_no_identity_is_not_bound():
    with pytest.raises(TypeError, match="cannot bind"):
        toolchain.kernel(_reads_a_map, "u64 map u64", threads=32, LOAD=lambda x: x)


def test_equal_bindings_are_one_kernel():
    made = [
        MIRROR.take(product(m, 8, 8, "float32", function="relu"), AMPERE).launches[0].kernel
        for m in (8, 9)
    ]
    assert made[0] is made[1]
    assert Slot("x") == Slot("x", 0)


def test_an_activation_is_a_function_of_kernels_of_your_own():
    from numba import cuda

    value, slope = ACT["silu"].cuda, ACT["silu"].cuda_derivative

    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = value(x[i]) + slope(x[i])

    for real in (toolchain.types.float32, toolchain.types.float64):
        with assembler.compiling_for((8, 0)):
            text, _ = cuda.compile_ptx(
                kernel, toolchain.types.void(real[::1], real[::1]), cc=(8, 0)
            )
        width = real.bitwidth
        divided = {32: "rcp.approx.ftz.f32", 64: "div.rn.f64"}[width]
        assert divided in text and f"fma.rn.f{width}" in text
        assert "div.rn.f32" not in text, "a division branches"
        assert "f64" not in text or width == 64, "float32 arithmetic became float64"


if __name__ == "__main__":
    _compile_all(Path(sys.argv[1]))
