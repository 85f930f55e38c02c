"""The kernels for Hopper without one: their templates, and their protocol run in Python.

The templates are plain Python, so what connects the roles of a block (who waits for which mbarrier,
how many arrive, which boxes are fetched and stored) runs here with threads in place of groups and
counters in place of mbarriers. The arithmetic is left out: that is for a GPU.

Guards: no kernel of Hopper waits for ever, misses a block, or sums in an order that a tile decides.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
import weekly
from conftest import SIMULATED, unavailable

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels.hopper.tiling import (
    HOPPER_SPLIT_TILES,
    HOPPER_TILES,
    HopperTile,
    Lies,
    box_width,
    hopper_tile,
)
from numfuse.backends.cuda.kernels.hopper.tiling import ways as hopper_ways
from numfuse.runtime import replay

try:
    from cuda_devices import HOPPER

    from numfuse.backends.cuda.compile.schema import Array, Ends, Schema
    from numfuse.backends.cuda.compile.unroll import Template, text, unrolled
    from numfuse.backends.cuda.plan import batches
    from numfuse.backends.cuda.plan.product import Derived, Operand, Product
    from numfuse.backends.cuda.plan.program import Recorder, View

    hopper = importlib.import_module("numfuse.backends.cuda.kernels.hopper.tier")
    parts = importlib.import_module("numfuse.backends.cuda.kernels.hopper.parts")
    finishing = importlib.import_module("numfuse.backends.cuda.kernels.hopper.epilogue")
    gemm = importlib.import_module("numfuse.backends.cuda.kernels.hopper.gemm")
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no tensor cores", allow_module_level=True)

TILES = list(dict.fromkeys(tile for tile, _ in HOPPER_TILES + HOPPER_SPLIT_TILES))
#: For what the first tests below hold every tile to already, in part.
SOME = TILES if weekly.ALL else TILES[::3]


def lengths(tile):
    """M and N of blocks of which some end early: of small tiles, every week, many."""
    return (200, 330) if weekly.ALL else (tile.block_m + 72, tile.block_n + 74)


# --- templates ------------------------------------------------------------------------------------


def _template(values, out):
    for i in unrolled(COUNT):  # noqa: F821
        PLACE = 2 * i
        if WIDE and i > 0:  # noqa: F821
            out[PLACE] = values[i] if KIND == "a" else 0  # noqa: F821
        else:
            out[PLACE] = -values[i % len(values)]


def test_a_template_is_written_out():
    made = text(_template, {"COUNT": 2, "WIDE": True, "KIND": "b"})
    body = [line.strip() for line in made.splitlines()[1:]]
    assert body == ["out[0] = -values[0 % len(values)]", "out[2] = 0"]


def _moved(array: Array, more):
    here: Array = _turned(array, more)
    array.row += here.row
    return array.address + here.place


def _turned(array: Array, more):
    return Array(array.address, array.place, array.column, more)


def test_a_record_is_written_out_as_its_fields():
    made = text(_moved, {}).splitlines()
    assert made[0] == "def _moved(array_address, array_place, array_row, array_column, more):"
    assert [line.strip() for line in made[1:]] == [
        "here_address, here_place, here_row, here_column = "
        "_turned(array_address, array_place, array_row, array_column, more)",
        "array_row += here_row",
        "return array_address + here_place",
    ]
    assert text(_turned, {}).endswith("return (array_address, array_place, array_column, more)\n")


def _ended(ends: Ends, more):
    ends.out.address += _turned(ends.bias, more)
    return _ended(ends, ends.out.row)


def test_a_record_in_a_record_is_written_out_as_its_fields():
    made = text(_ended, {}).splitlines()
    fields = [f"ends_{a}_{x}" for a in "bias extra pre out".split()
              for x in "address place row column".split()]  # fmt: skip
    assert made[0] == f"def _ended({', '.join(fields)}, more):"
    assert [line.strip() for line in made[1:]] == [
        "ends_out_address += "
        "_turned(ends_bias_address, ends_bias_place, ends_bias_row, ends_bias_column, more)",
        f"return _ended({', '.join(fields)}, ends_out_row)",
    ]
    bias, row = Array(1, 2, 3, 4), Array(5, 6, 7, 8)
    launched = Schema(_ended)(ends=Ends(bias, row, bias, row), more=9)
    assert launched == (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_a_template_that_a_template_calls_is_bound_to_the_same_names():
    bindings = hopper.Gemm("bfloat16", False, False, TILES[0], "map").bindings()
    roles = Template(gemm.gemm, bindings).others
    produced = roles["produce"].others["next_stage"]
    consumed = roles["consume"].others["multiply_slices"].others["next_stage"]
    assert produced.numfuse_key == consumed.numfuse_key


def test_a_template_with_other_bindings_has_another_key():
    keys = {
        Template(_template, {"COUNT": n, "WIDE": wide, "KIND": "a"}).numfuse_key
        for n in (1, 2) for wide in (True, False)
    }  # fmt: skip
    unused = Template(_template, {"COUNT": 1, "WIDE": True, "KIND": "a", "OTHER": 3})
    assert len(keys) == 4 and unused.numfuse_key in keys


# --- the protocol -----------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all promised bytes have."""

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def _turn(self, arrivals, received):
        with self.changed:
            self.bytes += received
            self.pending -= arrivals
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            if not self.pending and not self.bytes:
                self.phase += 1
                self.pending = self.arrivals
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            over = self.changed.wait_for(lambda: (self.phase - 1) % 2 == parity, timeout=5)
            assert over, f"deadlock: {self.pending} arrivals and {self.bytes} bytes are missing"


class Block:
    """One thread block: the producer's thread, and the first of each warp that computes."""

    def __init__(self, kernel, number, count, sizes):
        self.kernel, self.number, self.count, self.sizes = kernel, number, count, sizes
        self.barriers, self.stored, self.loaded, self.errors = {}, [], [], []
        self.left = {}
        self.here = threading.local()
        t = kernel.tile
        y_box = box_width(kernel.columns)
        self.boxes = {
            "x": 8192 if kernel.x_turned else t.block_m * 128,
            "y": 128 * y_box if kernel.y_turned else kernel.columns * 128,
            "extra": 128 * kernel.width,
        }
        self.boxes |= {"x1": self.boxes["x"], "y1": self.boxes["y"]}
        self.groups = [threading.Barrier(4) for _ in range(t.consumers)]
        self.groups += [None] * (2 - t.consumers) + [threading.Barrier(4 * t.consumers)]
        self.together = threading.Barrier(1 + 4 * t.consumers)

    def load(self, at, name, inner, outer, place, barrier):
        assert 0 <= at - 1024 and at + self.boxes[name] <= 1024 + self.kernel.shared_bytes
        self.loaded.append((name, inner, outer, place))
        self.barriers[barrier]._turn(0, -self.boxes[name])

    def store(self, name, column, row, place, at):
        self.stored.append((name, place, row, column))
        consumer = self.here.thread // 128 - 1
        rows = 64 if self.kernel.extra == "map" else 16
        self.left.setdefault(consumer, set()).update(
            range(at, at + rows * 2 * self.kernel.width, 16)
        )

    def names(self):
        def nothing(*arguments):
            return None

        def zero(*arguments):
            return 0

        def make(address, arrivals):
            self.barriers[address] = Barrier(arrivals)

        silent = (
            "barrier_fence map_prefetch registers_few registers_many tensor_prefetch store_commit "
            "store_wait_read0 store_wait_read1 copy_fence "
            "matrix_store warp_barrier multiply_wait1 shared_store32 shared_store_f32 "
            "global_store16 global_store32 global_store_f32 global_store2_f32 MULTIPLY_WAIT CLEAR "
            "ADD MULTIPLY_LOW grid_wait grid_release"
        )
        found = dict.fromkeys(silent.split(), nothing)
        found |= dict.fromkeys(
            "global_load16 global_load_f32 shared_load16 shared_load_f32 LOW HIGH PACK".split(),
            zero,
        )
        return found | {
            "thread_index": lambda: self.here.thread,
            "block_index": lambda: self.number,
            "block_count": lambda: self.count,
            "quotient": lambda a, b: a // b,
            "product_high": lambda a, b: a * b >> 32,
            "dynamic_shared": lambda: 1024,
            "barrier_init": make,
            "block_barrier": lambda: self.together.wait(5),
            "barrier_wait": lambda address, parity: self.barriers[address].wait(parity),
            "barrier_expect": lambda address, count: self.barriers[address]._turn(1, count),
            "barrier_arrive": lambda address, here: here and self.barriers[address]._turn(1, 0),
            "tensor_load": self.load,
            "tensor_store": self.store,
            "fresh": lambda x: x,
            "same": lambda x: x,
            "select": lambda a, b, condition: a if condition else b,
            "shuffle_xor": lambda x, mask: x,
            "matrix_load": lambda at: (0, 0, 0, 0),
            # the four warps of a group multiply together, so none falls behind by more than that
            **dict.fromkeys(
                ("MULTIPLY", "MULTIPLY_HIGH"),
                lambda *arguments: self.groups[self.here.thread // 128 - 1].wait(5),
            ),
            "group_any": lambda *arguments: 0,
            "is_finite": lambda x: True,
            "group_barrier": lambda number, count: self.groups[number - 1].wait(5),
            "global_load2_f32": lambda at, inside: (0, 0),
            "shared_load2_f32": lambda at: (0, 0),
            "finite": lambda x: x,
            "EPILOGUE": lambda z, *others: (z, z, z) if self.kernel.pre1 else z,
            "ZERO": 0,
            "cuda": types.SimpleNamespace(
                local=types.SimpleNamespace(array=lambda length, kind: [0] * length)
            ),
        }

    def build(self, template, names):
        made = template.function
        scope = dict(made.__globals__)
        for name, value in template.others.items():
            scope[name] = self.build(value, names) if isinstance(value, Template) else value
        return types.FunctionType(made.__code__, scope | names, made.__name__)

    def run(self):
        kernel = self.build(Template(gemm.gemm, self.kernel.bindings()), self.names())
        s = self.sizes

        def work(thread):
            self.here.thread = thread
            x, y = ("x", 1, s["planes"][0]), ("y", 0, s["planes"][1])
            row = (0, 0, s["n"], 1)
            counts = "m n units row_blocks column_blocks places slices part_slices term_slices"
            work_of = [*(s[name] for name in counts.split()), 0]
            second = ["x1", 1, 0, "y1", 0, 0, *row, *row, "pre1"]
            try:
                kernel(
                    *x, *y, "out", "extra", "pre", *row, *row, *row, *row, 0, *second, *work_of,
                    self.kernel.stage_bytes,
                )  # fmt: skip
            except BaseException as error:  # a thread's failure must fail the test
                self.errors.append(error)

        warps = range(128, 128 * (1 + self.kernel.tile.consumers), 32)
        leaders = [0, *warps]
        threads = [threading.Thread(target=work, args=(number,)) for number in leaders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        # no consumer's pieces on their way out are another's, or a slice of K
        first = 1024 + self.kernel.staging_at
        assert len(set().union(*self.left.values())) == sum(map(len, self.left.values()))
        assert all(first <= at < first + self.kernel.staging_bytes
                   for own in self.left.values() for at in own)  # fmt: skip


def run_all(kernel, m, n, slices, places=1, parts=1, blocks=3, planes=(0, 0)):
    """Run a launch; what was stored, and how often each slice of X was loaded."""
    t = kernel.tile
    part_slices = -(-slices // parts)
    parts = -(-slices // part_slices)
    row_blocks, column_blocks = -(-m // t.block_m), -(-n // kernel.columns)
    sizes = {
        "m": m, "n": n, "slices": slices, "row_blocks": row_blocks, "places": places,
        "column_blocks": column_blocks, "units": row_blocks * column_blocks * places * parts,
        "part_slices": part_slices, "planes": planes,
        "term_slices": slices // (1 + kernel.two_terms),
    }  # fmt: skip
    stored, loaded = [], []
    blocks = min(blocks, sizes["units"])
    for number in range(blocks):
        block = Block(kernel, number, blocks, sizes)
        block.run()
        stored += block.stored
        loaded += block.loaded
    return sizes, stored, loaded


def rows_of(kernel, sizes):
    """The first rows of what is stored: of warps, those that have rows, or of whole groups."""
    if kernel.extra == "map":
        return range(0, sizes["row_blocks"] * kernel.tile.block_m, 64)
    return range(0, sizes["row_blocks"] * kernel.tile.block_m if kernel.sums else sizes["m"], 16)


@pytest.mark.parametrize(
    ("tile", "extra"),
    [*itertools.product(TILES, ["map"]), *itertools.product(SOME, ["", "rows"])],
    ids=str,
)
def test_every_block_is_stored_once_and_no_role_waits_for_ever(tile, extra):
    kernel = hopper.Gemm(
        "bfloat16", False, True, tile, "map", extra=extra, sums=extra != "", bias="half",
    )  # fmt: skip
    if extra == "rows":
        run_all(replace(kernel, out=extra), *lengths(tile), 5)
        return
    long = (129, 520) if weekly.ALL else lengths(tile)
    for m, n, slices, places in ((*lengths(tile), 5, 1), (*long, 13, 2), (64, 32, 1, 1)):
        sizes, stored, _ = run_all(kernel, m, n, slices, places)
        rows = rows_of(kernel, sizes)
        columns = range(0, sizes["column_blocks"] * tile.block_n, kernel.width)
        whole = [("out", p, r, c) for p in range(places) for r in rows for c in columns]
        assert sorted(stored) == whole


TWO_SUMS = [t for t in TILES if t.block_n % 64 == 0]


@pytest.mark.parametrize("tile", TWO_SUMS, ids=str)
@pytest.mark.parametrize("extra", ["", "map"])
def test_two_sums_of_a_block_are_loaded_and_stored_once(tile, extra):
    """Guards: docs/cuda.md, a gated layer is one product of its left factor with both others."""
    kernel = hopper.Gemm(
        "bfloat16", False, True, tile, "map", extra=extra, bias="half", bias1=True, two_sums=True,
        pre="map", pre1="map", pre_half=True,
    )  # fmt: skip
    for y_turned in (False, True):
        sizes, stored, loaded = run_all(replace(kernel, y_turned=y_turned), *lengths(tile), 5, 2)
        rows = rows_of(kernel, sizes)
        columns = range(0, sizes["column_blocks"] * kernel.columns, kernel.width)
        whole = [(name, p, r, c) for name in ("out", "pre", "pre1")
                 for p in range(2) for r in rows for c in columns]  # fmt: skip
        assert sorted(stored) == whole
        step = box_width(kernel.columns) if y_turned else kernel.columns
        own = range(0, sizes["column_blocks"] * kernel.columns, step)
        deep = [64 * s for s in range(5)]
        once = [((c, d, 0) if y_turned else (d, c, 0)) for c in own for d in deep]
        for name in ("y", "y1"):
            seen = sorted(x[1:] for x in loaded if x[0] == name)
            assert seen == sorted(once * sizes["row_blocks"] * 2)


@pytest.mark.parametrize("tile", SOME, ids=str)
def test_the_slices_of_a_second_term_follow_those_of_the_first(tile):
    """Guards: docs/cuda.md, d_a of a gated layer is one product of two terms."""
    kernel = hopper.Gemm("float16", False, False, tile, "map", two_terms=True)
    for parts in (1, 3):
        sizes, _, loaded = run_all(kernel, *lengths(tile), 18, 1, parts=parts)
        own = [r * tile.block_m for r in range(sizes["row_blocks"])]
        once = [(64 * s, o, 0) for o in own for s in range(9)]
        for name in ("x", "x1"):
            seen = sorted(x[1:] for x in loaded if x[0] == name)
            assert seen == sorted(once * sizes["column_blocks"])


@pytest.mark.parametrize("tile", SOME, ids=str)
def test_every_slice_of_k_is_loaded_once_for_each_block(tile):
    for x_turned in (False, True):
        kernel = hopper.Gemm("float16", x_turned, False, tile, "float32")
        sizes, _, loaded = run_all(kernel, *lengths(tile), 18, 1, parts=4)
        seen = sorted(item[1:] for item in loaded if item[0] == "x")
        deep = [64 * s for s in range(18)]
        boxes = tile.block_m // 64 if x_turned else 1
        own = [r * tile.block_m + 64 * b for r in range(sizes["row_blocks"]) for b in range(boxes)]
        once = [((o, d, 0) if x_turned else (d, o, 0)) for o in own for d in deep]
        assert seen == sorted(once * sizes["column_blocks"])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tile", [tile for tile, _ in HOPPER_SPLIT_TILES], ids=str)
def test_a_split_product_loads_every_plane_of_a_slice_once_for_each_block(tile, count):
    kind = {2: "bf16x3", 3: "bf16x6"}[count]
    for slices in (1, 9):  # sums that are never added to the total before the end, and are
        kernel = hopper.Gemm(kind, False, False, tile, "float32", extra="float32", sums=True)
        for x_turned in (False, True):
            own = replace(kernel, x_turned=x_turned)
            sizes, _, loaded = run_all(own, *lengths(tile), slices, planes=(1, 2))
            rows = range(0, sizes["row_blocks"] * tile.block_m, 32 if x_turned else tile.block_m)
            deep = range(0, 64 * slices, 64 if x_turned else 32)
            x = [(r, d, 0) if x_turned else (d, r, 0) for r in rows for d in deep]
            columns = range(0, sizes["column_blocks"] * tile.block_n, tile.block_n)
            y = [(64 * s, c, 2 * p) for c in columns for s in range(slices) for p in range(count)]
            for name, once, other in (("x", x, "column"), ("y", y, "row")):
                seen = sorted(item[1:] for item in loaded if item[0] == name)
                assert seen == sorted(once * sizes[f"{other}_blocks"])


# --- where an epilogue puts what ------------------------------------------------------------------


class Half:
    """A word of two 16-bit values, as the epilogue puts it together."""

    def __init__(self, low=0, high=0):
        self.low, self.high = low, high

    def __lshift__(self, bits):
        return Half(high=self.low)

    def __or__(self, other):
        return Half(self.low + other.low, self.high + other.high)

    def __and__(self, mask):
        assert mask == 0xFFFF
        return self.low

    def __rshift__(self, bits):
        assert bits == 16
        return self.high


#: Where the pre-activation lies.
PRE = 1 << 40


class Group:
    """The 128 threads of a consumer, with their shared memory and the arrays of a launch.

    The copy engine reads what it stores as late as a wait lets it.
    """

    def __init__(self, kernel, extra):
        self.kernel, self.extra = kernel, extra
        self.shared, self.stored, self.biases = {}, {}, {}
        self.here = threading.local()
        self.together = [threading.Barrier(32) for _ in range(4)]
        self.words = [[None] * 32 for _ in range(4)]
        self.errors = []
        # of each warp: stores since the last commit, and those of every commit before
        self.open, self.pending = [[] for _ in range(4)], [[] for _ in range(4)]

    def barrier(self):
        self.together[self.here.warp].wait(10)

    def collect(self, word):
        words = self.words[self.here.warp]
        self.barrier()
        words[self.here.lane] = word
        self.barrier()
        return words

    def matrix_store(self, at, *registers):
        words = self.collect((at, registers))
        lane = self.here.lane
        for i, word in enumerate(registers):  # this lane's pair, in row lane // 4 of matrix i
            address = words[8 * i + lane // 4][0] + 4 * (lane % 4)
            self.shared[address], self.shared[address + 2] = word.low, word.high
        self.barrier()

    def matrix_load(self, at):
        words = self.collect((at, None))
        lane = self.here.lane
        rows = [words[8 * i + lane // 4][0] + 4 * (lane % 4) for i in range(4)]
        return tuple(Half(self.shared[row], self.shared[row + 2]) for row in rows)

    def commit(self):
        warp = self.here.warp
        self.pending[warp].append(self.open[warp])
        self.open[warp] = []

    def read(self, warp, left):
        """Do a warp's stores but those of the last `left` commits."""
        pending = self.pending[warp]
        while len(pending) > left:
            for store in pending.pop(0):
                store()

    def put(self, address, value):
        assert address not in self.stored, "two threads store the same element"
        self.stored[address] = value

    def names(self):
        def shared_store(address, word):
            self.shared[address], self.shared[address + 2] = word.low, word.high

        def tensor_store(*box):
            self.open[self.here.warp].append(lambda: store(*box))

        def store(name, column, row, place, at):
            # 16 rows of a warp, each 16 bytes of it where the engine's swizzle has them
            base = {"out": 0, "pre": PRE, "pre1": 2 * PRE}[name]
            m, n, stride = self.sizes
            width = self.kernel.width
            if self.kernel.woven_out:
                n, stride = 2 * n, 2 * stride
            for r in range(16):
                turned = r & 7 if width == 64 else r >> 1 & 3
                for c in range(width):
                    if row + r < m and column + c < n:
                        word = at + 2 * width * r + ((c // 8 ^ turned) << 4) + 2 * (c % 8)
                        self.put(base + 2 * ((row + r) * stride + column + c), self.shared[word])

        def nothing(*arguments):
            return None

        def shared_store16(address, word):
            self.shared[address] = low(word)

        def low(word):
            return word.low if isinstance(word, Half) else word

        return {
            "shared_store16": shared_store16, "shared_load_f32": lambda at: self.biases[at],
            "matrix_store": self.matrix_store, "matrix_load": self.matrix_load,
            "warp_barrier": self.barrier, "fresh": lambda x: x,
            "shared_load16": lambda a: self.shared[a], "shared_store32": shared_store,
            "global_store16": lambda at, v, inside: self.put(at, v) if inside else None,
            "global_store32": lambda at, word, inside: inside
            and (self.put(at, word.low), self.put(at + 2, word.high)),
            "global_load16": lambda at, inside: Half(self.extra[at] if inside else 0),
            "tensor_store": tensor_store, "store_commit": self.commit,
            "store_wait_read0": lambda: self.read(self.here.warp, 0),
            "store_wait_read1": lambda: self.read(self.here.warp, 1), "copy_fence": nothing,
            "shared_load2_f32": lambda at: (self.biases[at], self.biases[at + 4]),
            "EPILOGUE": self.epilogue, "ZERO": 0.0,
            "PACK": Half, "LOW": low, "HIGH": lambda w: w.high,
            "types": types.SimpleNamespace(int64=int, int32=int, float32=float),
            "cuda": types.SimpleNamespace(
                local=types.SimpleNamespace(array=lambda length, kind: [0] * length)
            ),
        }  # fmt: skip

    def epilogue(self, *given):
        z, z1, bias, bias1, extra = given
        if self.kernel.two_sums:
            made = z + bias - 3 * (z1 + bias1) + extra, z + bias, z1 + bias1
        else:
            other = bias1 if self.kernel.bias1 else 0
            made = z + bias + extra + 0.125 * (self.kernel.pre != "") + other, z + bias
        count = 1 + (self.kernel.pre != "") + (self.kernel.pre1 != "")
        return made[:count] if count > 1 else made[0]

    def run(self, row0, column0, m, n, stride, blocks=1):
        """Finish `blocks` neighbours in a row, one after the other."""
        tile = self.kernel.tile
        self.sizes = m, n, stride
        b = self.kernel.bindings()
        builder = Block(self.kernel, 0, 1, {})
        finish = builder.build(Template(finishing.finish, b), self.names())

        def work(thread):
            self.here.warp, self.here.lane = thread // 32, thread % 32
            try:
                for i in range(blocks):
                    block(thread, column0 + i * self.kernel.columns)
            except BaseException as error:  # a thread's failure must fail the test
                self.errors.append(error)
                for barrier in self.together:
                    barrier.abort()

        def block(thread, column0):
            acc = []
            for half in range(tile.halves):
                for column in range(0, tile.block_n, 8):
                    for below in (0, 8):
                        row = 64 * half + thread // 32 * 16 + thread % 32 // 4 + below
                        at = column + 2 * (thread % 4)
                        steps = (0, 1)
                        if self.kernel.woven:  # a column's two sums are neighbours
                            at, steps = at // 2, (0, 500)
                        elif at >= self.kernel.columns:  # of the second sum
                            at += 500 - self.kernel.columns
                        acc += [1000.0 * (row0 + row) + column0 + at + e for e in steps]
            finish(
                acc, "out", 0, "pre", *[0] * 7, stride, 1, PRE, 0, stride, 1, 0, 0, stride, 1,
                *[0] * 10, 2 * PRE, 0, stride, 1, "pre1",
                1024, 0, 0, 0, thread, 0, 0, row0, column0, m, n, *[0] * 8,
            )  # fmt: skip

        threads = [threading.Thread(target=work, args=(number,)) for number in range(128)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        for warp in range(4):
            self.read(warp, 0)


SMALL = [t for t in TILES if t.block_n in (32, 64, 96) and t.consumers == 1]
TALL = [t for t in TILES if t.ping_pong]


@pytest.mark.parametrize("tile", SMALL + TALL, ids=str)
@pytest.mark.parametrize(
    ("out", "extra", "pre"),
    [
        ("rows", "", ""), ("rows", "rows", ""), ("map", "", ""), ("map", "rows", ""),
        ("map", "", "map"), ("map", "", "single"), ("rows", "", "pairs"),
        ("map", "line", ""), ("rows", "line", "single"), ("map", "line", "map"),
    ],
)  # fmt: skip
def test_each_sum_reaches_its_row_and_column_and_meets_its_bias_and_residual(tile, out, extra, pre):
    row0, column0 = tile.block_m, tile.block_n
    m, n = row0 + tile.block_m - 13, column0 + tile.block_n - (6 if pre == "pairs" else 5)
    stride = n + 3
    residual = {
        2 * (r * stride + c): 0.25 * r + 7000000.0 * (c + 1) for r in range(m) for c in range(n)
    }
    if extra == "line":  # an operand by rows has its values in the first column
        residual = {at: residual[at // (2 * stride) * 2 * stride] for at in residual}
    kernel = hopper.Gemm("bfloat16", False, False, tile, out, extra=extra, bias="half")
    if pre:
        kernel = replace(kernel, pre=pre, pre_half=True)
    group = Group(kernel, residual)
    group.biases = {4 * c: 0.5 * (column0 + c) for c in range(tile.block_n)}
    group.run(row0, column0, m, n, stride)
    expected = {
        2 * (r * stride + c): 1000.0 * r + 1.5 * c
        + (residual[2 * (r * stride + c)] if extra else 0)
        for r in range(row0, m) for c in range(column0, n)
    }  # fmt: skip
    if pre:
        before = {
            PRE + at: value - (residual[at] if extra else 0) for at, value in expected.items()
        }
        expected = before | {at: value + 0.125 for at, value in expected.items()}
    assert group.stored == expected


@pytest.mark.parametrize("tile", [t for t in SMALL + TALL if t.block_n % 64 == 0], ids=str)
@pytest.mark.parametrize("woven", [False, True], ids=["halves", "alternate"])
@pytest.mark.parametrize(
    ("out", "extra", "pre", "pre1"),
    [
        ("rows", "", "", ""), ("map", "rows", "map", ""), ("map", "", "map", "map"),
        ("map", "", "", ""), ("rows", "rows", "single", "single"), ("map", "", "pairs", "pairs"),
        ("map", "line", "map", ""),
    ],
)  # fmt: skip
def test_two_sums_meet_in_their_row_and_column(tile, out, extra, pre, pre1, woven):
    """Guards: docs/cuda.md, a gated layer is one product of its left factor with both others."""
    kernel = hopper.Gemm(
        "bfloat16", False, False, tile, out, extra=extra, bias="half", bias1=True, two_sums=True,
        pre=pre, pre1=pre1, pre_half=pre != "", woven=woven,
    )  # fmt: skip
    row0, column0 = tile.block_m, kernel.columns
    m, n = row0 + tile.block_m - 13, column0 + kernel.columns - (6 if pre == "pairs" else 5)
    stride = n + 3
    residual = {2 * (r * stride + c): 0.25 * r + 7000000.0 * c for r in range(m) for c in range(n)}
    if extra == "line":  # an operand by rows has its values in the first column
        residual = {at: residual[at // (2 * stride) * 2 * stride] for at in residual}
    group = Group(kernel, residual)
    for c in range(kernel.columns):
        group.biases[4 * c] = 0.5 * (column0 + c)
        group.biases[4 * (kernel.columns + c)] = 0.25 * (column0 + c)
    group.run(row0, column0, m, n, stride)
    expected = {}
    for r in range(row0, m):
        for c in range(column0, n):
            at = 2 * (r * stride + c)
            z, z1 = 1000.0 * r + 1.5 * c, 1000.0 * r + 500 + 1.25 * c
            expected[at] = z - 3 * z1 + (residual[at] if extra else 0)
            expected |= {PRE + at: z} if pre else {}
            expected |= {2 * PRE + at: z1} if pre1 else {}
    assert group.stored == expected


@pytest.mark.parametrize("tile", [t for t in SMALL + TALL if t.block_n % 64 == 0], ids=str)
@pytest.mark.parametrize("extra", ["", "rows"])
def test_two_results_of_alternate_columns_are_stored_as_one_array(tile, extra):
    """Guards: docs/cuda.md, alternate columns are not copied: the pre-gradients alternate, too."""
    kernel = hopper.Gemm(
        "bfloat16", False, True, tile, "map", extra=extra, two_sums=True, pre="map",
        pre_half=True, woven=True, woven_out=True,
    )  # fmt: skip
    row0, column0 = tile.block_m, kernel.columns
    m, n = row0 + tile.block_m - 13, column0 + kernel.columns - 5
    stride = n + 3
    residual = {2 * (r * stride + c): 0.25 * r + 7000000.0 * c for r in range(m) for c in range(n)}
    group = Group(kernel, residual)
    group.run(row0, column0, m, n, stride)
    expected = {}
    for r in range(row0, m):
        for c in range(column0, n):
            z, z1 = 1000.0 * r + c, 1000.0 * r + 500 + c
            more = residual[2 * (r * stride + c)] if extra else 0
            expected[4 * (r * stride + c)] = z - 3 * z1 + more
            expected[4 * (r * stride + c) + 2] = z
    assert group.stored == expected


@pytest.mark.parametrize("tile", SMALL + (TALL if weekly.ALL else TALL[-1:]), ids=str)
@pytest.mark.parametrize("pre", ["", "map"])
def test_a_piece_waits_in_its_buffer_until_the_copy_engine_has_read_it(tile, pre):
    """Guards: blocks of an odd number of pieces begin in the buffer in which the last one ended."""
    kernel = hopper.Gemm("bfloat16", False, False, tile, "map", pre=pre, pre_half=pre != "")
    m, n = tile.block_m, 2 * tile.block_n
    group = Group(kernel, {})
    group.run(0, 0, m, n, n, blocks=2)
    sums = {2 * (r * n + c): 1000.0 * r + c for r in range(m) for c in range(n)}
    before = {PRE + at: value for at, value in sums.items()}
    wanted = {at: value + 0.125 for at, value in sums.items()} | before if pre else sums
    assert group.stored == wanted


@pytest.mark.parametrize("tile", SMALL + TALL, ids=str)
def test_a_second_bias_meets_its_column(tile):
    """Guards: docs/cuda.md, a product ends in a formula of two operands by columns."""
    kernel = hopper.Gemm("bfloat16", False, False, tile, "map", bias="half", bias1=True)
    m, n = tile.block_m - 13, tile.block_n - 5
    group = Group(kernel, {})
    for c in range(tile.block_n):
        group.biases |= {4 * c: 0.5 * c, 4 * (tile.block_n + c): 0.25 * c}
    group.run(0, 0, m, n, n)
    assert group.stored == {
        2 * (r * n + c): 1000.0 * r + 1.75 * c for r in range(m) for c in range(n)
    }


@pytest.mark.parametrize("kind", ["bfloat16", "bf16x6", "bf16x3"])
@pytest.mark.parametrize(("m", "n"), [(5, 40), (64, 30), (200, 300)])
def test_a_slice_has_as_many_bytes_as_its_boxes(m, n, kind):
    planes = {"bf16x6": 3, "bf16x3": 2}.get(kind, 1)
    dtype = kind if planes == 1 else "float32"
    for tile in (tile for tile, _ in (HOPPER_SPLIT_TILES if planes > 1 else HOPPER_TILES)):
        for x_row, y_row in ((False, True), (True, False)):
            x = Operand(dtype, (0, 1, 200) if x_row else (0, 200, 1), 16)
            y = Operand(dtype, (0, 304, 1) if y_row else (0, 1, 304), 16)
            made = replace(product(m, n, 200, dtype, alignment=16), x=x, y=y)
            plan = hopper.plan_with(made, kind, HOPPER, tile, 1)
            launch = plan.launches[-1]
            maps = [a.make for a in launch.arguments if isinstance(a, Derived)][:2]
            boxes = [made.box[0] * made.box[1] * (2 if planes == 1 else 4) for made in maps]
            wide = tile.block_n // box_width(tile.block_n) if y_row else 1
            times = [tile.block_m // 64 if x_row else 1, wide]
            if planes > 1:  # of X float32, of Y parts
                times[0] = tile.block_m // 32 if x_row else 2
                boxes[1] = boxes[1] // 2 * planes
            found = sum(b * t for b, t in zip(boxes, times, strict=True))
            at = Schema(gemm.gemm).names.index("slice_bytes")
            assert launch.arguments[at] == found


# --- the parts of a float32 -----------------------------------------------------------------------


def split(values):
    """Three bfloat16 parts of float32 numbers, by the functions of the kernel."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    real = np.float32

    def nearest(x):
        return real(bfloat16(x))

    names = {
        "nearest": nearest, "ZERO": real(0), "MAXIMUM": np.finfo(real).max,
        "LARGEST": real(2.0**127 * (2 - 2.0**-7)), "SMALLEST": real(2.0**-133),
        "select": lambda a, b, condition: a if condition else b,
    }  # fmt: skip

    def bound(function):
        return types.FunctionType(function.__code__, names | {"__builtins__": {}})

    high, rest = bound(parts.high_part), bound(parts.rest)
    with np.errstate(all="ignore"):
        first = [high(x) for x in values]
        left = [rest(x, part) for x, part in zip(values, first, strict=True)]
        second = [nearest(x) for x in left]
        third = [nearest(x - part) for x, part in zip(left, second, strict=True)]
    return (np.array(part, real) for part in (first, second, third))


def test_three_parts_are_the_number_exactly():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 3000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) >= 2.0**-109)]
    values = np.append(values, [np.finfo("f4").max, -np.finfo("f4").max, 3.39e38]).astype("f4")
    first, second, third = split(values)
    total = first.astype("f8") + second.astype("f8") + third.astype("f8")
    np.testing.assert_array_equal(total, values.astype("f8"))
    assert np.isfinite(first).all()


def test_parts_of_tiny_numbers_lose_less_than_half_of_the_smallest():
    values = np.array([2.0**-126, 1.7 * 2.0**-120, 2.0**-140, 1e-45, -1e-45, 0.0], "f4")
    first, second, third = split(values)
    total = first.astype("f8") + second.astype("f8") + third.astype("f8")
    assert (np.abs(total - values.astype("f8")) <= 2.0**-134).all()
    # an infinity times one of them must not be an infinity times zero
    assert ((first != 0) == (values != 0)).all()


def test_an_infinity_and_a_nan_are_in_the_first_part_alone():
    first, second, third = split(np.array([np.inf, -np.inf, np.nan], "f4"))
    assert first[0] == np.inf and first[1] == -np.inf and np.isnan(first[2])
    assert not second.any() and not third.any()


# --- choices --------------------------------------------------------------------------------------


def operand(dtype, rows, columns, alignment=16):
    return Operand(dtype, (0, columns, 1), alignment)


def product(m, n, k, dtype="bfloat16", alignment=16, **features):
    return Product(
        m, n, k, 1, operand(dtype, m, k, alignment), operand(dtype, k, n, alignment),
        operand(dtype, m, n, alignment), "float32", **features,
    )  # fmt: skip


def test_the_order_of_a_forwards_sum_depends_on_no_tile():
    for m in (1, 64, 1000, 65536):
        _, parts = hopper_tile(m, 512, 64, 1, 132)
        assert parts == 1


@pytest.mark.parametrize("sums", [1, 2])
def test_blocks_of_a_factor_that_lies_along_its_columns_begin_with_a_line_of_the_cache(sums):
    """Guards: docs/cuda.md, a box of half a line takes the copy engine as long as a whole one."""
    own = [
        {tile.block_n // sums for _, tile, _ in
         hopper_ways(1000, 5000, 40, 1, 132, 0, True, False, True, Lies(across), sums)}
        for across in (False, True)
    ]  # fmt: skip
    assert any(width > 64 and width % 64 for width in own[0])
    assert own[1] == {width for width in own[0] if width <= 32 or width % 64 == 0}


def test_a_tall_result_of_few_blocks_is_cut_into_parts():
    _, parts = hopper_tile(512, 512, 1024, 1, 132, free=True)
    assert parts >= 4


def test_rows_that_are_not_whole_16_bytes_are_copied_where_it_pays():
    plan = hopper.WGMMA.take(product(4095, 4097, 4099, alignment=2), HOPPER)
    *copied, made = plan.launches
    assert [launch.kernel.name for launch in copied] == ["convert copy"] * 2
    assert made.kernel.name.endswith("-> rows")
    # rows of whole lines of the cache: 4160 values
    assert [launch.makes[1] for launch in copied] == [4095 * 4160 * 2, 4099 * 4160 * 2]
    assert hopper.WGMMA.take(product(95, 97, 99, alignment=2), HOPPER) is None


@pytest.mark.parametrize(
    ("m", "n", "k", "copied"),
    [
        (455, 39429, 36, True), (3592, 6067, 61, True),
        (455, 3943, 36, False),  # a small result
        (60001, 201, 77, False),  # few columns read X
        (201, 60001, 77, False),  # few rows read Y
        (4001, 4003, 15, False),
    ],
)  # fmt: skip
def test_of_a_short_k_factors_are_copied_for_a_large_result(m, n, k, copied):
    """Guards: docs/cuda.md, value by value a short product takes longer than its copies."""
    plan = hopper.WGMMA.take(product(m, n, k, alignment=2), HOPPER)
    assert (plan is not None) == copied


def test_float32_is_split_where_that_is_faster():
    for precision in ("bf16x6", "tf32"):
        large = product(2048, 2048, 2048, "float32", precision=precision)
        names = [launch.kernel.name for launch in hopper.WGMMA.take(large, HOPPER).launches]
        # of parts the kernel makes those of X itself
        assert sum(precision in name for name in names) == (3 if precision == "tf32" else 2)
        assert (
            hopper.WGMMA.take(product(1, 4096, 4096, "float32", precision=precision), HOPPER)
            is None
        )
    assert hopper.WGMMA.take(product(2048, 2048, 2048, "float32"), HOPPER) is None


@pytest.mark.parametrize(
    "change",
    [{"accumulator": "float64"}, {"x": Operand("float32", (0, 64, 1), 16)}],
    ids=["float64", "mixed"],
)
def test_what_it_cannot_do_is_handed_down(change):
    assert hopper.WGMMA.take(product(64, 64, 64), HOPPER) is not None
    assert hopper.WGMMA.take(replace(product(64, 64, 64), **change), HOPPER) is None


def test_another_capability_is_handed_down():
    for capability in ((8, 0), (10, 0)):
        info = replace(HOPPER, capability=capability)
        assert hopper.WGMMA.take(product(64, 64, 64), info) is None


def test_accumulators_fit_registers():
    # of operands in three parts a thread has three sets
    for tiles, most in ((HOPPER_TILES, 128), (HOPPER_SPLIT_TILES, 64)):
        for tile, _ in tiles:
            assert isinstance(tile, HopperTile)
            # (two groups in turns have 240 registers each, and wide blocks leave 48 of these)
            by_turns = tile.ping_pong and most == 128
            assert tile.halves * tile.block_n // 2 <= (192 if by_turns else most)


# --- copies of factors that several products want -------------------------------------------------


class Recording:
    """A device on which calls are recorded and never run."""

    info = HOPPER

    def __init__(self):
        self.kept_products = replay.Replay(100, 0)

    def prepare(self, launch):
        return types.SimpleNamespace(name=launch.kernel.name, table=launch.table)


def matrix(number, rows, columns):
    return View(number, 0, (rows, columns), (columns, 1), "float32", 4, 16)


def backward_products(overwrite=False):
    """The recorder of a @ b, grad @ b^T and a^T @ grad; or this goes to b, and a @ b is again."""
    rec = Recorder(Recording(), "bf16x6")
    a, b, grad = matrix(2, 2048, 1536), matrix(3, 1536, 2560), matrix(4, 2048, 2560)
    batches.product(rec, a, b, (), matrix(5, 2048, 2560), "float32")
    batches.product(rec, grad, b.turned, (), matrix(6, 2048, 1536), "float32")
    d_b = b if overwrite else matrix(7, 1536, 2560)
    batches.product(rec, a.turned, grad, (), d_b, "float32", free=True)
    if overwrite:
        batches.product(rec, a, b, (), matrix(5, 2048, 2560), "float32")
    return rec


def copied(rec):
    """(buffer of the source, where the copy lies) of each launch that makes one."""
    return [(refs[0][0], refs[1]) for made, refs in rec._steps if made.name.startswith("convert")]


def test_a_copy_of_a_factor_serves_every_product_of_a_call():
    rec = backward_products()
    made = copied(rec)
    assert [source for source, _ in made] == [3, 4]
    at = dict(made)
    assert len(set(at.values())) == 2
    products = [
        dict(zip(step.table, refs, strict=True))
        for step, refs in rec._steps
        if step.name.startswith("wgmma")
    ]
    assert [p["y copy"] for p in products] == [at[3], at[3], at[4]]


def test_the_second_of_two_copies_runs_beside_the_first():
    """Guards: it waits for nothing at its start, where alone it follows one that has waited."""
    rec = Recorder(Recording(), "ieee")
    half = {"dtype": "bfloat16", "itemsize": 2, "alignment": 2}
    a, b = (replace(matrix(i, 1001, 1003), **half) for i in (2, 3))
    batches.product(rec, a, b, (), replace(matrix(4, 1001, 1003), **half), "float32")
    names = [step.name for step, _ in rec._steps if step.name.startswith("convert")]
    assert names == ["convert copy", "convert copy beside"]
    # of b there is a copy, and the other one is the first of its product
    batches.product(rec, b.turned, b, (), replace(matrix(5, 1003, 1003), **half), "float32")
    names = [step.name for step, _ in rec._steps if step.name.startswith("convert")]
    assert names[2:] == ["convert copy"] * (len(names) - 2)


def test_a_copy_of_what_was_written_since_is_made_again():
    assert [source for source, _ in copied(backward_products(overwrite=True))] == [3, 4, 3]


def test_copies_beyond_the_limit_take_room_that_the_next_product_takes_too(monkeypatch):
    monkeypatch.setattr(tiling, "COPIES_BYTES", 0)
    made = copied(backward_products())
    assert [source for source, _ in made] == [3, 3, 4]
    assert {place[0] for _, place in made} == {1} and len({place for _, place in made}) < 3
