"""A GPU in Python: runs the text of a compiled kernel, for tests of lanes, masks and addresses.

Numba's simulator cannot run an intrinsic. Here an intrinsic runs its own code generator on a
builder that computes instead of emitting, and inline PTX is looked up by its instruction; tensor
core instructions follow the fragment layouts of the PTX ISA (9.7.14.5). Threads of a block take
turns; they wait for each other at barriers, and those of a warp at its instructions. A copy by
cp.async arrives only when its group is waited for, and shared memory begins as NaN. Accesses of
memory are checked for their range and alignment. One multiply-add takes microseconds: for blocks of
a few thousand of them.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.plan.product import Launch, Slot

I32, I64 = ir.IntType(32), ir.IntType(64)
REALS = {"half": np.float16, "float": np.float32, "double": np.float64}
LLVM = {
    types.int32: I32, types.int64: I64, types.boolean: ir.IntType(1),
    types.float32: ir.FloatType(), types.float64: ir.DoubleType(),
}  # fmt: skip


class Int32(int):
    """An int32 of a kernel: arithmetic makes an int64 of it, as Numba's does."""


class Registers(list):
    """A `cuda.local.array`."""

    def __init__(self, count: int, kind: Any) -> None:
        super().__init__([None] * count)
        self.kind = kind


class Value:
    """What a builder's operation returns."""

    def __init__(self, value: Any, kind: Any) -> None:
        self.value, self.type = value, kind
        self.align = 0


class Pointer:
    """To an element of registers, or to shared or global memory."""

    def __init__(self, space: str, address: int, pointee: Any, registers: Any = None) -> None:
        self.space, self.address, self.registers = space, address, registers
        self.type = SimpleNamespace(pointee=pointee)


def plain(x: Any) -> Any:
    """The value of an operand."""
    if isinstance(x, Value):
        return x.value
    if isinstance(x, ir.Constant):
        return [None] * x.type.count if isinstance(x.type, ir.VectorType) else x.constant
    return x


def signed(value: int, bits: int) -> int:
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def to_bytes(value: Any, kind: Any) -> bytes:
    if isinstance(kind, ir.VectorType):
        return b"".join(to_bytes(v, kind.element) for v in value)
    if isinstance(kind, ir.IntType):
        return (int(value) & ((1 << kind.width) - 1)).to_bytes(kind.width // 8, "little")
    return REALS[str(kind)](value).tobytes()


def from_bytes(raw: bytes, kind: Any) -> Any:
    if isinstance(kind, ir.VectorType):
        step = len(raw) // kind.count
        return [from_bytes(raw[i * step : (i + 1) * step], kind.element) for i in range(kind.count)]
    if isinstance(kind, ir.IntType):
        return signed(int.from_bytes(raw, "little"), kind.width)
    return np.frombuffer(raw, REALS[str(kind)])[0]


def size_of(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return kind.count * size_of(kind.element)
    return kind.width // 8 if isinstance(kind, ir.IntType) else REALS[str(kind)]().itemsize


class Builder:
    """The operations of an `IRBuilder` that intrinsics use, computed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.module = SimpleNamespace(
            declare_intrinsic=lambda name, kinds, kind: SimpleNamespace(name=name)
        )

    def gep(self, pointer: Any, index: Any) -> Pointer:
        kind = pointer.type.pointee
        step = 1 if pointer.space == "registers" else size_of(kind)
        return Pointer(
            pointer.space, pointer.address + step * plain(index[0]), kind, pointer.registers
        )

    def load(self, p: Any) -> Value:
        if p.space == "registers":
            return Value(p.registers[p.address], p.type.pointee)
        raw = self.machine.read(p.space, p.address, size_of(p.type.pointee))
        return Value(from_bytes(raw, p.type.pointee), p.type.pointee)

    def store(self, value: Any, p: Any) -> Any:
        if p.space == "registers":
            p.registers[p.address] = plain(value)
        else:
            self.machine.write(p.space, p.address, to_bytes(plain(value), value.type))
        return SimpleNamespace(align=0)

    def add(self, a: Any, b: Any) -> Value:
        return Value(signed(plain(a) + plain(b), a.type.width), a.type)

    def fadd(self, a: Any, b: Any) -> Value:
        return Value(REALS[str(a.type)](plain(a) + plain(b)), a.type)

    def shl(self, a: Any, b: Any) -> Value:
        return Value(signed(int(plain(a)) << plain(b), a.type.width), a.type)

    def lshr(self, a: Any, b: Any) -> Value:
        return Value(
            signed((plain(a) & ((1 << a.type.width) - 1)) >> plain(b), a.type.width), a.type
        )

    def and_(self, a: Any, b: Any) -> Value:
        return Value(plain(a) & plain(b), a.type)

    def fcmp_unordered(self, what: str, a: Any, b: Any) -> Value:
        assert what == "uno"
        return Value(bool(np.isnan(plain(a)) or np.isnan(plain(b))), ir.IntType(1))

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        return a if plain(condition) else b

    def trunc(self, a: Any, kind: Any) -> Value:
        return Value(signed(plain(a), kind.width), kind)

    def zext(self, a: Any, kind: Any) -> Value:
        return Value(int(plain(a)) & ((1 << a.type.width) - 1), kind)

    def bitcast(self, a: Any, kind: Any) -> Value:
        return Value(from_bytes(to_bytes(plain(a), a.type), kind), kind)

    def fpext(self, a: Any, kind: Any) -> Value:
        return Value(REALS[str(kind)](plain(a)), kind)

    fptrunc = fpext

    def inttoptr(self, a: Any, kind: Any) -> Pointer:
        return Pointer({1: "global", 3: "shared"}[kind.addrspace], int(plain(a)), kind.pointee)

    def ptrtoint(self, p: Any, kind: Any) -> Value:
        return Value(p.address, kind)

    def extract_element(self, a: Any, i: Any) -> Value:
        return Value(plain(a)[plain(i)], a.type.element)

    def insert_element(self, a: Any, x: Any, i: Any) -> Value:
        made = list(plain(a))
        made[plain(i)] = plain(x)
        return Value(made, a.type)

    def extract_value(self, a: Any, i: int) -> Value:
        return Value(a.value[i], a.type.elements[i])

    def call(self, function: Any, args: Sequence[Any], attrs: Any = ()) -> Any:
        values = [plain(a) for a in args]
        if isinstance(function, ir.InlineAsm):
            kind = getattr(function.type, "pointee", function.type)
            kind = getattr(kind, "return_type", kind)
            return Value(self.machine.instruction(function.asm, values), kind)
        assert function.name == "llvm.fma"
        wide = np.float64 if isinstance(args[0].type, ir.FloatType) else np.longdouble
        a, b, c = (wide(v) for v in values)
        return Value(REALS[str(args[0].type)](a * b + c), args[0].type)


class Context:
    """Of Numba's lowering, what intrinsics use."""

    def make_array(self, kind: Any) -> Any:
        def made(context: Any, builder: Any, value: Any) -> Any:
            if isinstance(value, Registers):
                return SimpleNamespace(data=Pointer("registers", 0, LLVM[value.kind], value))
            return SimpleNamespace(data=Pointer("shared", 0, None))

        return made

    def get_dummy_value(self) -> None:
        return None

    def make_tuple(self, builder: Any, kind: Any, parts: Any) -> tuple[Any, ...]:
        return tuple(plain(p) for p in parts)


class Block:
    """A block of threads, and its shared memory."""

    def __init__(self, index: tuple[int, int, int], nbytes: int) -> None:
        self.index = index
        self.shared = bytearray(b"\xff" * nbytes)
        self.static: list[Any] = []


class Thread:
    """A thread of a block: its Python thread, its copies on the way, and what it waits for."""

    def __init__(self, number: int, block: Block) -> None:
        self.number, self.block = number, block
        self.turn = threading.Semaphore(0)
        self.pending: list[tuple[int, bytes]] = []
        self.groups: list[list[tuple[int, bytes]]] = []
        self.waits: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.arrays = 0


class Machine:
    """Runs launches on NumPy arrays.

    Parameters
    ----------
    arrays : sequence of ndarray
        The memory: nothing else may be accessed.
    functions : dict
        Names of the kernel that are replaced: formulas, which use more of LLVM than is here.
    """

    def __init__(self, arrays: Sequence[Any], **functions: Callable[..., Any]) -> None:
        self.ranges = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in arrays]
        self.functions = functions
        self.builder, self.context = Builder(self), Context()
        self.made: dict[Any, Any] = {}
        self.hub = threading.Semaphore(0)
        self.grid, self.threads = (1, 1, 1), 1
        self.cluster: list[Block] = [Block((0, 0, 0), 0)]
        self.current: Thread = Thread(0, self.cluster[0])

    # --- launches -----------------------------------------------------------------------------
    def run(self, launch: Launch, **addresses: int) -> None:
        """Run a launch with these addresses in its slots."""
        kinds = launch.kernel.signature
        arguments = []
        for kind, value in zip(kinds, launch.arguments, strict=True):
            if isinstance(value, Slot):
                value = addresses[value.name] + value.offset
            arguments.append(Int32(value) if kind == "i32" else int(value))  # type: ignore[arg-type]
        kernel = self.emulated(launch.kernel.text())
        columns, rows, layers = self.grid = launch.grid
        self.threads = launch.kernel.block[0]
        assert columns % launch.cluster == 0
        for z, y, x in np.ndindex(layers, rows, columns // launch.cluster):
            self.cluster = [
                Block((x * launch.cluster + rank, y, z), launch.shared_bytes)
                for rank in range(launch.cluster)
            ]
            self._run_cluster(kernel, arguments, launch.kernel.block[0])

    def _run_cluster(self, kernel: Any, arguments: list[Any], count: int) -> None:
        threads = [Thread(i, block) for block in self.cluster for i in range(count)]

        def body(thread: Thread) -> None:
            thread.turn.acquire()
            try:
                kernel(*arguments)
            except BaseException as error:  # is raised by the hub
                thread.error = error
            thread.done = True
            self.hub.release()

        for thread in threads:
            threading.Thread(target=body, args=(thread,), daemon=True).start()
        ready = threads
        while ready:
            for thread in ready:
                thread.waits = None
                self.current = thread
                thread.turn.release()
                self.hub.acquire()
                if thread.error is not None:
                    raise thread.error
            ready = self._ready(threads)

    def _ready(self, threads: list[Thread]) -> list[Thread]:
        """Who may go on: warps whose threads have met, else a block, else the cluster."""
        found = []
        for first in range(0, len(threads), 32):
            warp = threads[first : first + 32]
            whats = {t.waits[0] if t.waits else None for t in warp}
            if len(whats) == 1 and not whats & {None, "barrier", "cluster"}:
                self.current = warp[0]  # whose block's memory it is
                results = self._together(warp[0].waits[0], [t.waits[1] for t in warp])
                for thread, result in zip(warp, results, strict=True):
                    thread.result = result
                found += warp
        if found or all(t.done for t in threads):
            return found
        for block in self.cluster:
            own = [t for t in threads if t.block is block]
            if all(t.waits and t.waits[0] == "barrier" for t in own):
                found += own
        if found:
            return found
        assert all(t.waits and t.waits[0] == "cluster" for t in threads), "threads wait for ever"
        return threads

    def _wait(self, what: str, value: Any = None) -> Any:
        thread = self.current
        thread.waits = what, value
        self.hub.release()
        thread.turn.acquire()
        return thread.result

    # --- memory -------------------------------------------------------------------------------
    @property
    def shared(self) -> bytearray:
        """The current block's."""
        return self.current.block.shared

    def _check(self, space: str, address: int, size: int) -> None:
        assert address % size == 0, f"{size} bytes of {space} memory at {address:#x}"
        if space == "shared":
            assert 0 <= address <= len(self.shared) - size, f"shared memory at {address}"
        else:
            assert self._inside(address, size), f"{size} bytes at {address:#x} are of no array"

    def _inside(self, address: int, size: int) -> bool:
        return any(first <= address and address + size <= end for first, end in self.ranges)

    def read(self, space: str, address: int, size: int) -> bytes:
        self._check(space, address, size)
        if space == "shared":
            return bytes(self.shared[address : address + size])
        return ctypes.string_at(address, size)

    def write(self, space: str, address: int, raw: bytes) -> None:
        self._check(space, address, len(raw))
        if space == "shared":
            self.shared[address : address + len(raw)] = raw
        else:
            ctypes.memmove(address, raw, len(raw))

    # --- instructions -------------------------------------------------------------------------
    def instruction(self, text: str, a: list[Any]) -> Any:
        thread = self.current
        simple = {
            "add.s64": lambda: signed(a[0] + a[1], 64),
            "div.u32": lambda: int(a[0]) // int(a[1]),
            "min.s32": lambda: min(a[0], a[1]),
            "max.s32": lambda: max(a[0], a[1]),
            "mov.b32": lambda: a[0],
            "cvta.to.shared.u64": lambda: a[0],
            "cvt.rn.bf16.f32": lambda: int(np.float32(a[0]).astype(ml_dtypes.bfloat16).view("i2")),
        }.get(text.split()[0])
        if simple is not None:
            return simple()
        if text.startswith("bar.sync"):
            return self._wait("barrier")
        if text.startswith("bar.warp.sync"):
            return self._wait("warp")
        if text.startswith("barrier.cluster.arrive"):
            assert "barrier.cluster.wait" in text
            return self._wait("cluster")
        if text.startswith("mapa"):
            return a[1] << 24 | a[0]  # the window of a rank
        if text.startswith("ld.shared::cluster"):
            return self._of_cluster(text, a[0])
        if text.startswith("cp.async.commit_group"):
            thread.groups.append(thread.pending)
            thread.pending = []
        elif text.startswith("cp.async.wait_group"):
            while len(thread.groups) > int(re.findall(r"\d+", text)[-1]):
                for address, raw in thread.groups.pop(0):
                    self.write("shared", address, raw)
        elif text.startswith("cp.async"):
            size = int(re.findall(r"\], (\d+)", text)[0])
            used = a[2] if len(a) > 2 else size
            assert 0 <= used <= size
            assert not used or a[1] % size == 0, f"cp.async of {size} bytes from {a[1]:#x}"
            assert not used or self._inside(a[1], used), f"cp.async from {a[1]:#x}"
            raw = ctypes.string_at(a[1], used) if used else b""
            thread.pending.append((a[0], raw + bytes(size - used)))
        elif text.startswith("ldmatrix"):
            return self._wait("ldmatrix.trans" if ".trans" in text else "ldmatrix", a[0])
        elif text.startswith("ld.global.nc.v4"):
            return from_bytes(self.read("global", a[0], 16), ir.VectorType(I32, 4))
        elif text.startswith("st.global.v4"):
            self.write("global", a[0], to_bytes(a[1:], ir.VectorType(I32, 4)))
        elif text.startswith("mma"):
            return self._wait(text.split()[0], a)
        else:
            raise NotImplementedError(text)
        return None

    def _of_cluster(self, text: str, address: int) -> Any:
        kind = ir.DoubleType() if ".f64" in text else ir.FloatType()
        lanes = re.findall(r"\.v(\d)", text)
        count = int(lanes[0]) if lanes else 1
        rank, at = address >> 24, address & 0xFFFFFF
        memory, size = self.cluster[rank].shared, count * size_of(kind)
        assert at % size == 0 and at <= len(memory) - size, f"shared memory of {rank} at {at}"
        raw = bytes(memory[at : at + size])
        return from_bytes(raw, kind if count == 1 else ir.VectorType(kind, count))

    def _together(self, what: str, values: list[Any]) -> list[Any]:
        if what == "warp":
            return values
        if what.startswith("ldmatrix"):
            return self._matrices(values, what.endswith("trans"))
        if ".f64" in what:
            return _mma_double(what, values)
        return _mma_half(ml_dtypes.bfloat16 if "bf16" in what else np.float16, values)

    def _matrices(self, addresses: list[int], turned: bool) -> list[Any]:
        found = []
        for i in range(4):
            rows = [self.read("shared", addresses[8 * i + r], 16) for r in range(8)]
            matrix = np.array([np.frombuffer(row, np.uint16) for row in rows])
            found.append(np.ascontiguousarray(matrix.T if turned else matrix).view(np.int32))
        return [[int(m[lane >> 2, lane & 3]) for m in found] for lane in range(32)]

    # --- the kernel's names -------------------------------------------------------------------
    def emulated(self, function: Any) -> Any:
        """A function with this machine's intrinsics in place of Numba's."""
        if function in self.made:
            return self.made[function]
        scope: dict[str, Any] = {}
        made = self.made[function] = FunctionType(function.__code__, scope, function.__name__)
        for name in function.__code__.co_names:
            if name in self.functions:
                scope[name] = self.functions[name]
            elif name in function.__globals__:
                scope[name] = self._name(name, function.__globals__[name])
        return made

    def _name(self, name: str, value: Any) -> Any:
        if name == "cuda":
            return _Cuda(self)
        if hasattr(value, "_defn"):
            return self._intrinsic(value)
        if hasattr(value, "py_func"):
            return self.emulated(value.py_func)
        if value is np.int32:
            return lambda x: Int32(signed(x, 32))
        if value is np.int64:
            return int
        if isinstance(value, types.Float):
            return _Real(value)
        return value

    def _intrinsic(self, value: Any) -> Callable[..., Any]:
        known: dict[Any, Any] = {}

        def call(*args: Any) -> Any:
            kinds = tuple(_kind(a) for a in args)
            if kinds not in known:
                known[kinds] = value._defn(None, *kinds)
            signature, codegen = known[kinds]
            values = [_typed(k, a) for k, a in zip(signature.args, args, strict=True)]
            result = plain(codegen(self.context, self.builder, signature, values))
            if signature.return_type == types.int32:
                return Int32(signed(result, 32))
            return tuple(plain(r) for r in result) if isinstance(result, list) else result

        return call


class _Real:
    """float32 or float64 as a kernel names it: a type and a conversion."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.convert = np.float32 if kind == types.float32 else np.float64

    def __call__(self, x: Any) -> Any:
        return self.convert(x)


class _Cuda:
    """The module `cuda` in a kernel."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.local = SimpleNamespace(
            array=lambda n, dtype: Registers(n, getattr(dtype, "kind", dtype))
        )
        self.shared = SimpleNamespace(array=self._shared)

    def _shared(self, shape: Any, dtype: Any) -> Any:
        if shape == 0:
            return None  # dynamic: by its address
        thread = self.machine.current
        static = thread.block.static
        thread.arrays += 1
        if len(static) < thread.arrays:
            static.append(
                np.full(shape, np.nan, getattr(dtype, "convert", None) or _Real(dtype).convert)
            )
        return static[thread.arrays - 1]

    def syncthreads(self) -> None:
        self.machine._wait("barrier")

    @property
    def threadIdx(self) -> Any:
        return SimpleNamespace(x=self.machine.current.number)

    @property
    def blockIdx(self) -> Any:
        x, y, z = self.machine.current.block.index
        return SimpleNamespace(x=x, y=y, z=z)

    def grid(self, axes: int) -> int:
        return self.blockIdx.x * self.machine.threads + self.threadIdx.x

    def gridsize(self, axes: int) -> int:
        return self.machine.grid[0] * self.machine.threads


def _kind(value: Any) -> Any:
    """Numba's type of a value."""
    if value is None or isinstance(value, Registers):
        return types.Array(value.kind if value else types.int64, 1, "C")
    if isinstance(value, np.floating):
        return types.float32 if value.dtype == np.float32 else types.float64
    if isinstance(value, Int32):
        return types.int32
    return types.IntegerLiteral(value) if 0 <= value < 100 else types.int64


def _typed(kind: Any, value: Any) -> Any:
    if kind not in LLVM:
        return value
    if isinstance(kind, types.Integer):
        return Value(signed(value, kind.bitwidth), LLVM[kind])
    return Value(_Real(kind)(value), LLVM[kind])


def _mma_double(text: str, values: list[Any]) -> list[Any]:
    m, n, k = map(int, re.findall(r"m(\d+)n(\d+)k(\d+)", text)[0])
    a, b, d = np.zeros((m, k)), np.zeros((k, n)), np.zeros((m, n))
    of_a, of_b, of_d = m * k // 32, k * n // 32, m * n // 32
    rows = m // 8
    for lane, registers in enumerate(values):
        g, s = lane >> 2, lane & 3
        for r in range(of_a):
            a[g + 8 * (r % rows), s + 4 * (r // rows)] = registers[r]
        for r in range(of_b):
            b[s + 4 * r, g] = registers[of_a + r]
        for r in range(of_d):
            d[g + 8 * (r // 2), 2 * s + r % 2] = registers[of_a + of_b + r]
    return _fragments(a @ b + d, np.float64)


def _mma_half(dtype: Any, values: list[Any]) -> list[Any]:
    a, b, d = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, registers in enumerate(values):
        g, s = lane >> 2, lane & 3
        pairs = np.array([registers[:6]], np.int32).view(dtype).astype(float).reshape(6, 2)
        for r in range(4):
            a[g + 8 * (r % 2), 2 * s + 8 * (r // 2) :][:2] = pairs[r]
        for r in range(2):
            b[2 * s + 8 * r :, g][:2] = pairs[4 + r]
        for r in range(4):
            d[g + 8 * (r // 2), 2 * s + r % 2] = registers[6 + r]
    return _fragments(a @ b + d, np.float32)


def _fragments(d: Any, kind: Any) -> list[Any]:
    count = d.size // 32
    return [
        [kind(d[(lane >> 2) + 8 * (r // 2), 2 * (lane & 3) + r % 2]) for r in range(count)]
        for lane in range(32)
    ]
