"""Products of float64 from residues of 8 bits: which are made so, and the plans of one.

Both factors become residues first, panel by panel, in memory of the launch (a byte for each modulus
and element); then cells of the output go through all moduli (`kernels.residues`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numfuse.backends.cpu import descriptors, host, tiling
from numfuse.backends.cpu.descriptors import Group, Slots
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch.sequence import Operand, Plan, temporary
from numfuse.backends.cpu.llvm.residues import GAP, PANEL, PANEL_BYTES, STEP
from numfuse.moduli import Residues, count_of
from numfuse.moduli import residues as residues_of
from numfuse.runtime.specialise import Kernel

#: Values of K whose products are summed in 32 bits: 2^31 over 128^2, less a step.
MOST_K = 130_944


def takes(m: int, n: int, k: int, precision: str) -> bool:
    """Return whether all products of a call of these sizes are made of residues.

    They are where that is faster: by more than all elements take to become residues, and back.
    """
    if min(m, n, k) < PANEL or max(m, n, k) > MOST_K:
        return False
    count = count_of(precision)
    elements = tiling.RESIDUE_ELEMENT * count * (1 / m + 1 / n + 1 / k)
    return 1 - count / tiling.RESIDUE_SPEED > elements


class Multiplied(NamedTuple):
    """The phases of a product, the last of which is the product itself, and memory for them."""

    phases: list[list[Plan]]
    own: list[Operand]


def product(
    a: Operand,
    b: Operand,
    row: Kernel,
    slots: Slots,
    threads: int,
    batch: tuple[int, ...] = (),
    summed: tuple[int, ...] = (),
    turns: bool = True,
    rows: Group | None = None,
    precision: str = "int8",
) -> Multiplied:
    """`descriptors.product` from residues: the same arguments."""
    if turns and rows is None and descriptors.is_turned(a, b, slots):
        a, b = b.turned(), a.turned()
        slots = slots.each(Operand.turned)
    of = residues_of(count_of(precision))
    m, n = a.shape[-2], b.shape[-1]
    factors = [
        _Factor("left", a, of, True, batch, summed),
        _Factor("right", b.turned(), of, False, batch, summed),
    ]
    own = [x for factor in factors for x in (factor.planes, factor.exponents)]
    operands = (a, b, *slots.all(), *(x.planes for x in factors), *(x.exponents for x in factors))
    axes = descriptors.make_axes(batch, operands, summed) if batch else descriptors.NO_AXES
    if m == 0 or n == 0 or axes.elements == 0:
        return Multiplied([[]], [])
    # Whole panels, groups of rows, and chunks of the column sums, which are of groups then.
    chunk = 1 if slots.sums is None else library.chunk(a.fmt)
    unit = math.lcm(PANEL, chunk * (1 if rows is None else rows.members))
    t = tiling.residues(m, n, axes.elements, threads, unit, of.count)
    tiles = "emulated" if host.tiles_of_residues() == "emulated" else "AMX"
    made = descriptors.make_plan(
        library.residue_cell(of),
        descriptors.sizes_of(a, b, axes),
        operands,
        axes,
        t,
        library.registers_of_residues(),
        threads,
        (row,),
        tier=f"int8 by {tiles} tiles",
        held=0 if rows is None else rows.held,
    )
    return Multiplied([[factor.plan(threads) for factor in factors], [made]], own)


class _Factor:
    """The residues of a factor, given as lines along K."""

    def __init__(
        self,
        name: str,
        lines: Operand,
        of: Residues,
        by_rows: bool,
        batch: tuple[int, ...],
        summed: tuple[int, ...],
    ) -> None:
        self.lines, self.of, self.by_rows = lines, of, by_rows
        *_, count, k = lines.shape
        # Along an axis that the factor lacks there is one of its residues, but for sums.
        lead = (1,) * (len(batch) + 2 - len(lines.shape)) + lines.shape[:-2]
        self.batch = tuple(
            size if axis in summed else own
            for axis, (size, own) in enumerate(zip(batch, lead, strict=True))
        )
        self.summed = summed
        kept = tuple(1 if axis in summed else size for axis, size in enumerate(self.batch))
        sums = math.prod(self.batch) // math.prod(kept)
        self.panels = -(-count // PANEL)
        panel = of.count * (sums * -(-k // STEP) * PANEL_BYTES + GAP)
        self.planes = temporary(f"{name} residues", (*kept, self.panels, panel // 8), "float64")
        self.exponents = temporary(f"{name} exponents", (*kept, 1, self.panels * PANEL), "float64")
        self.spread = of.spread(k * sums)

    def plan(self, threads: int) -> Plan:
        """Return the plan that makes them."""
        x = self.lines
        operands = (x, None, *Slots(out=self.planes, pre=self.exponents).all())
        axes = descriptors.NO_AXES
        if self.batch:
            axes = descriptors.make_axes(self.batch, operands, self.summed)
        head = {
            "D_M": x.shape[-2],
            "D_N": 1,
            "D_K": x.shape[-1],
            "D_SUM_AXES": axes.summed,
            "D_SUM_SIZE": axes.sums,
            "D_A_ROW": x.strides[-2],
            "D_A_K": x.strides[-1],
            "D_SPREAD": self.spread,
        }
        cell = library.panel_cell(self.of, self.by_rows)
        t, r = tiling.panels(self.panels), library.registers_of_residues()
        return descriptors.make_plan(cell, head, operands, axes, t, r, threads)
