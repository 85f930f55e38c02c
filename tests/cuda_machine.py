"""A GPU in Python: runs the text of a compiled kernel, for tests of lanes, masks and addresses.

Numba's simulator cannot run an intrinsic. Here an intrinsic runs its own code generator on a
builder that emits Python, once for each set of its operands' types, and inline PTX is looked up by
its instruction; tensor core instructions follow the fragment layouts of the PTX ISA (9.7.14.5).
Threads of a block take turns; they wait for each other at barriers, and those of a warp at its
instructions. A copy by cp.async arrives only when its group is waited for, and shared memory begins
as NaN. Accesses of memory are checked for their range and alignment. One multiply-add takes
microseconds: for blocks of a few thousand of them.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import cuda_ptx
import cuda_wgmma
import ml_dtypes
import numpy as np
from greenlet import getcurrent, greenlet
from llvmlite import ir

from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.plan.product import Launch, Slot

I32, I64, _I16 = ir.IntType(32), ir.IntType(64), ir.IntType(16)
#: Numbers below are a literal's where an intrinsic asks for one: most are indices of registers.
LITERAL = 160
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
        self.kind, self.key = kind, f"array of {kind}"


class Value:
    """What a builder's operation returns: Python that has it, and its LLVM type."""

    def __init__(self, text: str, kind: Any, parts: Sequence[str] = ()) -> None:
        self.text, self.type, self.parts = text, kind, list(parts)
        self.align = 0


class Pointer:
    """To an element of registers, or to shared or global memory."""

    def __init__(self, space: str, address: str, pointee: Any, registers: str = "") -> None:
        self.space, self.address, self.registers = space, address, registers
        self.type = SimpleNamespace(pointee=pointee)


def plain(x: Any) -> str:
    """Python that has an operand."""
    if isinstance(x, Value):
        return x.text
    if isinstance(x.type, ir.VectorType):
        return f"[{', '.join(['None'] * x.type.count)}]"
    # (one that is kept for all kernels may have been made of NumPy's number)
    constant = x.constant.item() if isinstance(x.constant, np.generic) else x.constant
    return f"({constant!r})"


def signed(value: int, bits: int) -> int:
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def size_of(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return kind.count * size_of(kind.element)
    return kind.width // 8 if isinstance(kind, ir.IntType) else REALS[str(kind)]().itemsize


def encoder(kind: Any) -> Callable[[Any], bytes]:
    """Return what makes bytes of a value of this type."""
    if isinstance(kind, ir.VectorType):
        part = encoder(kind.element)
        return lambda values: b"".join([part(x) for x in values])
    if isinstance(kind, ir.IntType):
        size, mask = kind.width // 8, (1 << kind.width) - 1
        return lambda x: (int(x) & mask).to_bytes(size, "little")
    real: Any = REALS[str(kind)]
    return lambda x: real(x).tobytes()


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return what makes a value of this type of bytes."""
    if isinstance(kind, ir.VectorType) and isinstance(kind.element, ir.IntType):
        format_ = np.dtype(f"<i{size_of(kind.element)}")
        return lambda raw: np.frombuffer(raw, format_).tolist()
    if isinstance(kind, ir.VectorType):
        of_parts: Any = REALS[str(kind.element)]
        return lambda raw: list(np.frombuffer(raw, of_parts))
    if isinstance(kind, ir.IntType):
        return lambda raw: int.from_bytes(raw, "little", signed=True)
    real: Any = REALS[str(kind)]
    return lambda raw: np.frombuffer(raw, real)[0]


class Builder:
    """The operations of an `IRBuilder` that intrinsics use, as lines of Python.

    In these, ``m`` is the machine. What an intrinsic emits depends on the types of its operands
    alone, so that it is asked once for each of them.
    """

    def __init__(self) -> None:
        self.module = SimpleNamespace(
            declare_intrinsic=lambda name, kinds, kind: SimpleNamespace(name=name)
        )
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"signed": signed, "Int32": Int32, "isnan": np.isnan}

    def bound(self, value: Any) -> str:
        """Return a name for an object."""
        name = f"bound{len(self.scope)}"
        self.scope[name] = value
        return name

    def real(self, kind: Any) -> str:
        return self.bound(REALS[str(kind)])

    def _made(self, text: str, kind: Any) -> Value:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return Value(name, kind)

    def gep(self, pointer: Any, index: Any) -> Pointer:
        kind = pointer.type.pointee
        step = 1 if pointer.space == "registers" else size_of(kind)
        address = f"{pointer.address} + {step} * {plain(index[0])}"
        return Pointer(pointer.space, address, kind, pointer.registers)

    def load(self, p: Any) -> Value:
        kind = p.type.pointee
        if p.space == "registers":
            return self._made(f"{p.registers}[{p.address}]", kind)
        raw = f"m.read({p.space!r}, {p.address}, {size_of(kind)})"
        return self._made(f"{self.bound(decoder(kind))}({raw})", kind)

    def store(self, value: Any, p: Any) -> Any:
        if p.space == "registers":
            self.lines.append(f"{p.registers}[{p.address}] = {plain(value)}")
        else:
            raw = f"{self.bound(encoder(value.type))}({plain(value)})"
            self.lines.append(f"m.write({p.space!r}, {p.address}, {raw})")
        return SimpleNamespace(align=0)

    def add(self, a: Any, b: Any) -> Value:
        return self._made(f"signed({plain(a)} + {plain(b)}, {a.type.width})", a.type)

    def fadd(self, a: Any, b: Any) -> Value:
        return self._made(f"{self.real(a.type)}({plain(a)} + {plain(b)})", a.type)

    def fsub(self, a: Any, b: Any) -> Value:
        return self._made(f"{self.real(a.type)}({plain(a)} - {plain(b)})", a.type)

    def sub(self, a: Any, b: Any) -> Value:
        return self._made(f"signed({plain(a)} - {plain(b)}, {a.type.width})", a.type)

    def shl(self, a: Any, b: Any) -> Value:
        return self._made(f"signed(int({plain(a)}) << {plain(b)}, {a.type.width})", a.type)

    def lshr(self, a: Any, b: Any) -> Value:
        mask = (1 << a.type.width) - 1
        return self._made(f"signed(({plain(a)} & {mask}) >> {plain(b)}, {a.type.width})", a.type)

    def and_(self, a: Any, b: Any) -> Value:
        return self._made(f"{plain(a)} & {plain(b)}", a.type)

    def or_(self, a: Any, b: Any) -> Value:
        return self._made(f"{plain(a)} | {plain(b)}", a.type)

    def ashr(self, a: Any, b: Any) -> Value:
        return self._made(f"{plain(a)} >> {plain(b)}", a.type)

    def sitofp(self, a: Any, kind: Any) -> Value:
        return self._made(f"{self.real(kind)}({plain(a)})", kind)

    def icmp_signed(self, what: str, a: Any, b: Any) -> Value:
        return self._made(f"{plain(a)} {what} {plain(b)}", ir.IntType(1))

    def icmp_unsigned(self, what: str, a: Any, b: Any) -> Value:
        assert what in ("==", "!=")
        return self.icmp_signed(what, a, b)

    def fcmp_unordered(self, what: str, a: Any, b: Any) -> Value:
        assert what == "uno"
        return self._made(f"bool(isnan({plain(a)}) or isnan({plain(b)}))", ir.IntType(1))

    def select(self, condition: Any, a: Any, b: Any) -> Value:
        return self._made(f"{plain(a)} if {plain(condition)} else {plain(b)}", a.type)

    def trunc(self, a: Any, kind: Any) -> Value:
        return self._made(f"signed({plain(a)}, {kind.width})", kind)

    def zext(self, a: Any, kind: Any) -> Value:
        return self._made(f"int({plain(a)}) & {(1 << a.type.width) - 1}", kind)

    def bitcast(self, a: Any, kind: Any) -> Value:
        raw = f"{self.bound(encoder(a.type))}({plain(a)})"
        return self._made(f"{self.bound(decoder(kind))}({raw})", kind)

    def fpext(self, a: Any, kind: Any) -> Value:
        return self._made(f"{self.real(kind)}({plain(a)})", kind)

    fptrunc = fpext

    def inttoptr(self, a: Any, kind: Any) -> Pointer:
        space = {1: "global", 3: "shared"}[kind.addrspace]
        return Pointer(space, f"int({plain(a)})", kind.pointee)

    def ptrtoint(self, p: Any, kind: Any) -> Value:
        return Value(f"({p.address})", kind)

    def extract_element(self, a: Any, i: Any) -> Value:
        if isinstance(a, Value) and a.parts:
            return Value(a.parts[i.constant], a.type.element)
        return Value(f"{plain(a)}[{i.constant}]", a.type.element)

    def insert_element(self, a: Any, x: Any, i: Any) -> Value:
        parts = list(getattr(a, "parts", ())) or ["None"] * a.type.count
        parts[i.constant] = plain(x)
        return Value(f"[{', '.join(parts)}]", a.type, parts)

    def extract_value(self, a: Any, i: int) -> Value:
        return Value(f"{a.text}[{i}]", a.type.elements[i])

    def call(self, function: Any, args: Sequence[Any], attrs: Any = ()) -> Any:
        values = [plain(a) for a in args]
        if isinstance(function, ir.InlineAsm):
            kind = getattr(function.type, "pointee", function.type)
            kind = getattr(kind, "return_type", kind)
            step = self.bound(instruction(function.asm))
            return self._made(f"{step}(m, [{', '.join(values)}])", kind)
        assert function.name == "llvm.fma"
        if isinstance(args[0].type, ir.DoubleType):
            return self._made(f"{self.bound(cuda_ptx.fused)}({', '.join(values)})", args[0].type)
        a, b, c = (f"{self.bound(np.float64)}({v})" for v in values)
        return self._made(f"{self.real(args[0].type)}({a} * {b} + {c})", args[0].type)


class Context:
    """Of Numba's lowering, what intrinsics use."""

    def make_array(self, kind: Any) -> Any:
        def made(context: Any, builder: Any, value: Any) -> Any:
            if value is None:
                return SimpleNamespace(data=Pointer("shared", "0", None))
            return SimpleNamespace(data=Pointer("registers", "0", LLVM[kind.dtype], value.text))

        return made

    def get_dummy_value(self) -> None:
        return None

    def make_tuple(self, builder: Any, kind: Any, parts: Any) -> list[Any]:
        return list(parts)


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

    def over(self, parity: int) -> bool:
        """Whether the phase of a parity is over."""
        return (self.phase - 1) % 2 == parity


class Block:
    """A block of threads, and its shared memory."""

    def __init__(self, index: tuple[int, int, int], nbytes: int) -> None:
        self.index = index
        self.shared = bytearray(b"\xff" * nbytes)
        self.static: list[Any] = []
        self.barriers: dict[int, Barrier] = {}


class Thread:
    """A thread of a block: its greenlet, its copies on the way, and what it waits for."""

    def __init__(self, number: int, block: Block) -> None:
        self.number, self.block = number, block
        self.turn: greenlet
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
        self.made: dict[Any, Any] = {}
        #: Addresses that threads asked for before they need them.
        self.asked: list[int] = []
        self.hub = getcurrent()
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
            try:
                kernel(*arguments)
            except BaseException as error:  # is raised by the hub
                thread.error = error
            thread.done = True

        self.hub = getcurrent()
        for thread in threads:
            thread.turn = greenlet(functools.partial(body, thread))
        ready = threads
        while ready:
            for thread in ready:
                thread.waits = None
                self.current = thread
                thread.turn.switch()
                if thread.error is not None:
                    raise thread.error
            ready = self._ready(threads)

    def _ready(self, threads: list[Thread]) -> list[Thread]:
        """Who may go on: warps whose threads have met, else a block, else the cluster."""
        found = []
        for first in range(0, len(threads), 32):
            warp = threads[first : first + 32]
            whats = {t.waits[0] if t.waits else None for t in warp}
            if len(whats) == 1 and not whats & {None, "barrier", "group", "mbarrier", "cluster"}:
                self.current = warp[0]  # whose block's memory it is
                results = self._together(warp[0].waits[0], [t.waits[1] for t in warp])
                for thread, result in zip(warp, results, strict=True):
                    thread.result = result
                found += warp
        for block in self.cluster:
            own = [t for t in threads if t.block is block]
            found += self._groups(own)
            found += [t for t in own if t.waits and t.waits[0] == "mbarrier" and self._over(t)]
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

    @staticmethod
    def _groups(threads: list[Thread]) -> list[Thread]:
        """Who of a block has met at a barrier of so many threads."""
        waiting: dict[tuple[int, int], list[Thread]] = {}
        for t in threads:
            if t.waits and t.waits[0] == "group":
                waiting.setdefault(tuple(map(int, t.waits[1])), []).append(t)
        return [t for (_, count), own in waiting.items() if len(own) == count for t in own]

    @staticmethod
    def _over(thread: Thread) -> bool:
        """Whether the phase of an mbarrier is over that a thread waits for."""
        at, parity = thread.waits[1]
        return thread.block.barriers[at].over(parity)

    def wait(self, what: str, value: Any = None) -> Any:
        thread = self.current
        thread.waits = what, value
        self.hub.switch()
        return thread.result

    # --- memory -------------------------------------------------------------------------------
    @property
    def shared(self) -> bytearray:
        """The current block's."""
        return self.current.block.shared

    def ask(self, arguments: list[Any]) -> None:
        """Ask for an address: nothing moves."""
        self._check("global", arguments[0], 1)
        self.asked.append(int(arguments[0]))

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
    def commit(self, a: list[Any]) -> None:
        thread = self.current
        thread.groups.append(thread.pending)
        thread.pending = []

    def wait_for_groups(self, most: int) -> None:
        groups = self.current.groups
        while len(groups) > most:
            for address, raw in groups.pop(0):
                self.write("shared", address, raw)

    def wait_for_copies(self, a: list[Any]) -> None:
        self.commit(a)
        self.wait_for_groups(0)

    def copy(self, size: int, a: list[Any]) -> None:
        used = a[2] if len(a) > 2 else size
        assert 0 <= used <= size
        assert not used or a[1] % size == 0, f"cp.async of {size} bytes from {a[1]:#x}"
        assert not used or self._inside(a[1], used), f"cp.async from {a[1]:#x}"
        raw = ctypes.string_at(a[1], used) if used else b""
        self.current.pending.append((a[0], raw + bytes(size - used)))

    def of_cluster(self, kind: Any, address: int) -> bytes:
        rank, at = address >> 24, address & 0xFFFFFF
        memory, size = self.cluster[rank].shared, size_of(kind)
        assert at % size == 0 and at <= len(memory) - size, f"shared memory of {rank} at {at}"
        return bytes(memory[at : at + size])

    def _together(self, what: str, values: list[Any]) -> list[Any]:
        if what == "warp":
            return values
        if what == "shuffle":
            return [values[lane ^ int(mask)][0] for lane, (_, mask) in enumerate(values)]
        if what == "lane":
            return [values[int(lane)][0] for _, lane in values]
        if what == "same":
            return [values[0][0]] * 32
        if what.startswith("stmatrix"):
            return self._store_matrices(values, what.endswith("trans"))
        if "wgmma" in what:
            return cuda_wgmma.together(what, self.shared, self.current.number // 32 % 4, values)
        if what.startswith("ldmatrix"):
            return self._matrices(values, what.endswith("trans"))
        if ".f64" in what:
            return _mma_double(what, values)
        if "tf32" in what:
            return _mma_tf32(values)
        if ".s8" in what:
            return _mma_integer(values)
        return _mma_half(ml_dtypes.bfloat16 if "bf16" in what else np.float16, values)

    def _matrices(self, addresses: list[int], turned: bool) -> list[Any]:
        found = []
        for i in range(4):
            rows = [self.read("shared", addresses[8 * i + r], 16) for r in range(8)]
            matrix = np.array([np.frombuffer(row, np.uint16) for row in rows])
            found.append(np.ascontiguousarray(matrix.T if turned else matrix).view(np.int32))
        return [[int(m[lane >> 2, lane & 3]) for m in found] for lane in range(32)]

    def _store_matrices(self, values: list[Any], turned: bool) -> list[Any]:
        for i in range(4):
            words = np.array([own[1 + i] for own in values], np.int64).astype(np.uint32)
            rows = words.reshape(8, 4).view(np.uint16)
            rows = np.ascontiguousarray(rows.T) if turned else rows
            for r in range(8):
                self.write("shared", values[8 * i + r][0], rows[r].tobytes())
        return [None] * 32

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
        known: dict[Any, Callable[..., Any]] = {}

        def call(*args: Any) -> Any:
            key = tuple(map(_key, args))
            made = known.get(key)
            if made is None:
                kinds = tuple([_kind(a) for a in args])
                made = known[key] = _emits(value, kinds, tuple([a is None for a in args]))
            return made(self, *args)

        return call


@functools.cache
def _emits(value: Any, kinds: tuple[Any, ...], empty: tuple[bool, ...]) -> Callable[..., Any]:
    """Return what an intrinsic does with operands of these types."""
    signature, codegen = value._defn(None, *kinds)
    builder, names = Builder(), [f"a{i}" for i in range(len(kinds))]
    values: list[Any] = []
    for name, kind, none in zip(names, signature.args, empty, strict=True):
        values.append(None if none else Value(name, LLVM.get(kind)))
        if isinstance(kind, types.Integer):
            # (nearly every one is of that range already, and a call takes longer than to look)
            most = 1 << kind.bitwidth - 1
            kept = f"type({name}) is int and {-most} <= {name} < {most}"
            builder.lines.append(f"{name} = {name} if {kept} else signed({name}, {kind.bitwidth})")
        elif kind == types.boolean:
            builder.lines.append(f"{name} = bool({name})")
        elif kind in LLVM:
            builder.lines.append(f"{name} = {builder.bound(_Real(kind))}({name})")
    result = codegen(Context(), builder, signature, values)
    if isinstance(result, list):
        text = f"({', '.join([plain(r) for r in result])},)"
    else:
        text = "None" if result is None else plain(result)
    if signature.return_type == types.int32:
        text = f"Int32(signed({text}, 32))"
    lines = "\n    ".join([*builder.lines, f"return {text}"])
    exec(f"def emitted({', '.join(['m', *names])}):\n    {lines}", builder.scope)
    found: Callable[..., Any] = builder.scope["emitted"]
    return found


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
        self.machine.wait("barrier")

    @property
    def threadIdx(self) -> Any:
        return SimpleNamespace(x=self.machine.current.number)

    @property
    def blockIdx(self) -> Any:
        x, y, z = self.machine.current.block.index
        return SimpleNamespace(x=x, y=y, z=z)

    @property
    def gridDim(self) -> Any:
        x, y, z = self.machine.grid
        return SimpleNamespace(x=x, y=y, z=z)

    def grid(self, axes: int) -> int:
        return self.blockIdx.x * self.machine.threads + self.threadIdx.x

    def gridsize(self, axes: int) -> int:
        return self.machine.grid[0] * self.machine.threads


def _key(value: Any) -> Any:
    """Return what tells Numba's types of values apart."""
    kind = type(value)
    if kind is int:
        return value if 0 <= value < LITERAL else int
    if kind is Registers:
        return value.key
    return kind if kind in _OF_ONE_TYPE else (kind, value)


_OF_ONE_TYPE = {np.float32, np.float64, Int32, type(None)}


def _kind(value: Any) -> Any:
    """Numba's type of a value."""
    if value is None or isinstance(value, Registers):
        return types.Array(value.kind if value else types.int64, 1, "C")
    if isinstance(value, np.floating):
        return types.float32 if value.dtype == np.float32 else types.float64
    if isinstance(value, Int32):
        return types.int32
    if isinstance(value, (bool, np.bool_)):
        return types.boolean
    return types.IntegerLiteral(value) if 0 <= value < LITERAL else types.int64


@functools.cache
def instruction(text: str) -> Callable[[Machine, list[Any]], Any]:
    """Return what a line of PTX does with its operands."""
    name = text.split()[0]
    numbers = re.findall(r"\d+", text)
    if name in _PURE:
        return _PURE[name]
    if "set.gt.u32" in text:
        above, bits = _kind_of(text), int(re.findall(r"and\.b32 z, z, (\d+)", text)[0])
        return lambda m, a: signed(a[0] | _above(above, a[1]) & bits, 32)
    if text.startswith("{ .reg") and not re.search(r"@|wgmma|set\.gt", text):
        return cuda_ptx.block(text)
    if text.startswith("griddepcontrol"):
        return lambda m, a: None
    if text.startswith(("setmaxnreg", "fence.mbarrier_init")):
        return lambda m, a: None
    if text.startswith("mbarrier.init"):
        return lambda m, a: m.current.block.barriers.__setitem__(a[0], Barrier(a[1]))
    if "@p mbarrier.arrive" in text:
        return lambda m, a: a[1] and m.current.block.barriers[a[0]].turn(1, 0)
    if "mbarrier.try_wait" in text:
        return lambda m, a: m.wait("mbarrier", a)
    if text.startswith("bar.sync $0"):
        return lambda m, a: m.wait("group", a)
    if text.startswith("bar.sync"):
        return lambda m, a: m.wait("barrier")
    if "wgmma.mma_async" in text:
        return lambda m, a: m.wait(text, a)
    if text.startswith("wgmma.wait_group"):
        return lambda m, a: a  # (every product is there at once)
    if text.startswith("fence.proxy.async"):
        return lambda m, a: None
    if text.startswith("stmatrix"):
        what = "stmatrix.trans" if ".trans" in text else "stmatrix"
        further = int((re.findall(r"\[\$0\+(\d+)\]", text) or [0])[0])
        return lambda m, a: m.wait(what, [a[0] + further, *a[1:]])
    if text.startswith("shfl.sync.idx.b32 $0, $1, $2"):
        return lambda m, a: m.wait("lane", a)
    if text.startswith("shfl.sync.idx"):
        return lambda m, a: m.wait("same", a)
    if "set.gt" in text:
        kind = _kind_of(text)
        return lambda m, a: _words(lambda x: x > 0, kind, a)
    if text.startswith("bar.warp.sync"):
        return lambda m, a: m.wait("warp")
    if text.startswith("barrier.cluster.arrive"):
        assert "barrier.cluster.wait" in text
        return lambda m, a: m.wait("cluster")
    if text.startswith("ld.shared::cluster"):
        kind = ir.DoubleType() if ".f64" in text else ir.FloatType()
        lanes = (re.findall(r"\.v(\d)", text) or ["1"])[0]
        whole = kind if lanes == "1" else ir.VectorType(kind, int(lanes))
        of_raw = decoder(whole)
        return lambda m, a: of_raw(m.of_cluster(whole, a[0]))
    if text.startswith("cp.async.commit_group"):
        return Machine.commit
    if text == "mov.u32 $0, %tid.x;":
        return lambda m, a: m.current.number
    if text.startswith("cp.async.wait_all"):
        return Machine.wait_for_copies
    if text.startswith("cp.async.wait_group"):
        return lambda m, a: m.wait_for_groups(int(numbers[-1]))
    if text.startswith("cp.async"):
        size = int(re.findall(r"\], (\d+)", text)[0])
        return lambda m, a: m.copy(size, a)
    if "@p cp.async" in text:
        size = int(re.findall(r"\], (\d+)", text)[0])
        return lambda m, a: m.copy(size, a[:2]) if a[2] > a[3] else None
    if text.startswith("ldmatrix"):
        what = "ldmatrix.trans" if ".trans" in text else "ldmatrix"
        further = int((re.findall(r"\[\$4\+(\d+)\]", text) or [0])[0])
        return lambda m, a: m.wait(what, a[0] + further)
    if text.startswith("ld.shared.v2.f32"):
        pair, further = decoder(ir.VectorType(ir.FloatType(), 2)), int(numbers[-1])
        return lambda m, a: pair(m.read("shared", a[0] + further, 8))
    if text.startswith("ld.global.nc.v4"):
        of_words = decoder(ir.VectorType(I32, 4))
        return lambda m, a: of_words(m.read("global", a[0], 16))
    if text.startswith("st.global.v4"):
        words = encoder(ir.VectorType(I32, 4))
        return lambda m, a: m.write("global", a[0], words(a[1:]))
    if text.startswith("prefetch"):
        return Machine.ask
    if text.startswith("mma"):
        return lambda m, a: m.wait(name, a)
    if "@p st.global" in text:
        one = encoder(ir.FloatType() if ".f32" in text else I32 if ".b32 [" in text else _I16)
        return lambda m, a: m.write("global", a[0], b"".join(map(one, a[1:-1]))) if a[-1] else None
    if text in ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"):  # bfloat16 to float32
        shift = 16 if name == "shl.b32" else 0
        return lambda m, a: np.uint32(int(a[0]) << shift & 0xFFFF0000).view(np.float32)
    if text.startswith("shfl.sync.bfly"):
        return lambda m, a: m.wait("shuffle", a)
    raise NotImplementedError(text)


_PURE: dict[str, Callable[[Machine, list[Any]], Any]] = {
    "add.s64": lambda m, a: signed(a[0] + a[1], 64),
    "div.u32": lambda m, a: int(a[0]) // int(a[1]),
    "min.s32": lambda m, a: min(a[0], a[1]),
    "max.s32": lambda m, a: max(a[0], a[1]),
    "mov.b32": lambda m, a: a[0],
    "cvta.to.shared.u64": lambda m, a: a[0],
    "cvt.rna.tf32.f32": lambda m, a: _as_tf32(a[0]),
    "cvt.rn.bf16.f32": lambda m, a: int(np.float32(a[0]).astype(ml_dtypes.bfloat16).view("i2")),
    "cvt.rn.bf16x2.f32": lambda m, a: _packed(a, ml_dtypes.bfloat16),
    "cvt.rn.f16x2.f32": lambda m, a: _packed(a, np.float16),
    "cvt.rn.relu.bf16x2.f32": lambda m, a: _packed(_rectified(a), ml_dtypes.bfloat16),
    "cvt.rn.relu.f16x2.f32": lambda m, a: _packed(_rectified(a), np.float16),
    "mul.rn.bf16x2": lambda m, a: _words(lambda x, y: x * y, ml_dtypes.bfloat16, a),
    "mapa.shared::cluster.u32": lambda m, a: a[1] << 24 | a[0],  # the window of a rank
}


def _kind_of(text: str) -> Any:
    return ml_dtypes.bfloat16 if "bf16x2" in text else np.float16


def _rectified(values: list[Any]) -> list[Any]:
    return [x if np.isnan(x) else max(x, np.float32(0)) for x in values]


def _above(kind: Any, word: int) -> int:
    """Return all bits of each value of a word that is greater than 0."""
    halves = np.array([signed(word, 32)], np.int32).view(kind) > 0
    return int(np.where(halves, 0xFFFF, 0).astype(np.uint16).view(np.uint32)[0])


def _words(function: Callable[..., Any], kind: Any, words: list[Any]) -> int:
    """Return a word of what a function makes of each pair of 16-bit values."""
    values = [np.array([w], np.int64).astype(np.int32).view(kind) for w in words]
    return int(np.asarray(function(*values)).astype(kind).view(np.int32)[0])


def _packed(values: list[Any], kind: Any) -> int:
    """Return two float32, rounded to 16 bits, as one word, the first in its low half."""
    return int(np.array(values, np.float32).astype(kind).view(np.int32)[0])


def _as_tf32(x: Any) -> int:
    """Return the nearest number with 11 significant bits, halves away from zero, as its bits."""
    word = int(np.float32(x).view(np.uint32))
    return signed((word + (1 << 12)) & ~0x1FFF if np.isfinite(x) else word, 32)


def _mma_tf32(values: list[Any]) -> list[Any]:
    a, b, d = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
    for lane, registers in enumerate(values):
        g, s = lane >> 2, lane & 3
        words = np.array(registers[:6], np.int64).astype(np.uint32)
        factors = words.view(np.float32)
        assert not (words & 0x1FFF)[~np.isnan(factors)].any(), "a factor is no tf32"
        for r in range(4):
            a[g + 8 * (r % 2), s + 4 * (r // 2)] = factors[r]
            d[g + 8 * (r // 2), 2 * s + r % 2] = registers[6 + r]
        for r in range(2):
            b[s + 4 * r, g] = factors[4 + r]
    return _fragments(a @ b + d, np.float32)


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


def _mma_integer(values: list[Any]) -> list[Any]:
    """m16n8k32 of s8: fragments are those of m16n8k16 of 16 bits, with two values in each."""
    a, b, d = (np.zeros(shape, np.int64) for shape in ((16, 32), (32, 8), (16, 8)))
    for lane, registers in enumerate(values):
        g, s = lane >> 2, lane & 3
        fours = np.array([registers[:6]], np.int64).astype(np.int32).view(np.int8).reshape(6, 4)
        for r in range(4):
            a[g + 8 * (r % 2), 4 * s + 16 * (r // 2) :][:4] = fours[r]
        for r in range(2):
            b[4 * s + 16 * r :, g][:4] = fours[4 + r]
        for r in range(4):
            d[g + 8 * (r // 2), 2 * s + r % 2] = registers[6 + r]
    return _fragments(a @ b + d, int)


def _fragments(d: Any, kind: Any) -> list[Any]:
    count = d.size // 32
    return [
        [kind(d[(lane >> 2) + 8 * (r // 2), 2 * (lane & 3) + r % 2]) for r in range(count)]
        for lane in range(32)
    ]
