"""Hopper's kernels with their arithmetic, run by `cuda_machine`: mbarriers, TMA and wgmma.

Boxes arrive and leave at once, as the copy engine's swizzle has them; wgmma reads them back by its
descriptors (PTX ISA 9.7.15.5.1), and a group's sums are distributed as 9.7.15.5.1.1.2 says.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import cuda_wgmma
import numpy as np
from cuda_machine import Barrier, Int32, Machine, Thread
from cuda_ptx import signed

from numfuse.backends.cuda.plan.product import Derived, Launch


def swizzled(address: Any, row: int = 128) -> Any:
    """Where the engine puts a byte of rows of 128 or 64: 16-byte pieces exchanged by the row."""
    return address ^ (address >> 3 & row - 16)


def packed(words: Any) -> bytes:
    """Return the bytes of 32-bit words."""
    return np.array(words, np.int64).astype(np.uint32).tobytes()


#: Bytes of an element.
SIZES = {"int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


class Hopper(Machine):
    """A machine whose threads wait for mbarriers and named barriers, and multiply by groups."""

    def __init__(self, arrays: Any) -> None:
        def nothing(*_: Any) -> None:
            return None

        def index(axis: int) -> Any:
            return lambda: Int32(self.current.block.index[axis])

        silent = (
            "barrier_fence map_prefetch registers_few registers_many grid_wait grid_release"
            " copy_fence store_commit store_wait_read0 store_wait_read1 tensor_prefetch"
        )
        super().__init__(
            arrays,
            **dict.fromkeys(silent.split(), nothing),
            thread_index=lambda: Int32(self.current.number),
            block_index=index(0),
            block_index_y=index(1),
            block_index_z=index(2),
            block_count=lambda: Int32(self.grid[0]),
            dynamic_shared=lambda: Int32(0),
            fresh=lambda x: x,
            same=lambda x: x,
            quotient=lambda a, b: Int32(a // b),
            product_high=lambda a, b: Int32(a * b >> 32),
            block_barrier=lambda: self.wait("barrier"),
            group_barrier=lambda number, count: self.wait(("group", number, count)),
            group_any=lambda number, count, truth: self.wait(("any", number, count), truth),
            barrier_init=lambda at, count: self.barriers.__setitem__(at, Barrier(count)),
            barrier_expect=lambda at, nbytes: self.barriers[at].turn(1, nbytes),
            barrier_arrive=lambda at, here: here and self.barriers[at].turn(1, 0),
            barrier_wait=lambda at, parity: self.wait(("mbarrier", at, parity)),
            tensor_load=self.tensor_load,
            tensor_store=self.tensor_store,
            multiply_wait1=lambda: None,
            MULTIPLY_WAIT=nothing,
            global_store4_b32=self.store_words,
            global_load_f32=lambda at, inside: self.floats("global", at, 1, inside)[0],
            global_load4_f32=lambda at, inside: self.floats("global", at, 4, inside),
            shared_load_f32=lambda at: self.floats("shared", at, 1)[0],
            shared_load2_f32=lambda at: self.floats("shared", at, 2),
            shared_load16=lambda at: self.halfword("shared", at),
            shared_store_f32=lambda at, x: self.write("shared", at, np.float32(x).tobytes()),
            shared_store16=lambda at, word: self.put("shared", at, word),
            shared_store32=lambda at, word: self.put("shared", at, word, 4),
            global_load16=lambda at, inside: self.halfword("global", at) if inside else 0,
            global_store16=lambda at, word, inside: inside and self.put("global", at, word),
        )
        self.barriers: dict[int, Barrier] = {}
        self.maps: dict[int, Any] = {}
        self.stored: set[int] = set()

    def run(self, launch: Launch, **addresses: int) -> None:
        """Run a launch; a tensor map is a number that stands for it."""
        found = []
        for value in launch.arguments:
            if isinstance(value, Derived):
                number = (1 << 40) + len(self.maps)
                at = addresses[value.slot.name] + value.slot.offset
                self.maps[number], value = (value.make, at), number
            found.append(value)
        made = Launch(launch.kernel, launch.grid, tuple(found), launch.shared_bytes)
        super().run(made, **addresses)

    def _name(self, name: str, value: Any) -> Any:
        if name in ("MULTIPLY", "MULTIPLY_LOW", "MULTIPLY_HIGH", "MULTIPLY_TOP"):
            lines = value.numfuse_key.split("\n")
            last = int(re.search(r"setp\.ne\.b32 p, \$(\d+)", lines[0])[1])  # type: ignore[index]

            def multiply(acc: Any, x: Any, y: Any, add: Any) -> Any:
                # X's descriptor, or as many of its words as the text has
                given = x[: last - 1 - 2 * len(acc)] if isinstance(x, list) else (x,)
                return self.wait(("multiply", lines), (acc, *given, y, add))

            return multiply
        return super()._name(name, value)

    def _ready(self, threads: list[Thread]) -> list[Thread]:
        found: list[Thread] = []
        groups: dict[Any, list[Thread]] = {}
        for thread in threads:
            if thread.waits is None:
                continue
            what = thread.waits[0]
            if what[0] == "mbarrier":
                if self.barriers[what[1]].over(what[2]):
                    found.append(thread)
                continue
            key: Any = what
            if what[0] == "multiply":
                key = "multiply", thread.number // 128
            elif isinstance(what, str) and what != "barrier":
                key = "warp", thread.number // 32, what
            groups.setdefault(key, []).append(thread)
        for what, own in groups.items():
            kind = what[0] if isinstance(what, tuple) else what
            counts = {"multiply": 128, "warp": 32, "barrier": len(threads)}
            count = counts.get(kind) or what[2]
            if len(own) == count:
                if kind == "any":
                    for thread in own:
                        thread.result = int(any(t.waits[1] for t in own))
                if kind == "multiply":
                    self.current = own[0]
                    self.multiply(own[0].waits[0][1], [t.waits[1] for t in own])
                if kind == "warp":
                    self.current = own[0]
                    results = self._together(what[2], [t.waits[1] for t in own])
                    for thread, result in zip(own, results, strict=True):
                        thread.result = result
                found += own
        assert found or all(t.done for t in threads), "threads wait for ever"
        return found

    # --- the copy engine ----------------------------------------------------------------------
    def tensor_load(
        self, to: int, number: int, inner: int, outer: int, place: int, at: int
    ) -> None:
        """Bring a box to shared memory; what is outside of the array is zero."""
        box, where = self._box(number, to)
        for row, start, count in self._rows(number, inner, outer, place):
            box[row, :count] = np.frombuffer(ctypes.string_at(start, count), np.uint8)
        np.frombuffer(self.shared, np.uint8)[where] = box.ravel()
        self.barriers[at].turn(0, -box.size)

    def tensor_store(self, number: int, inner: int, outer: int, place: int, at: int) -> None:
        """Write what is inside of the array of a box in shared memory."""
        box, where = self._box(number, at)
        box[:] = np.frombuffer(self.shared, np.uint8)[where].reshape(box.shape)
        for row, start, count in self._rows(number, inner, outer, place):
            own = set(range(start, start + count))
            assert not self.stored & own, "two boxes store one element"
            self.stored |= own
            ctypes.memmove(start, box[row, :count].tobytes(), count)

    def _box(self, number: int, at: int) -> tuple[Any, Any]:
        """Return rows of a map's box, and where their bytes are in shared memory."""
        made, _ = self.maps[number]
        width, height = made.box
        row = width * SIZES[made.dtype]
        assert row in (64, 128) and at % (8 * row) == 0
        return np.zeros((height, row), np.uint8), swizzled(at + np.arange(height * row), row)

    def _rows(self, number: int, inner: int, outer: int, place: int) -> Any:
        """Return of each row of a box that is inside: its number, its address and its bytes."""
        made, address = self.maps[number]
        (columns, rows, places), (width, height), size = made.sizes, made.box, SIZES[made.dtype]
        assert 0 <= place < places and inner >= 0 and outer >= 0
        count = max(0, min(width, columns - inner)) * size
        for row in range(max(0, min(height, rows - outer)) if count else 0):
            index = place * made.strides[1] + (outer + row) * made.strides[0] + inner
            start = address + index * size
            assert self._inside(start, count), "a box outside of its array"
            yield row, start, count

    def store_words(self, at: int, a: int, b: int, c: int, d: int, inside: bool) -> None:
        if inside:
            self.write("global", at, packed((a, b, c, d)))

    def floats(self, space: str, at: int, count: int, inside: bool = True) -> Any:
        """Return neighbours, which are not read where they lie outside."""
        raw = self.read(space, at, 4 * count) if inside else bytes(4 * count)
        return tuple(np.frombuffer(raw, np.float32))

    def halfword(self, space: str, at: int) -> Any:
        return Int32(int.from_bytes(self.read(space, at, 2), "little"))

    def put(self, space: str, at: int, word: int, size: int = 2) -> None:
        """Write the low bytes of a word."""
        self.write(space, at, (int(word) & (1 << 8 * size) - 1).to_bytes(size, "little"))

    # --- wgmma --------------------------------------------------------------------------------
    def _matrix(self, descriptor: int, rows: int) -> Any:
        """Rows of 32 bytes of K, by a descriptor without a turn."""
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        assert descriptor >> 62 == 1, "rows of 128 bytes are swizzled"
        r, k = np.arange(rows)[:, None], np.arange(32)[None]
        where = swizzled(start + r // 8 * stride + r % 8 * 128 + k)
        return np.frombuffer(self.shared, np.int8)[where].astype(np.int64)

    def multiply(self, lines: list[str], given: list[Any]) -> None:
        """Run the text of a group: registers of 128 threads, the words of both descriptors."""
        *_, add = given[0]
        if not any(".s8" in line for line in lines):
            for warp in range(4):
                own = given[32 * warp : 32 * warp + 32]
                values = [[*(0 if v is None else v for v in g[0]), *g[1:]] for g in own]
                made = cuda_wgmma.together("\n".join(lines), self.shared, warp, values)
                for (acc, *_), sums in zip(own, made, strict=True):
                    acc[: len(sums)] = sums
            return
        _, x, y, _ = given[0]
        assert all(g[1:] == (x, y, add) for g in given)
        known = {"p": bool(add)}
        count = len(given[0][0])
        operands = {2 * count: int(x), 2 * count + 1: int(y)}
        for line in lines:
            if found := re.fullmatch(r"add\.s32 w, \$(\d+), (\d+);", line):
                known["w"] = operands[int(found[1])] + int(found[2])
            elif found := re.fullmatch(r"mov\.b64 (d[xy]), \{w, (\d+)\};", line):
                known[found[1]] = int(found[2]) << 32 | (known["w"] & 0xFFFFFFFF)
            elif line.startswith("setp.eq"):
                known["p"] = True
            elif line.startswith("wgmma.mma_async"):
                form = r".*m64n(\d+)k32\.s32\.s8\.s8 \{([^}]*)\}, dx, dy, p;"
                columns, registers = re.fullmatch(form, line).groups()  # type: ignore[union-attr]
                own = [int(n) for n in re.findall(r"\$(\d+)", registers)]
                a, b = self._matrix(known["dx"], 64), self._matrix(known["dy"], int(columns))
                self._add(given, own, a @ b.T, known["p"])

    def _add(self, given: list[Any], own: list[int], d: Any, add: bool) -> None:
        for t, (acc, *_) in enumerate(given):
            warp, lane = divmod(t, 32)
            for i, register in enumerate(own):
                row = 16 * warp + (lane >> 2) + 8 * (i >> 1 & 1)
                column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
                value = int(d[row, column]) + (int(acc[register]) if add else 0)
                assert value == signed(value, 32), "an int32 overflows"
                acc[register] = value
