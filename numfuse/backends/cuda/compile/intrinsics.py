"""PTX as Python functions: the only place where an instruction is written by hand.

Each is a line of PTX, with the section of the PTX ISA (version 9.0) that defines it. `instruction`
makes an intrinsic of one text, `emit` writes one into the code of a larger intrinsic; `load` and
`store` are LLVM's own vector accesses, which become the line that their docstring names and which
the compiler may move. They trust their caller: addresses are valid and aligned to the access.

Addresses and strides are ``int64``: Numba turns a sum of unsigned and signed 64-bit integers into a
float. Addresses of shared memory are offsets of its window, 32 bits that travel as ``int64`` or
``int32``. A *predicate* is a truth value: a masked access is one predicated instruction and no
branch, for a hundred branches in a body are more than Numba's compiler takes.
"""

# A call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, arg-type"
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from numfuse.backends.cuda.compile.toolchain import intrinsic, ir, types

I16, I32, I64 = (ir.IntType(bits) for bits in (16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

#: {constraint letter of LLVM's inline assembly: (LLVM type, Numba type)}; "p" is a predicate, in
#: the text a 32-bit 0 or 1.
LETTERS: dict[str, tuple[Any, Any]] = {
    "h": (I16, types.int16),
    "r": (I32, types.int32),
    "l": (I64, types.int64),
    "f": (F32, types.float32),
    "d": (F64, types.float64),
    "p": (I32, types.boolean),
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


def emit(
    builder: Any,
    text: str,
    results: str,
    operands: str,
    values: Sequence[Any],
    kind: str = "pure",
) -> Any:
    """Call one inline assembly: ``$0``, ``$1``... are the results, then the operands.

    The letters are those of `LETTERS`; several results are a list. What the compiler may do:

    - "pure": move it, and merge it with another of the same operands;
    - "memory": nothing, it reads or writes memory;
    - "convergent": nothing, and no branch may be put around it: threads execute it together;
    - "warp": what "pure" may, but no branch may be put around it.
    """
    returned: ir.Type = ir.VoidType()
    if len(results) == 1:
        returned = LETTERS[results][0]
    elif results:
        returned = ir.LiteralStructType([LETTERS[r][0] for r in results])
    function = ir.FunctionType(returned, [LETTERS[o][0] for o in operands])
    # a predicated load leaves its result as it was set before: never in an operand's register
    early = "&" if "p" in operands else ""
    constraints = [f"={early}{r}" for r in results] + [o.replace("p", "r") for o in operands]
    effect = kind in ("memory", "convergent")
    if effect:
        constraints.append("~{memory}")
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=effect)
    given = [builder.zext(v, I32) if o == "p" else v for o, v in zip(operands, values, strict=True)]
    together = ("convergent",) if kind in ("convergent", "warp") else ()
    made = builder.call(assembly, given, attrs=together)
    if len(results) < 2:
        return made
    return [builder.extract_value(made, i) for i in range(len(results))]


def instruction(text: str, results: str = "", operands: str = "", kind: str = "memory") -> Any:
    """An intrinsic of one text, as `emit` takes it. Several results, of one type, are a tuple."""

    def typing(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = emit(builder, text, results, operands, values, kind)
            if not results:
                return context.get_dummy_value()
            if len(results) == 1:
                return made
            return context.make_tuple(builder, signature.return_type, made)

        returned = types.void
        if len(results) == 1:
            returned = LETTERS[results][1]
        elif results:
            returned = types.UniTuple(LETTERS[results[0]][1], len(results))
        return returned(*[LETTERS[o][1] for o in operands]), codegen

    return named("ptx", f"{text} {results} {operands} {kind}", len(operands), typing)


# A local array as an operand. Elements at constant indices become registers.
def array_pointer(context: Any, builder: Any, ty: Any, value: Any) -> Any:
    """Where a `cuda.local.array` begins."""
    return context.make_array(ty)(context, builder, value).data


def element(builder: Any, pointer: Any, i: int) -> Any:
    return builder.gep(pointer, [I32(i)])


def read_registers(builder: Any, pointer: Any, first: int, count: int) -> list[Any]:
    return [builder.load(element(builder, pointer, first + i)) for i in range(count)]


def write_registers(builder: Any, pointer: Any, first: int, values: list[Any]) -> None:
    for i, value in enumerate(values):
        builder.store(value, element(builder, pointer, first + i))


# --- special registers, addresses of shared memory ------------------------------------------------
#: 10, %tid, %ctaid, %nctaid: this thread in its block, this block in its grid
thread_index = instruction("mov.u32 $0, %tid.x;", "r", kind="pure")
block_index = instruction("mov.u32 $0, %ctaid.x;", "r", kind="pure")
block_index_y = instruction("mov.u32 $0, %ctaid.y;", "r", kind="pure")
block_index_z = instruction("mov.u32 $0, %ctaid.z;", "r", kind="pure")
#: (asked again each time: a register to keep it is one too many)
block_count = instruction("mov.u32 $0, %nctaid.x;", "r")


def _shared_address(typingctx: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.ptrtoint(array_pointer(context, builder, signature.args[0], args[0]), I64)
        return builder.trunc(emit(builder, "cvta.to.shared.u64 $0, $1;", "l", "l", [pointer]), I32)

    return types.int32(array), codegen


#: 9.7.9.20, cvta.to.shared: where a `cuda.shared.array` begins
shared_address = named("shared_address", "", 1, _shared_address)


def _dynamic_shared(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        module = builder.module
        if "dynamic_shared" in module.globals:
            window = module.globals["dynamic_shared"]
        else:
            window = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", 3)
            window.linkage, window.align = "external", 1024
        return builder.trunc(builder.ptrtoint(window, I64), I32)

    return types.int32(), codegen


#: 5.1.7, .extern .shared: where the shared memory begins that the launch asks for
dynamic_shared = named("dynamic_shared", "", 0, _dynamic_shared)

# --- integers -------------------------------------------------------------------------------------
#: 9.7.1.1, add: a running address, opaque so that no multiple of the step becomes a register
advance = instruction("add.s64 $0, $1, $2;", "l", "ll", "pure")
#: 9.7.1.8, div: of two non-negative numbers, without Python's test for zero
quotient = instruction("div.u32 $0, $1, $2;", "r", "rr", "pure")
#: 9.7.1.3, mul.hi: the upper 32 bits of a product
product_high = instruction("mul.hi.u32 $0, $1, $2;", "r", "rr", "pure")
#: 9.7.1.12, min; 9.7.1.13, max
least = instruction("min.s32 $0, $1, $2;", "r", "rr", "pure")
most = instruction("max.s32 $0, $1, $2;", "r", "rr", "pure")
#: 9.7.9.3, mov: x, of which the compiler knows nothing. What is computed of it is computed there,
#: and not once before a loop: hundreds of addresses would not fit beside the accumulators.
fresh = instruction("mov.b32 $0, $1;", "r", "r")


# --- floating point -------------------------------------------------------------------------------
def _float_text(name: str, x: Any) -> tuple[str, str]:
    """The suffix of the float's type, and its letter."""
    return (f"{name}.f32", "f") if x.type == F32 else (f"{name}.f64", "d")


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """fma.rn (9.7.3.6): a * b + c, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(builder.module.declare_intrinsic("llvm.fma", [a.type], kind), [a, b, c])


def rounded_product(builder: Any, a: Any, b: Any) -> Any:
    """mul.rn (9.7.3.5): a * b, which PTX merges into no fma (9.7.3)."""
    text, letter = _float_text("mul.rn", a)
    return emit(builder, f"{text} $0, $1, $2;", letter, letter * 2, [a, b])


def square_root(builder: Any, x: Any) -> Any:
    """sqrt.rn (9.7.3.15): correctly rounded."""
    text, letter = _float_text("sqrt.rn", x)
    return emit(builder, f"{text} $0, $1;", letter, letter, [x])


def approximate(builder: Any, name: str, x: Any) -> Any:
    """ex2.approx (9.7.3.21), 2^x to 2 units in the last place; rcp.approx (9.7.3.13), 1 / x to 1.

    Of float32; subnormal numbers count as 0 (``.ftz``).
    """
    return emit(builder, f"{name}.approx.ftz.f32 $0, $1;", "f", "f", [x])


def inverse(builder: Any, x: Any) -> Any:
    """1 / x of float32 by rcp.approx (9.7.3.13) and fma, without a branch; x and 1 / x normal.

    A division (9.7.3.8) is as many instructions and a branch for all other numbers, and a compiler
    mixes nothing across a branch: each division of a block's epilogue waits for the one before.
    The start is right to a unit in the last place, so what the step gives is rounded correctly, but
    for a significand of ones alone (Markstein 1990), which wants a start that is not below 1 / x.
    """
    one, minus = ir.Constant(F32, 1.0), builder.fsub(ir.Constant(F32, -0.0), x)
    start = approximate(builder, "rcp", x)
    return fused(builder, start, fused(builder, minus, start, one), start)


def from_half(builder: Any, x: Any) -> Any:
    """cvt.f32.f16 (9.7.9.21): exact."""
    return emit(builder, "cvt.f32.f16 $0, $1;", "f", "h", [x])


def to_half(builder: Any, x: Any) -> Any:
    """cvt.rn.f16.f32 (9.7.9.21): to nearest, ties to even."""
    return emit(builder, "cvt.rn.f16.f32 $0, $1;", "h", "f", [x])


def to_bfloat16(builder: Any, x: Any) -> Any:
    """cvt.rn.bf16.f32 (9.7.9.21), to nearest, ties to even; LLVM's own is five instructions."""
    return emit(builder, "cvt.rn.bf16.f32 $0, $1;", "h", "f", [x])


#: 9.7.9.21, cvt: two float32 rounded to nearest even in one word, the first in its low half
#: (the instruction names the high half first); and back, by cvt, shl (9.7.8.8) and and (9.7.8.1).
#: {format: (pack, low half, high half)}
HALVES = {
    "bfloat16": (
        instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", "pure"),
        instruction("shl.b32 $0, $1, 16;", "f", "r", "pure"),
        instruction("and.b32 $0, $1, 0xffff0000;", "f", "r", "pure"),
    ),
    "float16": (
        instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "r", "ff", "pure"),
        instruction("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }", "f", "r", "pure"),
        instruction("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }", "f", "r", "pure"),
    ),
}
#: 9.7.9.21, cvt.rna: the nearest tf32, halves away from zero, in a float32's bits
round_tf32 = instruction(
    "{ .reg .b32 t; cvt.rna.tf32.f32 t, $1; mov.b32 $0, t; }", "f", "f", "pure"
)
#: 9.7.9.6, shfl.sync.bfly: the value of the lane whose number differs in the bits of `mask`
shuffle_xor = instruction(
    "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "f", "fr", "convergent"
)
#: 9.7.9.6, shfl.sync.idx: lane 0's value for all of a warp, of which the compiler then knows that
#: they have one: what is computed of it is computed once, in registers of a warp
same = instruction("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "r", "r", "warp")
#: 9.7.6.3, selp: one of two values, without a branch
select = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p; }", "f", "ffp", "pure"
)


# --- loads and stores of LLVM ---------------------------------------------------------------------
def _vector_pointer(builder: Any, address: Any, kind: Any, count: int, space: int) -> Any:
    ty = kind if count == 1 else ir.VectorType(kind, count)
    if space == SHARED:
        address = builder.trunc(address, I32) if address.type.width > 32 else address
    return builder.inttoptr(address, ty.as_pointer(space))


def widened(builder: Any, value: Any, dtype: str, accumulator: Any) -> Any:
    """A scalar in storage format `dtype` as an accumulator; exact."""
    if dtype == "bits":
        return builder.zext(value, I32)
    if dtype == "bfloat16":
        bits = builder.shl(builder.zext(value, I32), I32(16))
        value = builder.bitcast(bits, F32)
    return value if value.type == accumulator else builder.fpext(value, accumulator)


def narrowed(builder: Any, value: Any, dtype: str) -> Any:
    """An accumulator rounded to storage format `dtype`: to nearest, ties to even."""
    kind = FORMATS[dtype][0]
    if dtype == "bits":
        return builder.trunc(value, I16)
    if dtype == "bfloat16":
        return to_bfloat16(builder, value)
    return value if value.type == kind else builder.fptrunc(value, kind)


def shared_vector(builder: Any, address: Any, kind: Any, count: int) -> list[Any]:
    """ld.shared.v2, .v4 (9.7.9.8): neighbours in shared memory, as scalars."""
    pointer = _vector_pointer(builder, address, kind, count, SHARED)
    value = builder.load(pointer)
    value.align = count * (8 if kind == F64 else 4)
    if count == 1:
        return [value]
    return [builder.extract_element(value, I32(i)) for i in range(count)]


def put_shared_vector(builder: Any, address: Any, values: list[Any]) -> None:
    """st.shared.v2, .v4 (9.7.9.11)."""
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

    ld.global or ld.shared, .v2, .v4 (9.7.9.8).
    """
    kind, size = FORMATS[dtype]
    llvm, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_vector_pointer(builder, args[0], kind, count, space))
            value.align = size * count
            if count == 1:
                return widened(builder, value, dtype, llvm)
            parts = [builder.extract_element(value, I32(i)) for i in range(count)]
            parts = [widened(builder, part, dtype, llvm) for part in parts]
            return context.make_tuple(builder, signature.return_type, parts)

        returned = numba if count == 1 else types.UniTuple(numba, count)
        return returned(types.int64), codegen

    return named("load", _key(dtype, count, accumulator, space), 1, typing)


@functools.cache
def store(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, values...)``: `count` neighbours, rounded.

    st.global or st.shared, .v2, .v4 (9.7.9.11).
    """
    kind, size = FORMATS[dtype]
    _, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            parts = [narrowed(builder, value, dtype) for value in values[1:]]
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
                packed = builder.insert_element(packed, narrowed(builder, part, dtype), I32(i))
            pointer = _vector_pointer(builder, args[0], kind, count, space)
            builder.store(packed, pointer).align = size * count
            return context.get_dummy_value()

        return types.void(types.int64, registers), codegen

    return named("store_array", _key(dtype, count, accumulator, space), 2, typing)


@functools.cache
def load_cluster(count: int, accumulator: str, blocks: int) -> Any:
    """``load(address)``: `count` neighbours in shared memory, each the sum over the cluster.

    Those of all blocks of a cluster, in the order of their ranks: mapa (9.7.9.23) and
    ld.shared::cluster (9.7.9.8).
    """
    llvm, numba = ACCUMULATORS[accumulator]
    letter, size = ("d", 64) if llvm == F64 else ("f", 32)
    names = ", ".join(f"${i}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    results = f"{{{names}}}" if count > 1 else names
    text = f"ld.shared::cluster{vector}.f{size} {results}, [${count}];"

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = builder.trunc(args[0], I32) if args[0].type.width > 32 else args[0]
            found = []
            for rank in range(blocks):
                at = emit(
                    builder, "mapa.shared::cluster.u32 $0, $1, $2;", "r", "rr", [own, I32(rank)]
                )
                values = emit(builder, text, letter * count, "r", [at], "memory")
                found.append([values] if count == 1 else values)
            total = found[0]
            for values in found[1:]:
                total = [builder.fadd(a, b) for a, b in zip(total, values, strict=True)]
            if count == 1:
                return total[0]
            return context.make_tuple(builder, signature.return_type, total)

        returned = numba if count == 1 else types.UniTuple(numba, count)
        return returned(types.int64), codegen

    return named("load_cluster", _key(count, accumulator, blocks), 1, typing)


#: 9.7.9.8, ld; 9.7.9.11, st; 9.7.9.1, cache operators: 16 bytes that are read, or written, once
load_words = instruction("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "l")
store_words = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr")

# --- masked loads and stores ----------------------------------------------------------------------
#: 9.7.9.8, ld; 9.7.9.9, ld.global.nc; 9.7.9.11, st: by space and width; where the predicate of a
#: global access does not hold, 0 is read and nothing is written
shared_load16 = instruction("{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }", "r", "r")
shared_store32 = instruction("st.shared.b32 [$0], $1;", "", "rr")
shared_load4_b32 = instruction("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r")
shared_load_f32 = instruction("ld.shared.f32 $0, [$1];", "f", "r")
shared_load2_f32 = instruction("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", "r")
shared_store_f32 = instruction("st.shared.f32 [$0], $1;", "", "rf")
global_load16 = instruction(
    "{ .reg .pred p; .reg .b16 t; setp.ne.b32 p, $2, 0; mov.b16 t, 0;"
    " @p ld.global.nc.b16 t, [$1]; cvt.u32.u16 $0, t; }",
    "r",
    "lp",
)
global_load32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
    "r",
    "lp",
)
global_load_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.f32 $0, [$1]; }",
    "f",
    "lp",
)
global_load2_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
    " @p ld.global.nc.v2.f32 {$0, $1}, [$2]; }",
    "ff",
    "lp",
)
global_load4_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
    " mov.b32 $3, 0; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
    "ffff",
    "lp",
)
global_store16 = instruction(
    "{ .reg .pred p; .reg .b16 t; cvt.u16.u32 t, $1; setp.ne.b32 p, $2, 0;"
    " @p st.global.b16 [$0], t; }",
    "",
    "lrp",
)
global_store4_b32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
    "",
    "lrrrrp",
)
global_store2_b32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.b32 [$0], {$1, $2}; }", "", "lrrp"
)
global_store_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }", "", "lfp"
)
global_store2_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.f32 [$0], {$1, $2}; }", "", "lffp"
)
global_store4_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.f32 [$0], {$1, $2, $3, $4}; }",
    "",
    "lffffp",
)
#: 9.7.9.15, prefetch: the line of 128 bytes around an address is brought to the second-level cache
prefetch = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "", "lp"
)


# --- copies to shared memory, not waited for ------------------------------------------------------
@functools.cache
def fetch(bytes_: int, partial: bool = False, ahead: str = ".L2::128B") -> Any:
    """``copy(shared, address)``: 4, 8 or 16 bytes to shared memory without a register between.

    cp.async (9.7.9.25.3.1); `partial`: ``copy(shared, address, count)``, of which the first `count`
    bytes are read and the others are zero (none is read where it is 0). 16 bytes go past level 1;
    `ahead` is what the second-level cache takes with them.
    """
    cache = "cg" if bytes_ == 16 else "ca"
    text = f"cp.async.{cache}.shared.global{ahead} [$0], [$1], {bytes_}"
    return instruction(text + (", $2;" if partial else ";"), "", "rlr" if partial else "rl")


@functools.cache
def fetch_wait(pending: int) -> Any:
    """cp.async.wait_group (9.7.9.25.3.3): at most so many of the latest groups are on their way."""
    return instruction(f"cp.async.wait_group {pending};")


#: 9.7.9.25.3.2, cp.async.commit_group: closes the group of this thread's copies
fetch_commit = instruction("cp.async.commit_group;")
fetch16 = fetch(16, partial=True, ahead="")
fetch_wait0, fetch_wait1 = fetch_wait(0), fetch_wait(1)

# --- barriers -------------------------------------------------------------------------------------
#: 9.7.13.1, bar.sync: all threads of the block; `count` threads at barrier number `which`
block_barrier = instruction("bar.sync 0;", kind="convergent")
group_barrier = instruction("bar.sync $0, $1;", "", "rr", "convergent")
#: 9.7.13.3, barrier.cluster: all threads of all blocks of the cluster, whose shared memory is then
#: seen by all of them
cluster_barrier = instruction(
    "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", kind="convergent"
)
#: 9.7.13.2, bar.warp.sync
warp_barrier = instruction("bar.warp.sync 0xffffffff;", kind="convergent")
#: 9.7.13.15, mbarrier: (address, arrivals of a phase)
barrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "", "rr")
#: makes initialised mbarriers visible to the copy engine (9.7.13.4, fence.mbarrier_init)
barrier_fence = instruction("fence.mbarrier_init.release.cluster;")
#: one arrival, and `bytes` that the copy engine will report
barrier_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "", "rr")
#: one arrival, if the predicate holds
barrier_arrive = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", "", "rp"
)
#: waits until the phase of this parity is over; ambiguous beyond one phase, as parity has one bit
barrier_wait = instruction(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
    " @p bra done; bra again; done: }",
    "",
    "rr",
    "convergent",
)

# --- one launch after the other -------------------------------------------------------------------
#: 9.7.13.13, griddepcontrol: the next launch may begin, where there is room for it
#: (`product.Launch.overlaps`); wait until the one before is over and all that it wrote is seen
grid_release = instruction("griddepcontrol.launch_dependents;")
grid_wait = instruction("griddepcontrol.wait;")

# --- registers of a group of warps ----------------------------------------------------------------
#: 9.7.19.5, setmaxnreg: 40 for the group that only issues copies; what it gives up serves two
#: groups of 128 threads with 232 each: (40 + 2 * 232) * 128 <= 65536
registers_few = instruction("setmaxnreg.dec.sync.aligned.u32 40;", kind="convergent")
registers_many = instruction("setmaxnreg.inc.sync.aligned.u32 232;", kind="convergent")

# --- the copy engine (TMA) ------------------------------------------------------------------------
#: 9.7.9.27.1.2, cp.async.bulk.tensor: a box of a tensor at (inner, outer, place) into shared
#: memory; the mbarrier counts its bytes. What lies outside the tensor is zero.
tensor_load = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$2, $3, $4}], [$5];",
    "",
    "rlrrrr",
)
#: ... and out of it: what lies outside is not written
tensor_store = instruction(
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3}], [$4];",
    "",
    "lrrrr",
)
#: 9.7.9.27.1.4, cp.async.bulk.prefetch.tensor: a box is brought to the second-level cache
tensor_prefetch = instruction(
    "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [$0, {$1, $2, $3}];", "", "lrrr"
)
#: 9.7.9.15, prefetch.tensormap: the map itself
map_prefetch = instruction("prefetch.tensormap [$0];", "", "l")
#: 9.7.9.27.2, groups of stores: close one; wait until at most 0 or 1 are still read
store_commit = instruction("cp.async.bulk.commit_group;")
store_wait_read0 = instruction("cp.async.bulk.wait_group.read 0;")
store_wait_read1 = instruction("cp.async.bulk.wait_group.read 1;")
#: 9.7.13.4, fence.proxy: what this thread wrote to shared memory is visible to the copy engine
copy_fence = instruction("fence.proxy.async.shared::cta;")

# --- matrices of a warp ---------------------------------------------------------------------------
#: 9.7.14.5.15, ldmatrix; 9.7.14.5.16, stmatrix: four 8 x 8 matrices of 16-bit values; lane l holds
#: the address of row l % 8 of matrix l // 8
matrix_load = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "rrrr", "r", "convergent"
)
matrix_store = instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "", "rrrrr", "convergent"
)


def load_matrix(builder: Any, address: Any, turned: bool) -> list[Any]:
    """ldmatrix.x4, .trans where `turned` (9.7.14.5.15): four 8 x 8 matrices of 16-bit values.

    Lanes 8 i to 8 i + 7 give the rows' addresses of matrix i.
    """
    trans = ".trans" if turned else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    # reads shared memory: ordered by the clobber after copies and barriers
    found: list[Any] = emit(builder, text, "rrrr", "r", [address], "convergent")
    return found


def _mma(builder: Any, text: str, d: str, a: str, b: str, args: list[Any]) -> list[Any]:
    """D = A B + D of one warp; letters are those of the fragments' registers."""
    n = [0]

    def group(letters: str) -> str:
        first = n[0]
        n[0] += len(letters)
        names = ", ".join(f"${i}" for i in range(first, n[0]))
        return f"{{{names}}}"

    text = f"{text} {group(d)}, {group(a)}, {group(b)}, {group(d)};"
    found: list[Any] = emit(builder, text, d, a + b + d, args, "warp")
    return found


def mma_half(builder: Any, dtype: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k16 of bf16 or f16, sums in f32 (9.7.14.5.8; 9.7.14.5.14)."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return _mma(builder, text, "ffff", "rrrr", "rr", [*a, *b, *c])


def mma_double(builder: Any, k: int, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k4, k8 or k16 of f64 (9.7.14.5.14): compute capability 9.0."""
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dddd", "d" * (k // 2), "d" * (k // 4), [*a, *b, *c])


def mma_double_small(builder: Any, a: Any, b: Any, c: list[Any]) -> list[Any]:
    """mma.m8n8k4 of f64 (9.7.14.5.1; 9.7.14.5.14): compute capability 8.0."""
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dd", "d", "d", [a, b, *c])


# --- matrices of a warp group, from shared memory -------------------------------------------------
#: 9.7.15.7.3, wgmma.wait_group: at most one group is in flight
multiply_wait1 = instruction("wgmma.wait_group.sync.aligned 1;", kind="convergent")


def _tied(text: str, count: int, extra: list[ir.Type], letters: list[str]) -> Any:
    """A function that emits `text` with an array's elements as operands read and written."""
    results = ir.LiteralStructType([F32] * count)
    function = ir.FunctionType(results, [F32] * count + extra)
    constraints = ["=f"] * count + [str(i) for i in range(count)] + letters + ["~{memory}"]
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=True)

    def issue(context: Any, builder: Any, kind: Any, array: Any, more: Any) -> Any:
        base = array_pointer(context, builder, kind, array)
        values = read_registers(builder, base, 0, count)
        made = builder.call(assembly, [*values, *more], attrs=("convergent",))
        found = [builder.extract_value(made, i) for i in range(count)]
        write_registers(builder, base, 0, found)
        return context.get_dummy_value()

    return issue


def multiply(
    columns: int,
    halves: int,
    kind: str,
    turned: tuple[int, int],
    steps: tuple[int, int],
    half: int,
    high: tuple[int, int],
) -> Any:
    """acc (+)= X Y of one slice of 128 bytes of K: one group of wgmma.mma_async (9.7.15.5).

    The intrinsic takes (acc, lower words of the descriptors of X and Y, whether to add to acc):
    acc is a local array of `halves` tiles of 64 x `columns`, of which a thread holds columns / 2
    values each.
    `kind`: "bf16", "f16" or "tf32". `turned`: 1 for an operand whose K is not the contiguous axis
    (the transpose bits; 16-bit kinds only). `steps`: bytes from one instruction's K (32 bytes
    of it) to the next; `half`: bytes between two tiles of 64 rows; `high`: the upper words of the
    descriptors.
    """
    each = columns // 2
    count = each * halves
    depth = 8 if kind == "tf32" else 16
    lines = [
        f"{{ .reg .pred p; .reg .b32 w; .reg .b64 dx, dy; setp.ne.b32 p, ${2 * count + 2}, 0;",
        # 9.7.15.7.1: orders the registers' last use before the tensor cores'
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        if step == 1:
            lines.append("setp.eq.b32 p, 0, 0;")
        lines.append(f"add.s32 w, ${2 * count + 1}, {step * steps[1] >> 4};")
        lines.append(f"mov.b64 dy, {{w, {high[1]}}};")
        for h in range(halves):
            values = ", ".join(f"${i}" for i in range(h * each, (h + 1) * each))
            lines.append(f"add.s32 w, ${2 * count}, {step * steps[0] + h * half >> 4};")
            lines.append(f"mov.b64 dx, {{w, {high[0]}}};")
            bits = "" if kind == "tf32" else f", {turned[0]}, {turned[1]}"
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"
                f" {{{values}}}, dx, dy, p, 1, 1{bits};"
            )
    # 9.7.15.7.2
    lines.append("wgmma.commit_group.sync.aligned; }")
    text = "\n".join(lines)
    issue = _tied(text, count, [I32] * 3, ["r"] * 3)

    def typing(typingctx: Any, acc: Any, x: Any, y: Any, add: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = [builder.trunc(argument, I32) for argument in arguments[1:3]]
            more = [*words, builder.zext(arguments[3], I32)]
            return issue(context, builder, signature.args[0], arguments[0], more)

        return types.void(acc, types.int64, types.int64, types.boolean), codegen

    return named("multiply", text, 4, typing)


def multiply_wait(count: int) -> Any:
    """Waits for all of wgmma (9.7.15.7.3); acc is an operand, so that no read moves above it."""
    text = "wgmma.wait_group.sync.aligned 0;"
    issue = _tied(text, count, [], [])

    def typing(typingctx: Any, acc: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return issue(context, builder, signature.args[0], arguments[0], [])

        return types.void(acc), codegen

    return named("multiply_wait", f"{text} {count}", 1, typing)
