"""A network's jet, and its backward, each as one launch: blocks of points pass all layers.

Three phases: weights and biases are packed; cells of some blocks each run (`kernels.network`), a
block's stacks staying in the caches of its core; what the cells add to the gradients is joined in
their order. A backward makes its blocks again: that takes less time than reading what a forward
would have written. Blocks and cells depend on widths, members, points and dtype alone, so that no
bit depends on threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy import ndarray

from numfuse.backends import Call
from numfuse.backends.cpu import descriptors, host, tiling
from numfuse.backends.cpu.kernels import groups, library, network, protocol
from numfuse.backends.cpu.launch.sequence import (
    Operand,
    Plan,
    Program,
    Step,
    program,
    temporary,
)
from numfuse.backends.cpu.launch.workspace import PAGE
from numfuse.epilogues import layer_jet, layer_jet_backward
from numfuse.problem.operands import format_of
from numfuse.runtime.specialise import Kernel

if TYPE_CHECKING:
    from numfuse.activations import Activation

#: The widest layers that go this way: sums over K are one chain, as in every other kernel.
WIDEST = tiling.CHAIN
#: Bytes of a stack, and of all stacks of a block, which level 2 holds. A stack that level 1 holds
#: (half of it) takes 8 to 12 % more time at 256 columns: a block reads and writes all gradients.
STACK_BYTES, BLOCK_BYTES = 64 << 10, 1 << 20
#: Rows of a stack, at the most: so many products are one chain of sums in the gradients of weights.
ROWS = tiling.CHAIN
#: Points of a block in multiples of this, where there are as many.
POINTS = 8
#: Cells, at the most, and bytes of the sums of gradients that each has: beyond, fewer cells.
MOST_CELLS, FEWEST_CELLS, SUMS_BYTES = 32, 16, 4 << 20
#: Cells that copy a layer's weights, at the most, and bytes for each.
MOST_PARTS, PART_BYTES = 8, 32 << 10
#: Points times members of a backward whose blocks leave their stacks in the call's memory, at the
#: most; blocks that there are at least, if each has so many points.  There is nothing to join then:
#: 32 points of 256 columns spent 0.4 of their time with it, 256 points half.
SHARED_ROWS, SHARED_BLOCKS, SHARED_POINTS = 512, 4, 16
#: Points of a cell, at the least, whose sums are joined: half of it takes 10 to 18 % more time.
CELL_POINTS = 128
#: Sets and ways of level 1. A tile of narrow vectors reads a line of each row of weights; where
#: rows meet in few sets, the next tile beside it finds none of them there. And rows of a stack from
#: which on a copy with rows further apart is worth its time. Without, layers of 256 columns take
#: 1.1 times as long in float32, 1.4 times in float64 (Zen 3, whose level 2 has 512 KiB).
LEVEL1_SETS, LEVEL1_WAYS, APART_ROWS = 64, 8, 64
#: Bytes of the addresses that a layer has (`network.pack_cell`).
TABLE_BYTES = 5 * 8
#: The results that have an axis of members.
SEVERAL = "direction", "second"
#: Arrays that a program can name.
_ARRAYS = protocol.NUMBERS


class Layer(NamedTuple):
    """A layer of a network, without its addresses."""

    k: int
    n: int
    activation: Activation
    w: Operand
    b: Operand | None
    #: The transpose of weights that are packed, whose rows, as theirs, end in zeros.
    turned: Operand | None = None
    packed: bool = False


class Form(NamedTuple):
    """A network's call: what a program is made of."""

    points: int
    #: How many networks there are, in a batch.
    networks: int
    directions: int
    seconds: int
    pattern: bytes
    guard: bool
    acc: str
    layers: tuple[Layer, ...]
    #: x, directions, weights of second derivatives, results or cotangents, weights, biases and
    #: gradients, each with an axis of networks before its rows where it has one for each.
    arrays: Mapping[str, Operand]
    backward: bool
    #: Whether the stacks of all blocks are kept by a forward, and given to its backward.
    keeps: bool = False

    @property
    def plain(self) -> bool:
        """Return whether the last layer is a product alone."""
        return self.layers[-1].activation.is_identity

    def members(self, layer: int) -> int:
        """Return the members of a layer's inputs."""
        return 1 + self.directions + (self.seconds if layer else 0)


def form_of(
    net: Any, arrays: Mapping[str, ndarray | None], networks: int, backward: bool
) -> Form | None:
    """Return the form of a call whose arrays are these; None where it is not for this way."""
    acc = format_of(net.acc)
    widths = [net.x.shape[-1], *(w.shape[-1] for w, _, _ in net.layers)]
    packed = net.packed is not None
    empty = 0 in widths or not prod(net.x.shape[:-1]) or not networks
    if empty or max(widths) > WIDEST or len(arrays) > _ARRAYS:
        return None
    found = {
        name: Operand(name, x.shape, x.strides, acc, x.itemsize)
        for name, x in arrays.items()
        if x is not None
    }
    layers = []
    for i, (w, _, f) in enumerate(net.layers):
        own = found[f"w{i}"], found.get(f"b{i}"), found.get(f"t{i}"), packed
        layers.append(Layer(w.shape[-2], w.shape[-1], f, *own))
    how = net.directions, net.seconds, net.pattern, net.guard, acc, tuple(layers)
    return Form(found["x"].shape[-2], networks, *how, found, backward, "stacks" in found)


# --- places -------------------------------------------------------------------------------------
class Places:
    """Bytes from the beginning of some memory, handed out on lines."""

    def __init__(self, start: int = 0) -> None:
        self.end = start

    def take(self, size: int) -> int:
        """Return where so many bytes are, a few lines behind the ones before."""
        found = self.end
        self.end += tiling.round_up(size, tiling.LINE) + 3 * tiling.LINE
        return found


class Layout:
    """How many points a block is of, and where layers have their weights, stacks and sums."""

    #: Whether stacks of blocks may be in the call's memory.
    shares = True

    def __init__(self, f: Form, threads: int = 1) -> None:
        self.f, self.r = f, library.registers(f.acc)
        size, vl = self.r.itemsize, self.r.vl
        self.steps = [
            tiling.round_up(n, vl) * size for n in (f.layers[0].k, *(x.n for x in f.layers))
        ]
        most = 1 + f.directions + f.seconds
        widest = max(self.steps) * most
        every = sum(self.steps) * most * 2 + 2 * widest
        points = max(1, min(STACK_BYTES // widest, BLOCK_BYTES // every, ROWS // most))
        self.block = points // POINTS * POINTS or points
        weights = sum(x.k * step for x, step in zip(f.layers, self.steps[1:], strict=True))
        most_cells = max(FEWEST_CELLS, min(MOST_CELLS, SUMS_BYTES // weights))
        #: Whether blocks leave their stacks in the call's memory, and gradients are summed by rows.
        few = self.shares and f.points * most <= SHARED_ROWS
        self.shared = few and f.backward
        # (the bits of a forward that keeps nothing depend on no block)
        if few and (f.backward or f.keeps or threads > 1):
            each = tiling.round_up(-(-f.points // SHARED_BLOCKS), POINTS)
            self.block = min(self.block, max(SHARED_POINTS, each))
            self.cell = self.block
        else:
            fewest = self.block if not f.backward else max(self.block, CELL_POINTS)
            self.cell = self.block * max(
                -(-fewest // self.block), -(-f.points // (self.block * most_cells))
            )
        self.cells = -(-f.points // self.cell)
        #: The cells whose sums are joined to gradients.
        self.parts = 1 if self.shared else self.cells
        packed, work, sums = Places(), Places(protocol.CONTEXT_BYTES), Places()
        own = self.shared or f.keeps
        stacks, slopes = Places() if own else work, Places()
        self.layers: list[dict[str, int]] = []
        #: Of each layer, where copies of its operands go.
        self.copies: list[dict[str, int]] = []
        whole = self.block * most
        # Of a forward, all layers but the first share a place for sums.
        shared = work.take(widest * self.block) if not f.backward else 0
        self.one = work.take(size)
        turns = [work.take(widest * self.block) for _ in range(2)]
        for i, x in enumerate(f.layers):
            in_step, step = self.steps[i : i + 2]
            turned = f.backward and (i > 0 or "d_x" in f.arrays)
            words = {
                "L_K": x.k, "L_N": x.n, "L_MEMBERS": f.members(i),
                "L_IN_STEP": in_step, "L_STEP": step, "L_BIAS": int(x.b is not None),
                "L_D_W": sums.take(x.k * step) if f"d_w{i}" in f.arrays else -1,
                "L_D_BIAS": sums.take(step) if f"d_b{i}" in f.arrays else -1,
            }  # fmt: skip
            copies = self._copies(x, in_step, step, turned, packed, words)
            self.copies.append(copies)
            if f.backward or f.keeps:
                words["L_INPUT"] = stacks.take(whole * in_step)
                words["L_Z"] = stacks.take(whole * step)
                words["L_SLOPES"] = slopes.take(whole * step) if self.shared else 0
            else:
                # (nor does another layer's input lie where the first one's directions do)
                words["L_INPUT"] = turns[i % 2] if i else work.take(whole * in_step)
                words["L_Z"] = shared if i else work.take(whole * step)
            self.layers.append(words)
        for i, words in enumerate(self.layers):
            if i + 1 < len(self.layers):
                words["L_OUT"] = self.layers[i + 1]["L_INPUT"]
            else:
                words["L_OUT"] = stacks.take(whole * words["L_STEP"]) if own else turns[1 - i % 2]
        self.turns, self.packed = turns, packed.end
        #: Bytes that a block has in the call's memory.
        self.stacks = tiling.round_up(stacks.end, tiling.LINE) if own else 0
        self.slopes = tiling.round_up(slopes.end, tiling.LINE) if self.shared else 0
        self.blocks = -(-f.points // self.block)
        self.sums = tiling.round_up(sums.end, PAGE) + tiling.LINE
        self.own = work.take(8 * (protocol.N_LAYER + len(f.layers) * len(protocol.LAYER)))
        self.scratch = work.end
        if max(f.directions, f.seconds) > groups.UNROLLED:
            every_row = {
                group_of(f, i, back) for back in {False, f.backward} for i in range(len(f.layers))
            }
            rows = max(groups.scratch_rows(g, f.directions, f.seconds) for g in every_row)
            work.take((rows - most) * self.block * max(self.steps))
        self.work = tiling.round_up(work.end, PAGE) + 5 * tiling.LINE

    def direct(self, name: str) -> Operand | None:
        """Return a gradient that the only cell of a network writes where it belongs, or None."""
        out = self.f.arrays.get(name)
        if out is None or self.parts > 1 or (self.f.networks > 1 and len(out.shape) < 3):
            return None
        width = out.shape[-1] * self.r.itemsize
        return out if width % self.r.vector_bytes == 0 else None

    def _apart(self, step: int, rows: int) -> int:
        """Return the distance of a copy's rows: a line more where they would meet in few sets."""
        lines = step // tiling.LINE
        if self.r.vector_bytes > 32 or step % tiling.LINE:
            return step
        sets = LEVEL1_SETS // gcd(lines, LEVEL1_SETS)
        return step + tiling.LINE if rows > sets * LEVEL1_WAYS else step

    def _copies(
        self, x: Layer, in_step: int, step: int, turned: bool, packed: Places,
        words: dict[str, int],
    ) -> dict[str, int]:  # fmt: skip
        """Return the places of copies; enter in a layer's words how its weights lie.

        Rows of whole vectors, and those that were packed, are taken as they are.
        """
        size = self.r.itemsize
        row, column = x.w.strides[-2:]
        w_step, turned_step = self._apart(step, x.k), self._apart(in_step, x.n)
        found = {"P_TABLE": packed.take(TABLE_BYTES), "P_W": -1, "P_TURNED": -1, "P_BIAS": -1}
        found |= {"P_STEP": w_step, "P_TURNED_STEP": turned_step}
        words |= {"L_TABLE": found["P_TABLE"], "L_W_STEP": row, "L_TURNED_STEP": 0}
        # (a copy takes as long as the products of some rows; a kept block is not made again)
        rows = 0 if self.f.backward and self.f.keeps else self.f.points * words["L_MEMBERS"]
        near = w_step != row and rows >= APART_ROWS
        if not x.packed and (column != size or step != x.n * size or near):
            found["P_W"], words["L_W_STEP"] = packed.take(x.k * w_step), w_step
        if turned and x.turned is not None:
            words["L_TURNED_STEP"] = x.turned.strides[-2]
        elif turned:
            found["P_TURNED"], words["L_TURNED_STEP"] = packed.take(x.n * turned_step), turned_step
        if x.b is not None and (x.b.strides[-1] != size or step != x.n * size):
            found["P_BIAS"] = packed.take(w_step)
        return found


# --- kernels ------------------------------------------------------------------------------------
def group_of(f: Form, layer: int, backward: bool) -> groups.Group:
    """Return the group of a layer's row function, which takes all members of a block at once."""
    curve, moved = f.layers[layer].activation.curve, layer > 0 and f.seconds > 0
    jet = (layer_jet_backward if backward else layer_jet)(curve)
    absent = ["bias"] if moved else ["bias", "z_ddot"]
    if not any(f.pattern):
        absent.append("grad_bent")
    jet = jet.each(lambda part: part.without(*absent))
    if f.guard:
        jet = jet.each(lambda part: part.guarded())
    return groups.group(
        jet, f.acc, f.acc, (f.directions, f.seconds), f.pattern, backward=backward, product=False,
        moved=moved, stacked=True, contiguous=True, weights="table" in f.arrays,
    )  # fmt: skip


def _row(f: Form, layer: int, backward: bool) -> Kernel:
    """Return the row function of a layer."""
    return groups.row(group_of(f, layer, backward))


# --- plans --------------------------------------------------------------------------------------
def plan_of(
    at: Layout, cell: Kernel, cells: int, threads: int, slots: Mapping[str, Operand | None],
    words: Mapping[str, int], layers: Sequence[int] = (), kernels: Sequence[Kernel] = (),
    **head: int,
) -> Plan:  # fmt: skip
    """Return a plan of cells of networks (`kernels.network`, `kernels.network_second`)."""
    named, places, own = 0, list[tuple[int, str]](), [0] * (3 * len(protocol.NETWORK_SLOTS))
    batch = [0] * len(protocol.NETWORK_SLOTS)
    for name, x in slots.items():
        if x is None:
            continue
        slot = protocol.NETWORK_SLOTS[name]
        places.append((protocol.D_SLOTS + 3 * slot, x.name))
        named |= 4 << slot
        own[3 * slot + 1 : 3 * slot + 3] = x.strides[-2:]
        if len(x.shape) == 3 + (x.name in SEVERAL):
            batch[slot] = x.strides[-3]
    given = {"D_NAMED": named, "D_SLOT_COUNT": len(protocol.NETWORK_SLOTS), **head}
    descriptor = array("q", [*protocol.DESCRIPTOR.words(given), *own])
    length = protocol.N_LAYER + len(layers)
    every = {"N_CELLS": at.cells, **words, "N_OWN": at.own, "N_WORDS": length}
    descriptor.extend([*protocol.NETWORK.words(every)[:-1], *batch, *layers])
    label = f"{cell.label} + {kernels[0].label}" if kernels else cell.label
    call = Call("cpu", host.name(), host.vector_name(), label, None)
    used = cell, *kernels
    return Plan(cell.address, descriptor, tuple(places), cells, at.work, threads, call, used)


def packing(f: Form, at: Layout) -> Iterator[Step]:
    """Yield the steps that pack weights and biases."""
    for i, (x, places) in enumerate(zip(f.layers, at.copies, strict=True)):
        own = {"W": x.w, "BIAS": x.b, "TURNED": x.turned}
        own |= {"D_W": at.direct(f"d_w{i}"), "D_BIAS": at.direct(f"d_b{i}")}
        yield pack(f, at, (x.k, x.n), own, places)


def pack(
    f: Form, at: Layout, sizes: tuple[int, int], given: Mapping[str, Operand | None],
    places: Mapping[str, int],
) -> Step:  # fmt: skip
    """Return the step that tells where a layer's operands lie, and copies some to these places."""
    cell, (k, n) = network.cell(f.acc, "pack"), sizes
    slots = {"PACKED": packed_weights(at, f.acc), **given}
    copied = ("P_W", k * places["P_STEP"]), ("P_TURNED", n * places["P_TURNED_STEP"])
    most = max((size for name, size in copied if places[name] >= 0), default=0)
    parts = max(1, min(MOST_PARTS, most // PART_BYTES))
    words = {**places, "N_CELLS": parts}
    return plan_of(at, cell, f.networks * parts, 1, slots, words, D_K=k, D_N=n), {}


def packed_weights(at: Layout, acc: str) -> Operand:
    """Return the call's memory of packed weights and biases, of each network."""
    return temporary("packed", (at.f.networks, 1, at.packed // at.r.itemsize), acc)


def partial_sums(at: Layout, acc: str) -> Operand:
    """Return the call's memory of the sums of cells."""
    return temporary("partials", (at.f.networks, at.parts, at.sums // at.r.itemsize), acc)


def _of_blocks(f: Form, at: Layout) -> dict[str, Operand]:
    """Return the memory of the stacks and the slopes of all blocks, by their slots."""
    found = {}
    for name, size in (("stacks", at.stacks), ("slopes", at.slopes)):
        if size:
            shape = f.networks, at.blocks, size // at.r.itemsize
            found[name.upper()] = f.arrays.get(name) or temporary(name, shape, f.acc)
    return found


def _cells(f: Form, at: Layout, threads: int) -> Step:
    """Return the step in which blocks pass the layers."""
    last = len(f.layers) - 1
    along, down = (network.products(f.acc, x) for x in (False, True))
    kernels: dict[Kernel, None] = {}
    words = []
    for i, place in enumerate(at.layers):
        own = place | {"L_ALONG": along.address, "L_DOWN": down.address}
        if at.shared:
            own |= {"L_D_W": -1, "L_D_BIAS": -1}
        kernels |= dict.fromkeys((along, down))
        if i < last or not f.plain:
            if i < last or not f.backward:
                row = _row(f, i, False)
                own["L_ROW"] = row.address
                kernels[row] = None
            if f.backward:
                row = _row(f, i, True)
                own["L_BACK"] = row.address
                kernels[row] = None
        if i == last and not own.get("L_ROW"):
            own["L_OUT"] = own["L_Z"]
        words += protocol.LAYER.words(own)
    steps = [f.arrays[x].strides[0] if x in f.arrays else 0 for x in ("direction", "second")]
    head = {
        "N_POINTS": f.points, "N_BLOCK": at.block, "N_CELL": at.cell, "N_DIRECTIONS": f.directions,
        "N_SECONDS": f.seconds, "N_DIRECTION_STEP": steps[0], "N_SECOND_STEP": steps[1],
        "N_LAYERS": len(f.layers), "N_MADE": len(f.layers) - f.plain, "N_GRAD": at.turns[0],
        "N_Q": at.turns[1], "N_SCRATCH": at.scratch, "N_ONE": at.one, "N_PARTIAL": at.sums,
        "N_STACKS": at.stacks, "N_SLOPES": at.slopes, "N_KEPT": int(f.keeps),
    }  # fmt: skip
    names = "x", "units", "table", "value", "direction", "second", "d_x"
    slots = {name.upper(): f.arrays.get(name) for name in names}
    slots["PACKED"] = packed_weights(at, f.acc)
    if f.backward:
        slots["PARTIAL"] = partial_sums(at, f.acc)
    slots |= _of_blocks(f, at)
    cell = network.cell(f.acc, "backward" if f.backward else "forward")
    count = f.networks * at.cells
    return plan_of(at, cell, count, threads, slots, head, words, tuple(kernels)), {}


def _gradients(f: Form, at: Layout, threads: int) -> Iterator[Step]:
    """Yield the steps that sum up gradients from the stacks that all blocks have left."""
    if not at.shared:
        return
    cell, down = network.cell(f.acc, "gradient"), network.products(f.acc, True)
    slots = {"PACKED": packed_weights(at, f.acc), "PARTIAL": partial_sums(at, f.acc)}
    slots |= _of_blocks(f, at)
    for place in at.layers:
        if place["L_D_W"] < 0 and place["L_D_BIAS"] < 0:
            continue
        tiles = -(-place["L_K"] // network.TILE_ROWS) if place["L_D_W"] >= 0 else 1
        head = {
            "N_POINTS": f.points, "N_BLOCK": at.block, "N_ONE": at.one, "N_CELLS": tiles,
            "N_STACKS": at.stacks, "N_SLOPES": at.slopes,
        }  # fmt: skip
        words = protocol.LAYER.words(place | {"L_DOWN": down.address})
        yield plan_of(at, cell, f.networks * tiles, threads, slots, head, words, (down,)), {}


def joins(f: Form, at: Layout, threads: int) -> Iterator[Step]:
    """Yield the steps that join the sums of cells to gradients."""
    cell, size = library.join_cell(f.acc), at.r.itemsize
    for i, (x, words) in enumerate(zip(f.layers, at.layers, strict=True)):
        for name, place, rows in ((f"d_w{i}", "L_D_W", x.k), (f"d_b{i}", "L_D_BIAS", 1)):
            out, step = f.arrays.get(name), words["L_STEP"]
            if out is None or at.direct(name) is not None:
                continue
            columns, row = x.n, x.n * size
            if step == row:
                rows, columns = 1, rows * x.n
            # Of a gradient that all networks share, their cells are one another's.
            each = f.networks if len(out.shape) > 2 else 1
            cells = f.networks // each * at.parts
            shape, strides = (each, rows, cells, columns), (at.parts * at.sums, step, at.sums, size)
            sums = Operand("partials", shape, strides, f.acc, size)
            whole = rows * columns * size
            out = out._replace(
                shape=(each, rows, 1, columns), strides=(whole, columns * size, size, size)
            )
            plan = descriptors.join(cell, sums, threads, out)
            if plan is not None:
                yield plan, {"partials": words[place]}


def record(f: Form, names: Sequence[str], threads: int) -> Program:
    """Return the program of a network's call on arrays of these names."""
    at = Layout(f, threads)
    phases: list[list[Step]] = [[*packing(f, at)], [_cells(f, at, threads)]]
    own = [packed_weights(at, f.acc)]
    if f.backward:
        phases += [[*_gradients(f, at, threads)], [*joins(f, at, threads)]]
        own.append(partial_sums(at, f.acc))
    own += [x for x in _of_blocks(f, at).values() if x.name not in f.arrays]
    return program(names, [phases], own)
