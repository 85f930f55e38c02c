"""Hopper's kernels with their arithmetic, run by `cuda_machine`: mbarriers, TMA and wgmma of s8.

Boxes arrive at once, as the copy engine's 128-byte swizzle has them; wgmma reads them back by its
descriptors (PTX ISA 9.7.15.5.1), and a group's sums are distributed as 9.7.15.5.1.1.2 says.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
from cuda_machine import Int32, Machine, Thread
from cuda_ptx import signed

from numfuse.backends.cuda.plan.product import Derived, Launch


def swizzled(address: Any) -> Any:
    """Where the engine puts a byte of rows of 128: 16-byte pieces exchanged by the row's number."""
    return address ^ (address >> 3 & 0x70)


class Barrier:
    """An mbarrier: a phase ends when all have arrived, and all promised bytes."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0

    def turn(self, arrivals: int, nbytes: int) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.arrivals


class Hopper(Machine):
    """A machine whose threads wait for mbarriers and named barriers, and multiply by groups."""

    def __init__(self, arrays: Any) -> None:
        def nothing(*_: Any) -> None:
            return None

        def index(axis: int) -> Any:
            return lambda: Int32(self.current.block.index[axis])

        silent = "barrier_fence map_prefetch registers_few registers_many grid_wait grid_release"
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
            barrier_init=lambda at, count: self.barriers.__setitem__(at, Barrier(count)),
            barrier_expect=lambda at, nbytes: self.barriers[at].turn(1, nbytes),
            barrier_arrive=lambda at, here: here and self.barriers[at].turn(1, 0),
            barrier_wait=lambda at, parity: self.wait(("mbarrier", at, parity)),
            tensor_load=self.tensor_load,
            multiply_wait1=lambda: None,
            MULTIPLY_WAIT=nothing,
            global_store4_b32=self.store_words,
        )
        self.barriers: dict[int, Barrier] = {}
        self.maps: dict[int, Any] = {}

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
        if name == "MULTIPLY":
            lines = value.numfuse_key.split("\n")
            return lambda acc, x, y, add: self.wait(("multiply", lines), (acc, x, y, add))
        return super()._name(name, value)

    def _ready(self, threads: list[Thread]) -> list[Thread]:
        found: list[Thread] = []
        groups: dict[Any, list[Thread]] = {}
        for thread in threads:
            if thread.waits is None:
                continue
            what = thread.waits[0]
            if what[0] == "mbarrier":
                if (self.barriers[what[1]].phase - 1) % 2 == what[2]:
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
        made, address = self.maps[number]
        columns, rows, places = made.sizes
        size = {"int8": 1}[made.dtype]
        width, height = made.box
        box = np.zeros((height, width * size), np.uint8)
        assert width * size == 128 and to % 1024 == 0 and 0 <= place < places
        for row in range(max(0, min(height, rows - outer))):
            count = max(0, min(width, columns - inner)) * size
            index = place * made.strides[1] + (outer + row) * made.strides[0] + inner
            start = address + index * size
            assert not count or self._inside(start, count), "a box outside of its array"
            box[row, :count] = np.frombuffer(ctypes.string_at(start, count), np.uint8)
        where = swizzled(to + np.arange(box.size))
        np.frombuffer(self.shared, np.uint8)[where] = box.ravel()
        self.barriers[at].turn(0, -box.size)

    def store_words(self, at: int, a: int, b: int, c: int, d: int, inside: bool) -> None:
        if inside:
            self.write("global", at, np.array([a, b, c, d], np.int64).astype(np.uint32).tobytes())

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
        _, x, y, add = given[0]
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
