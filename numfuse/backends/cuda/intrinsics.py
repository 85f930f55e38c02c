"""PTX as Python functions: the only place where an instruction is written by hand.

`ptx` makes an intrinsic of one line of PTX; `load` and `store` emit LLVM's own vector accesses,
which become the line that their docstring names and which the compiler may move. Every function
tells the section of the PTX ISA (version 9.0) that defines it. They trust their caller: addresses
are valid and aligned to the access.

Addresses and strides are ``int64``: Numba turns a sum of unsigned and signed 64-bit integers into a
float. Addresses of shared memory are offsets of its window, 32 bits that travel as ``int64`` or
``int32``.
"""

# A call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, arg-type"
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from numfuse.backends.cuda.toolchain import intrinsic, ir, types

I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

#: {constraint letter of LLVM's inline assembly: (LLVM type, Numba type)}.
CONSTRAINTS: dict[str, tuple[Any, Any]] = {
    "b": (I1, types.boolean),
    "r": (I32, types.int32),
    "l": (I64, types.int64),
    "f": (F32, types.float32),
    "d": (F64, types.float64),
}
#: {storage dtype: (LLVM type in memory, bytes)}; bfloat16 travels as its 16 bits, and
#: "bits" are 16 that are moved as they are.
FORMATS: dict[str, tuple[Any, int]] = {
    "float64": (F64, 8),
    "float32": (F32, 4),
    "float16": (HALF, 2),
    "bfloat16": (I16, 2),
    "bits": (I16, 2),
}
ACCUMULATORS: dict[str, tuple[Any, Any]] = {
    "float32": (F32, types.float32),
    "float64": (F64, types.float64),
    "int32": (I32, types.int32),
}
GLOBAL, SHARED = 1, 3


def itemsize(dtype: str) -> int:
    return FORMATS[dtype][1]


def named(name: str, key: str, parameters: int, typing: Callable[..., Any]) -> Any:
    """The intrinsic of `typing(typingctx, *args)`, which takes exactly `parameters` arguments."""

    def wrapper(typingctx: Any, *args: Any) -> Any:
        return typing(typingctx, *args)

    wrapper.__name__ = name
    # Numba folds the arguments of a call by the signature, and cannot fold into *args.
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["typingctx", *(f"arg{i}" for i in range(parameters))]
    wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in names]
    )
    made: Any = intrinsic(wrapper)
    made.numfuse_key = f"{name}({key})"
    return made


def _results(letters: str) -> tuple[Any, Any]:
    """LLVM type and Numba type of an instruction's results."""
    if not letters:
        return ir.VoidType(), types.void
    if len(letters) == 1:
        return CONSTRAINTS[letters]
    kinds = [CONSTRAINTS[c] for c in letters]
    if len(set(letters)) == 1:
        return ir.LiteralStructType([k[0] for k in kinds]), types.UniTuple(kinds[0][1], len(kinds))
    return ir.LiteralStructType([k[0] for k in kinds]), types.Tuple([k[1] for k in kinds])


def ptx(
    name: str,
    text: str,
    results: str = "",
    operands: str = "",
    *,
    effect: bool = True,
    convergent: bool = False,
) -> Any:
    """An intrinsic of one inline assembly: ``$0``, ``$1``... are the results, then the operands.

    `effect`: it reads or writes memory, so that the compiler neither moves it across other accesses
    nor drops it. `convergent`: it synchronises threads, so that no branch may be put around it.
    """
    returned, numba_returned = _results(results)
    constraints = ["=" + c for c in results] + list(operands) + (["~{memory}"] if effect else [])
    kinds = [CONSTRAINTS[c] for c in operands]

    def typing(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            function = ir.FunctionType(returned, [k[0] for k in kinds])
            asm = ir.InlineAsm(function, text, ",".join(constraints), side_effect=effect)
            result = builder.call(asm, values, attrs=("convergent",) if convergent else ())
            if not results:
                return context.get_dummy_value()
            if len(results) == 1:
                return result
            parts = [builder.extract_value(result, i) for i in range(len(results))]
            return context.make_tuple(builder, signature.return_type, parts)

        return numba_returned(*[k[1] for k in kinds]), codegen

    return named(name, text, len(operands), typing)


# --- registers ------------------------------------------------------------------------------------
def array_pointer(context: Any, builder: Any, ty: Any, value: Any) -> Any:
    """Where a `cuda.local.array` begins. Elements at constant indices become registers."""
    return context.make_array(ty)(context, builder, value).data


def element(builder: Any, pointer: Any, i: int) -> Any:
    return builder.gep(pointer, [I32(i)])


def read_registers(builder: Any, pointer: Any, first: int, count: int) -> list[Any]:
    return [builder.load(element(builder, pointer, first + i)) for i in range(count)]


def write_registers(builder: Any, pointer: Any, first: int, values: list[Any]) -> None:
    for i, value in enumerate(values):
        builder.store(value, element(builder, pointer, first + i))


@functools.cache
def cleared(count: int) -> Any:
    """``cleared(registers)``: the first `count` elements of a local array are 0."""

    def typing(typingctx: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[0], args[0])
            zero = ir.Constant(pointer.type.pointee, 0.0)
            write_registers(builder, pointer, 0, [zero] * count)
            return context.get_dummy_value()

        return types.void(registers), codegen

    return named("cleared", str(count), 1, typing)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """fma.rn.f32, fma.rn.f64 (9.7.3.6, "fma"): a * b + c, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(builder.module.declare_intrinsic("llvm.fma", [a.type], kind), [a, b, c])


#: add.s64 (9.7.1.1): a running address, opaque so that no multiple of the step becomes a register.
advance = ptx("advance", "add.s64 $0, $1, $2;", "l", "ll", effect=False)
#: div.u32 (9.7.1.8), without Python's test for zero.
quotient = ptx("quotient", "div.u32 $0, $1, $2;", "r", "rr", effect=False)
#: min.s32 (9.7.1.11) and max.s32 (9.7.1.12).
least = ptx("least", "min.s32 $0, $1, $2;", "r", "rr", effect=False)
most = ptx("most", "max.s32 $0, $1, $2;", "r", "rr", effect=False)


# --- loads and stores -----------------------------------------------------------------------------
def _vector_pointer(builder: Any, address: Any, kind: Any, count: int, space: int) -> Any:
    ty = kind if count == 1 else ir.VectorType(kind, count)
    if space == SHARED:
        address = builder.trunc(address, I32) if address.type.width > 32 else address
    return builder.inttoptr(address, ty.as_pointer(space))


def _widened(builder: Any, value: Any, dtype: str, accumulator: Any) -> Any:
    """A scalar in storage format `dtype` as an accumulator; exact."""
    if dtype == "bits":
        return builder.zext(value, I32)
    if dtype == "bfloat16":
        bits = builder.shl(builder.zext(value, I32), I32(16))
        value = builder.bitcast(bits, F32)
    return value if value.type == accumulator else builder.fpext(value, accumulator)


def _narrowed(builder: Any, value: Any, dtype: str) -> Any:
    """An accumulator rounded to storage format `dtype`: to nearest, ties to even."""
    kind = FORMATS[dtype][0]
    if dtype == "bits":
        return builder.trunc(value, I16)
    if dtype == "bfloat16":
        # cvt.rn.bf16.f32 (9.7.9.22, "cvt"); LLVM's own rounding is five instructions
        asm = ir.InlineAsm(
            ir.FunctionType(I16, [F32]), "cvt.rn.bf16.f32 $0, $1;", "=h,f", side_effect=False
        )
        return builder.call(asm, [value])
    return value if value.type == kind else builder.fptrunc(value, kind)


def shared_vector(builder: Any, address: Any, kind: Any, count: int) -> list[Any]:
    """ld.shared.v2, .v4 (9.7.9.8, "ld"): neighbours in shared memory, as scalars."""
    pointer = _vector_pointer(builder, address, kind, count, SHARED)
    value = builder.load(pointer)
    value.align = count * (8 if kind == F64 else 4)
    if count == 1:
        return [value]
    return [builder.extract_element(value, I32(i)) for i in range(count)]


def put_shared_vector(builder: Any, address: Any, values: list[Any]) -> None:
    """st.shared.v2, .v4 (9.7.9.12, "st")."""
    kind, count = values[0].type, len(values)
    pointer = _vector_pointer(builder, address, kind, count, SHARED)
    packed = values[0]
    if count > 1:
        packed = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
        for i, value in enumerate(values):
            packed = builder.insert_element(packed, value, I32(i))
    builder.store(packed, pointer).align = count * (8 if kind == F64 else 4)


def _key(*parts: Any) -> str:
    return ",".join(map(str, parts))


@functools.cache
def load(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``load(address)``: `count` neighbours, widened, as a tuple (a scalar where it is one).

    ld.global or ld.shared, .v2, .v4 (9.7.9.8, "ld").
    """
    kind, size = FORMATS[dtype]
    llvm, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_vector_pointer(builder, args[0], kind, count, space))
            value.align = size * count
            if count == 1:
                return _widened(builder, value, dtype, llvm)
            parts = [builder.extract_element(value, I32(i)) for i in range(count)]
            parts = [_widened(builder, part, dtype, llvm) for part in parts]
            return context.make_tuple(builder, signature.return_type, parts)

        returned = numba if count == 1 else types.UniTuple(numba, count)
        return returned(types.int64), codegen

    return named("load", _key(dtype, count, accumulator, space), 1, typing)


@functools.cache
def store(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, values...)``: `count` neighbours, rounded.

    st.global or st.shared, .v2, .v4 (9.7.9.12, "st").
    """
    kind, size = FORMATS[dtype]
    _, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            parts = [_narrowed(builder, value, dtype) for value in values[1:]]
            packed = parts[0]
            if count > 1:
                packed = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
                for i, part in enumerate(parts):
                    packed = builder.insert_element(packed, part, I32(i))
            pointer = _vector_pointer(builder, values[0], kind, count, space)
            builder.store(packed, pointer).align = size * count
            return context.get_dummy_value()

        return types.void(types.int64, *[numba] * count), codegen

    return named("store", _key(dtype, count, accumulator, space), 1 + count, typing)


@functools.cache
def store_array(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, registers)``: the first `count` elements of a local array, as `store`."""
    kind, size = FORMATS[dtype]

    def typing(typingctx: Any, address: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[1], args[1])
            parts = read_registers(builder, pointer, 0, count)
            packed = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
            for i, part in enumerate(parts):
                packed = builder.insert_element(packed, _narrowed(builder, part, dtype), I32(i))
            pointer = _vector_pointer(builder, args[0], kind, count, space)
            builder.store(packed, pointer).align = size * count
            return context.get_dummy_value()

        return types.void(types.int64, registers), codegen

    return named("store_array", _key(dtype, count, accumulator, space), 2, typing)


def _streamed_text(kind: str, words: int) -> str:
    values = ", ".join(f"${i + (kind == 'st')}" for i in range(words))
    if kind == "ld":
        return f"ld.global.cs.v{words}.b32 {{{values}}}, [${words}];"
    return f"st.global.cs.v{words}.b32 [$0], {{{values}}};"


#: ld.global.cs.v4 (9.7.9.8; cache operators 9.7.9.1): 16 bytes that are read once.
load_streamed = ptx("load_streamed", _streamed_text("ld", 4), "rrrr", "l")
#: st.global.cs.v4 (9.7.9.12): 16 bytes that are not read soon.
store_streamed = ptx("store_streamed", _streamed_text("st", 4), "", "lrrrr")


@functools.cache
def words_as(dtype: str, accumulator: str) -> Any:
    """``words_as(w0, w1, w2, w3)``: what 16 bytes hold, widened, as a tuple."""
    kind, size = FORMATS[dtype]
    llvm, numba = ACCUMULATORS[accumulator]
    count = 16 // size

    def typing(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
            for i, word in enumerate(args):
                words = builder.insert_element(words, word, I32(i))
            values = builder.bitcast(words, ir.VectorType(kind, count))
            parts = [builder.extract_element(values, I32(i)) for i in range(count)]
            parts = [_widened(builder, part, dtype, llvm) for part in parts]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(numba, count)(*[types.int32] * 4), codegen

    return named("words_as", _key(dtype, accumulator), 4, typing)


@functools.cache
def as_words(dtype: str, accumulator: str) -> Any:
    """``as_words(registers)``: a local array, rounded, as the four words of 16 bytes."""
    kind, size = FORMATS[dtype]
    count = 16 // size

    def typing(typingctx: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[0], args[0])
            packed = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
            for i, value in enumerate(read_registers(builder, pointer, 0, count)):
                packed = builder.insert_element(packed, _narrowed(builder, value, dtype), I32(i))
            words = builder.bitcast(packed, ir.VectorType(I32, 4))
            parts = [builder.extract_element(words, I32(i)) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.int32, 4)(registers), codegen

    return named("as_words", _key(dtype, accumulator), 1, typing)


# --- shared memory --------------------------------------------------------------------------------
def _shared_address(typingctx: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.ptrtoint(array_pointer(context, builder, signature.args[0], args[0]), I64)
        # cvta.to.shared (9.7.9.20, "cvta")
        asm = ir.InlineAsm(
            ir.FunctionType(I64, [I64]), "cvta.to.shared.u64 $0, $1;", "=l,l", side_effect=False
        )
        return builder.trunc(builder.call(asm, [pointer]), I32)

    return types.int32(array), codegen


#: ``shared_address(array)``: where a `cuda.shared.array` begins.
shared_address = named("shared_address", "", 1, _shared_address)


@functools.cache
def copy_async(bytes_: int, partial: bool = False) -> Any:
    """``copy(shared, address)``: 4, 8 or 16 bytes to shared memory, not waited for.

    cp.async (9.7.9.25.3.1); `partial`: ``copy(shared, address, count)``, of which the first `count`
    bytes are read and the others are zero (none is read where it is 0). 16 bytes go past level 1.
    """
    cache = "cg" if bytes_ == 16 else "ca"
    ahead = ".L2::128B"
    text = f"cp.async.{cache}.shared.global{ahead} [$0], [$1], {bytes_}"
    return ptx("copy_async", text + (", $2;" if partial else ";"), "", "rlr" if partial else "rl")


#: cp.async.commit_group (9.7.9.25.3.2): closes the group of this thread's copies.
commit_copies = ptx("commit_copies", "cp.async.commit_group;")


@functools.cache
def wait_copies(pending: int) -> Any:
    """cp.async.wait_group (9.7.9.25.3.3): at most so many of the latest groups are on their way."""
    return ptx("wait_copies", f"cp.async.wait_group {pending};")


#: bar.sync (9.7.13.1): all threads of the block, and their accesses of shared memory.
barrier = ptx("barrier", "bar.sync 0;", convergent=True)


# --- tensor cores ---------------------------------------------------------------------------------
def load_matrix(builder: Any, address: Any, turned: bool) -> list[Any]:
    """ldmatrix.x4, .trans where `turned` (9.7.14.5.15): four 8 x 8 matrices of 16-bit values.

    Lanes 8 i to 8 i + 7 give the rows' addresses of matrix i.
    """
    trans = ".trans" if turned else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    kind = ir.FunctionType(ir.LiteralStructType([I32] * 4), [I32])
    # reads shared memory: ordered by the clobber after copies and barriers
    asm = ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
    found = builder.call(asm, [address], attrs=("convergent",))
    return [builder.extract_value(found, i) for i in range(4)]


def _mma(builder: Any, text: str, d: str, a: str, b: str, args: list[Any]) -> list[Any]:
    """D = A B + D of one warp; letters are the constraints of the fragments' registers."""
    kinds = [CONSTRAINTS[c][0] for c in d]
    inputs = [CONSTRAINTS[c][0] for c in a + b + d]
    n = [0]

    def group(letters: str) -> str:
        first = n[0]
        n[0] += len(letters)
        names = ", ".join(f"${i}" for i in range(first, n[0]))
        return f"{{{names}}}"

    text = f"{text} {group(d)}, {group(a)}, {group(b)}, {group(d)};"
    constraints = ",".join(["=" + c for c in d] + list(a + b + d))
    function = ir.FunctionType(ir.LiteralStructType(kinds), inputs)
    asm = ir.InlineAsm(function, text, constraints, side_effect=False)
    found = builder.call(asm, args, attrs=("convergent",))
    return [builder.extract_value(found, i) for i in range(len(d))]


def mma_half(builder: Any, dtype: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k16 of bf16 or f16, sums in f32 (9.7.14.5.8; 9.7.14.5.14, "mma")."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return _mma(builder, text, "ffff", "rrrr", "rr", [*a, *b, *c])


def mma_double(builder: Any, k: int, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k4, k8 or k16 of f64 (9.7.14.5.14): compute capability 9.0."""
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dddd", "d" * (k // 2), "d" * (k // 4), [*a, *b, *c])


def mma_double_small(builder: Any, a: Any, b: Any, c: list[Any]) -> list[Any]:
    """mma.m8n8k4 of f64 (9.7.14.5.1): compute capability 8.0."""
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dd", "d", "d", [a, b, *c])
