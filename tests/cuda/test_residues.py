"""The kernels of float64 by integers without a GPU: run by a machine in Python, and planned.

Guards: docs/cuda.md, "float64 by integers": residues are right in every layout, the sums of wgmma
are exact wherever a block, a part of K or a modulus is, and who is faster decides who runs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from conftest import SIMULATED, unavailable
from hypothesis import given
from hypothesis import strategies as st

from numfuse import moduli
from numfuse.backends.cuda import tiling
from numfuse.moduli import MODULI, Residues, residues

try:
    from cuda_devices import ADA, AMPERE, HOPPER, TURING
    from cuda_hopper import Hopper
    from cuda_machine import Machine
    from test_cuda_blocks import Array

    from numfuse.backends.cuda.compile import integers
    from numfuse.backends.cuda.kernels.hopper.tiling import HopperTile
    from numfuse.backends.cuda.kernels.residues import split, tier
    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product, Slot
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)

#: Few, so that a block has several units of work.
SMALL = replace(HOPPER, multiprocessors=2)
TILES = (
    HopperTile(64, 64, 1, False),
    HopperTile(128, 128, 2, False),
    HopperTile(128, 128, 2, True),
)


# --- the numbers ----------------------------------------------------------------------------------
def test_the_moduli_are_the_largest_that_are_coprime():
    found = [256]
    for number in range(255, MODULI[-1] - 1, -1):
        if all(math.gcd(number, other) == 1 for other in found):
            found.append(number)
    assert tuple(found) == MODULI


@pytest.mark.parametrize("count", range(moduli.FEWEST, moduli.MOST + 1))
def test_a_number_below_half_of_the_product_is_known_by_its_residues(count):
    """The words of the weights are those of exact fractions, and their sums fit a float64."""
    of = residues(count)
    high, low = of.weights
    n, h, rest = of.scale
    assert abs((Fraction(h) + Fraction(rest)) * 2**n / of.whole - 1) < Fraction(1, 2**100)
    assert all(w * 2**moduli.EXACT == int(w * 2**moduli.EXACT) for w in high)
    assert 255 * sum(high) * 2**moduli.EXACT < 2**53
    whole = of.whole // 3
    parts = [whole % p for p in of.moduli]
    weights = [Fraction(a) + Fraction(b) for a, b in zip(high, low, strict=True)]
    share = sum(r * w for r, w in zip(parts, weights, strict=True))
    assert abs(share - round(share) - Fraction(whole, of.whole)) < Fraction(1, 2**80)


@pytest.mark.parametrize("words", [2, 3])
@given(data=st.data())
def test_residues_are_those_of_the_rounded_number(words, data):
    """The PTX of both intrinsics, for every modulus."""
    from cuda_ptx import block

    most = {2: 62, 3: 78}[words]
    numbers = data.draw(st.lists(st.floats(-(2.0**most), 2.0**most), min_size=4, max_size=4))
    ties = st.integers(-(2**20), 2**20).map(lambda n: n + 0.5)
    numbers[0] = data.draw(st.one_of(ties, st.integers(-300, 300).map(float)))
    cut = block(integers._SPLIT[words])
    given = [word for x in numbers for word in cut(None, [x])]
    for modulus in MODULI:
        packed = block(integers.residue_text(modulus, words))(None, given)
        for i, x in enumerate(numbers):
            residue = integers.symmetric(packed >> 8 * i, 256)
            assert (residue - round(x)) % modulus == 0


@given(sums=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4))
def test_remainders_of_any_sum_are_bytes_equal_to_it(sums):
    from cuda_ptx import block

    for modulus in MODULI:
        near = [s - s % modulus for s in sums]  # multiples, where a quotient may be one less
        for own in (sums, [max(x, -(2**31)) for x in near]):
            given = [*own, integers.inverse_of(modulus), -modulus]
            packed = block(integers._remainders())(None, given)
            for i, x in enumerate(own):
                assert ((packed >> 8 * i & 255) - x) % modulus == 0


def test_a_part_of_k_holds_no_sum_that_overflows():
    longest = tier.SLICES * tier.SLICE
    assert longest * 128 * 128 < 2**31 <= (longest + 2 * tier.SLICE) * 128 * 128


# --- the kernels ----------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("layout", ["rows", "columns", "strided", "reversed"])
@pytest.mark.parametrize(("name", "count"), [("x", 9), ("y", 18)])
def test_a_factor_becomes_its_residues(name, layout, count):
    of, rows, depth = residues(count), 34, 150
    rng = np.random.default_rng(count)
    values = rng.standard_normal((1, rows, depth))
    values *= np.exp2(rng.integers(-20, 20, values.shape))
    values[0, 5] = 0
    shown = values if name == "x" else np.ascontiguousarray(values.swapaxes(1, 2))
    x = Array(shown, "float64", layout)
    slot, pitch = Slot(f"{name} copy"), tiling.pitch(depth, 1)
    launches = split.planes_of(name, x.operand, rows, depth, 1, of, HOPPER, slot)
    scales = np.full(rows, np.nan)
    out = np.full((count, split.plane_rows(name, rows), pitch), 99, np.int8)
    machine = Machine([x.memory, scales, out])
    slots = {name: x.address, f"{name} scales": scales.ctypes.data, f"{name} copy": out.ctypes.data}
    for launch in launches:
        machine.run(launch, **slots)
    for i in range(rows):
        scaled = [round(Fraction(float(v)) * Fraction(2) ** int(scales[i])) for v in values[0, i]]
        square = sum(v**2 for v in scaled)
        assert i == 5 or of.whole < square * 8.1 < 4.1 * of.whole
        place = i if name == "x" else 8 * (i >> 1 & 7) + 2 * (i >> 4 & 3) + (i & 1) + (i & ~63)
        for q, p in enumerate(of.moduli):
            found = out[q, place, :depth].astype(int)
            assert all((a - b) % p == 0 for a, b in zip(scaled, found.tolist(), strict=True))


def planned(m, n, k, count, parts, monkeypatch, tile, *, info=SMALL):
    monkeypatch.setattr(tier, "hopper_tile", lambda *_, **__: (tile, 1))
    operands = (Operand("float64", (0, length, 1), 16) for length in (k, n, n))
    product = Product(m, n, k, 1, *operands, "float64", precision=f"int8:{count}")
    return tier.plan_with(product, Residues(count), info, parts)


@pytest.mark.long
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sums_of_wgmma_are_exact_and_where_they_belong(tile, monkeypatch):
    m, n, k, parts = (70, 100, 300, 2) if tile.block_m == 64 else (130, 140, 200, 1)
    plan = planned(m, n, k, 3, parts, monkeypatch, tile)
    checked(plan.launches[-2], m, n, k, parts)


def checked(launch, m, n, k, parts):
    """Run a launch on residues of three moduli, and look at its sums."""
    pitch, width = -(-k // 16) * 16, -(-n // 64) * 64
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-128, 128, (3, r, pitch)).astype(np.int8) for r in (m, width))
    out = np.full((parts, 3, m, width), 77, np.uint8)
    slots = {"x copy": x, "y copy": y, "work": out}
    machine = Hopper(list(slots.values()))
    machine.run(launch, **{name: a.ctypes.data for name, a in slots.items()})
    column = np.arange(n)
    place = (column & ~63) + 8 * (column >> 1 & 7) + 2 * (column >> 4 & 3) + (column & 1)
    for q, p in enumerate(MODULI[:3]):
        wanted = x[q, :, :k].astype(int) @ y[q, place, :k].astype(int).T
        assert ((out[:, q, :, :n].astype(int).sum(0) - wanted) % p == 0).all()


@pytest.mark.long
def test_sums_of_mma_sync_are_exact_and_where_they_belong(monkeypatch):
    m, n, k, parts = 140, 70, 200, 2
    plan = planned(m, n, k, 3, parts, monkeypatch, TILES[0], info=ADA)
    checked(plan.launches[-2], m, n, k, parts)


@pytest.mark.long
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_whole_product_runs(kept, monkeypatch):
    monkeypatch.setattr(tier, "KEPT", kept)
    m, n, k, count, parts = 20, 40, 200, 8, 2
    plan = planned(m, n, k, count, parts, monkeypatch, TILES[0])
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    out = np.full((m, n), np.nan)
    room = {launch.makes[0]: np.zeros(launch.makes[1], np.uint8)
            for launch in plan.launches if launch.makes}  # fmt: skip
    a[3, 7] = np.inf
    room |= {"x": a, "y": b, "out": out, "work": np.zeros(plan.workspace, np.uint8)}
    machine = Hopper(list(room.values()))
    for launch in plan.launches:
        machine.run(launch, **{name: x.ctypes.data for name, x in room.items()})
    with np.errstate(invalid="ignore"):
        wanted = a @ b
    rows = np.arange(m) != 3
    norms = np.linalg.norm(a[rows], axis=1)[:, None] * np.linalg.norm(b, axis=0)
    bound = 4 * np.sqrt(k / float(Residues(count).square)) * norms
    assert (abs(out[rows] - wanted[rows]) <= bound).all() and (out[3] == wanted[3]).all()


# --- who runs -------------------------------------------------------------------------------------
def chosen(m, n, k, info=HOPPER, dtype="float64", **how):
    operands = (Operand(dtype, (0, length, 1), 16) for length in (k, n, n))
    product = Product(m, n, k, 1, *operands, dtype, **how)
    return tiers.choose(product, info)[0].name


def test_integers_run_where_they_are_faster_and_were_asked_for():
    assert chosen(8192, 8192, 8192, precision="int8") == "int8"
    assert chosen(4096, 4096, 4096, precision="int8:14") == "int8"
    assert chosen(4096, 4096, 4096) == "tensor cores"
    for sizes in ((512, 512, 512), (16, 8192, 8192), (8192, 16, 8192), (8192, 8192, 128)):
        assert chosen(*sizes, precision="int8") == chosen(*sizes) != "int8"
    # more moduli take longer than float64 itself
    assert chosen(4096, 4096, 4096, precision="int8:20") == "tensor cores"
    # where float64 is slow, for small ones too; and nowhere that no rates are known of
    assert chosen(1024, 1024, 1024, ADA, precision="int8") == "int8"
    assert chosen(4096, 4096, 4096, AMPERE, precision="int8") == "int8"
    assert chosen(4096, 4096, 4096, TURING, precision="int8") == "mirror"


@pytest.mark.parametrize("name", moduli.precisions())
def test_a_precision_names_its_moduli(name):
    count = moduli.count_of(name)
    assert count == (int(name[5:]) if ":" in name else moduli.DEFAULT)
    assert moduli.count_of("ieee") == moduli.count_of("bf16x6") == 0
