"""A network's tangent, and its double backward, each as one launch.

As `networks`, of which they have the phases, the blocks and the cells: a block passes all layers
with one tangent beside its points. A layer's row functions are those of a jet along one direction,
without second derivatives. What does not move has no tangent, and none is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numfuse.backends.cpu.kernels import groups, network, network_second, protocol
from numfuse.backends.cpu.launch.sequence import Program, Step, program
from numfuse.backends.cpu.networks import (
    TABLE_BYTES,
    Form,
    Layout,
    Places,
    group_of,
    joins,
    pack,
    packed_weights,
    packing,
    partial_sums,
    plan_of,
)
from numfuse.runtime.specialise import Kernel


def moved_of(f: Form) -> list[bool]:
    """Return whether the points move, then whether each layer's sums do."""
    moved = ["x_dot" in f.arrays]
    for i in range(len(f.layers)):
        own = f"w_dot{i}" in f.arrays or f"b_dot{i}" in f.arrays
        moved.append(moved[-1] or own)
    return moved


class _Layout(Layout):
    """Where a network has its own, and the tangents of its weights and biases."""

    shares = False

    def __init__(self, f: Form) -> None:
        super().__init__(f)
        moved, packed, last = moved_of(f), Places(self.packed), len(f.layers) - 1
        #: Of each layer, where the addresses of its tangents' copies go.
        self.tables: list[int] = []
        for i, (x, words) in enumerate(zip(f.layers, self.layers, strict=True)):
            w, bias = f"w_dot{i}" in f.arrays, f"b_dot{i}" in f.arrays
            turned = w and words["L_TURNED_STEP"] != 0
            # of a product at the end only the tangent may be asked for
            sums = i < last or not f.plain or "out" in f.arrays
            words |= {
                "L_MEMBERS": 1 + moved[i], "L_MOVED": int(moved[i + 1]), "L_SUMS": int(sums),
                "L_W_DOT": packed.take(x.k * words["L_STEP"]) if w else -1,
                "L_TURNED_DOT": packed.take(x.n * words["L_IN_STEP"]) if turned else -1,
                "L_BIAS_DOT": packed.take(words["L_STEP"]) if bias else -1,
            }  # fmt: skip
            self.tables.append(packed.take(TABLE_BYTES))
        self.packed = packed.end


def _row(f: Form, layer: int, backward: bool) -> Kernel:
    """Return the row function of a layer; the last one's has no cotangent of its values."""
    moves = moved_of(f)[layer + 1]
    found = group_of(f._replace(directions=int(moves)), layer, backward)
    if backward and layer == len(f.layers) - 1:
        found = found._replace(value=found.value.without("grad"))
    return groups.row(found)


def _packing(f: Form, at: _Layout) -> Iterator[Step]:
    yield from packing(f, at)
    for i, (x, words) in enumerate(zip(f.layers, at.layers, strict=True)):
        w, bias = f.arrays.get(f"w_dot{i}"), f.arrays.get(f"b_dot{i}")
        if w is None and bias is None:
            continue
        places = {
            "P_TABLE": at.tables[i], "P_W": words["L_W_DOT"], "P_STEP": words["L_STEP"],
            "P_TURNED": words["L_TURNED_DOT"], "P_TURNED_STEP": words["L_IN_STEP"],
            "P_BIAS": words["L_BIAS_DOT"],
        }  # fmt: skip
        yield pack(f, at, (x.k if w else 0, x.n), {"W": w, "BIAS": bias}, places)


def _cells(f: Form, at: _Layout, threads: int) -> Step:
    """Return the step in which blocks pass the layers."""
    last, given = len(f.layers) - 1, f.arrays
    along, down = (network.products(f.acc, x) for x in (False, True))
    kernels: dict[Kernel, None] = dict.fromkeys((along, down))
    words = []
    # a last layer's results are made where somebody asks for them
    asked = "out" in given or "out_dot" in given
    for i, place in enumerate(at.layers):
        own = place | {"L_ALONG": along.address, "L_DOWN": down.address}
        curved = i < last or not f.plain
        for name, there in (("L_ROW", i < last or asked), ("L_BACK", f.backward)):
            if curved and there:
                row = _row(f, i, name == "L_BACK")
                own[name] = row.address
                kernels[row] = None
        if i == last and "L_ROW" not in own:
            own["L_OUT"] = own["L_Z"]
        words += protocol.LAYER.words(own)
    head = {
        "N_POINTS": f.points, "N_BLOCK": at.block, "N_CELL": at.cell, "N_LAYERS": len(f.layers),
        "N_MADE": len(f.layers) - (f.plain and not asked), "N_GRAD": at.turns[0],
        "N_Q": at.turns[1], "N_ONE": at.one, "N_PARTIAL": at.sums,
    }  # fmt: skip
    names = {"out": "VALUE", "out_dot": "DIRECTION"}
    slots = {names.get(x, x.upper()): given.get(x) for x in ("x", "x_dot", "grad", "d_x", *names)}
    slots["PACKED"] = packed_weights(at, f.acc)
    if f.backward:
        slots["PARTIAL"] = partial_sums(at, f.acc)
    cell = network_second.cell(f.acc, f.backward)
    count = f.networks * at.cells
    return plan_of(at, cell, count, threads, slots, head, words, tuple(kernels)), {}


def record(f: Form, names: Sequence[str], threads: int) -> Program | None:
    """Return the program of a call on arrays of these names; None where nothing moves."""
    f = f._replace(directions=1)
    if not moved_of(f)[-1]:
        return None
    at = _Layout(f)
    phases: list[list[Step]] = [[*_packing(f, at)], [_cells(f, at, threads)]]
    own = [packed_weights(at, f.acc)]
    if f.backward:
        phases.append([*joins(f, at, threads)])
        own.append(partial_sums(at, f.acc))
    return program(names, [phases], own)
