"""Trials of a device: what WGSL leaves open, and only a result tells."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.device.commands import Commands
from numfuse.backends.webgpu.device.memory import Binding
from numfuse.backends.webgpu.shaders import plain
from numfuse.backends.webgpu.shaders.shader import Access

if TYPE_CHECKING:
    from numfuse.backends.webgpu.device.device import Device


def one_rounding(device: Device) -> dict[str, bool]:
    """Return {accumulator: whether fma rounds once on the device}.

    WGSL allows two roundings; where it is one, low words of products cost one operation.
    """
    found = {}
    for name in device.dtypes & {"float32", "float64"}:
        dtype = np.dtype(name)
        rng = np.random.default_rng(1)
        factors = 1 + rng.random((64, 2)).astype(dtype)
        pairs = [(a, b, Fraction(float(a)) * Fraction(float(b))) for a, b in factors]
        rest = [float(exact - Fraction(float(a * b))) for a, b, exact in pairs]
        # what fma leaves beside a rounded product: 0 if it is two roundings
        left = "fma(f[0], f[1], -(f[0] * f[1]))"
        got = _tried(device, plain.probe("rounding of fma", Access(name), name, left), factors)
        found[name] = bool((got == np.array(rest, dtype)).all())
    return found


def flushed_subnormals(device: Device) -> frozenset[str]:
    """Return the dtypes of which subnormal numbers count as zero on the device.

    WGSL leaves it open, and has no word to ask for either.
    """
    found = set()
    for name in device.dtypes:
        dtype = np.dtype(name)
        info = np.finfo(dtype)
        # an argument that is subnormal, and a result; 16 of each, for a length in words
        given = [(2 * info.smallest_subnormal, 1), (info.smallest_normal, 0.5)] * 16
        factors = np.array(given, dtype)
        acc = "float64" if name == "float64" else "float32"
        positive = "select(ACC(), f[0] * f[1], f[0] > ACC())"
        probe = plain.probe(f"subnormal numbers of {name}", Access(name), acc, positive)
        products = _tried(device, probe, factors)
        if not (products == factors[:, 0] * factors[:, 1]).all():
            found.add(name)
    return frozenset(found)


def _tried(device: Device, probe: plain.Plain, factors: ndarray) -> ndarray:
    """Return one result a row, of a probe that takes one workgroup of them."""
    made = np.empty(len(factors), factors.dtype)
    given, found = device.buffer(factors.nbytes), device.buffer(made.nbytes)
    device.upload(factors, given)
    commands = Commands(device)
    bindings = {name: Binding(b, 0, b.size) for name, b in (("factors", given), ("found", found))}
    commands.dispatch(probe, bindings, {"count": len(factors)}, (1, 1, 1))
    (got,) = commands.submit([(Binding(found, 0, made.nbytes), made)])
    return got
