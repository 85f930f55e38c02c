"""PTX as Python functions: the only place where an instruction is written by hand.

Each is a line of PTX, with the section of the PTX ISA (version 9.0) that defines it. `instruction`
makes an intrinsic of one text, `intrinsic_of` one of several, which `emit` writes. They trust their
caller: addresses are valid and aligned to the access.

Addresses and strides are ``int64``: Numba turns a sum of unsigned and signed 64-bit integers into a
float. Addresses of shared memory are offsets of its window, 32 bits that travel as ``int64`` or
``int32``. A *predicate* is a truth value: a masked access is one predicated instruction and no
branch, for a hundred branches in a body are more than Numba's compiler takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from numfuse.backends.cuda.compile.toolchain import intrinsic, ir, types

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
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
    "u": (I64, types.uint64),
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
#: {dtype in registers: its letter}
ACCUMULATORS = {"float32": "f", "float64": "d", "int32": "r"}
GLOBAL, SHARED = 1, 3


def itemsize(dtype: str) -> int:
    return FORMATS[dtype][1]


def intrinsic_of(
    name: str, key: str, operands: str, body: Callable[..., Any], results: str = ""
) -> Any:
    """The intrinsic that emits ``body(builder, *operands)`` and returns the LLVM values of that.

    There is a letter for each operand and result: of `LETTERS`, or "x", a float of any type, which
    all have that are named so; of operands also "a", a local array: where it begins, and "n", a
    literal: its number. Several results, of one type, are a list of the body and a tuple. `key`
    tells intrinsics of one name apart.
    """

    def typing(typingctx: Any, *given: Any) -> Any:
        pairs = list(zip(operands, given, strict=True))
        if any(kind == "n" and not isinstance(ty, types.IntegerLiteral) for kind, ty in pairs):
            return None
        known = {letter: ty for letter, (_, ty) in LETTERS.items()}
        known |= {kind: ty for kind, ty in reversed(pairs) if kind == "x"}

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for (kind, ty), value in zip(pairs, args, strict=True):
                if kind == "a":
                    value = context.make_array(ty)(context, builder, value).data
                values.append(ty.literal_value if kind == "n" else value)
            made = body(builder, *values)
            if len(results) > 1:
                return context.make_tuple(builder, signature.return_type, made)
            if not results:
                return context.get_dummy_value()
            return made[0] if isinstance(made, list) else made

        returned = known[results[0]] if results else types.void
        if len(results) > 1:
            returned = types.UniTuple(returned, len(results))
        return returned(*(known.get(kind, ty) for kind, ty in pairs)), codegen

    typing.__name__ = name
    # Numba folds the arguments of a call by the signature, and cannot fold into *args.
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["typingctx", *(f"arg{i}" for i in range(len(operands)))]
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in names]
    )
    made: Any = intrinsic(typing)
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

    def body(builder: Any, *values: Any) -> Any:
        return emit(builder, text, results, operands, values, kind)

    return intrinsic_of("ptx", f"{text} {results} {operands} {kind}", operands, body, results)


# A local array as an operand. Elements at constant indices become registers.
def _element(builder: Any, pointer: Any, i: int) -> Any:
    return builder.gep(pointer, [I32(i)])


def read_registers(builder: Any, pointer: Any, first: int, count: int) -> list[Any]:
    return [builder.load(_element(builder, pointer, first + i)) for i in range(count)]


def write_registers(builder: Any, pointer: Any, first: int, values: list[Any]) -> None:
    for i, value in enumerate(values):
        builder.store(value, _element(builder, pointer, first + i))


# --- special registers, addresses of shared memory ------------------------------------------------
#: 10, %tid, %ctaid, %nctaid: this thread in its block, this block in its grid
thread_index = instruction("mov.u32 $0, %tid.x;", "r", kind="pure")
block_index = instruction("mov.u32 $0, %ctaid.x;", "r", kind="pure")
block_index_y = instruction("mov.u32 $0, %ctaid.y;", "r", kind="pure")
block_index_z = instruction("mov.u32 $0, %ctaid.z;", "r", kind="pure")
#: (asked again each time: a register to keep it is one too many)
block_count = instruction("mov.u32 $0, %nctaid.x;", "r")


def _shared_address(builder: Any, array: Any) -> Any:
    address = [builder.ptrtoint(array, I64)]
    return builder.trunc(emit(builder, "cvta.to.shared.u64 $0, $1;", "l", "l", address), I32)


#: 9.7.9.20, cvta.to.shared: where a `cuda.shared.array` begins
shared_address = intrinsic_of("shared_address", "", "a", _shared_address, "r")


def _dynamic_shared(builder: Any) -> Any:
    module = builder.module
    if "dynamic_shared" in module.globals:
        window = module.globals["dynamic_shared"]
    else:
        window = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", 3)
        window.linkage, window.align = "external", 1024
    return builder.trunc(builder.ptrtoint(window, I64), I32)


#: 5.1.7, .extern .shared: where the shared memory begins that the launch asks for
dynamic_shared = intrinsic_of("dynamic_shared", "", "", _dynamic_shared, "r")
#: ... of an array of no length, which begins there, aligned to 1 KiB: in `shared_address`'s place
dynamic_shared_of = intrinsic_of(
    "dynamic_shared_of", "", "a", lambda builder, array: _dynamic_shared(builder), "r"
)

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
#: and not once before a loop: hundreds of addresses would not fit beside the accumulators. And x
#: itself is computed before, not where it is used.
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
    """1 / x by rcp.approx (9.7.3.13, 9.7.3.14) and fma, without a branch; x and 1 / x normal.

    A division (9.7.3.8) is as many instructions and a branch for all other numbers, and a compiler
    mixes nothing across a branch: each division of a block's epilogue waits for the one before.
    float32's start is right to a unit in the last place, so what the step gives is rounded
    correctly, but for a significand of ones alone (Markstein 1990), which wants a start that is not
    below 1 / x. float64's start is right to 20 bits; a step of the third order, whose error is the
    cube of the start's, takes it to where the last one rounds correctly (a significand of ones
    alone, one in 2^52, gives the neighbour below).
    """
    one, minus = x.type(1.0), builder.fsub(x.type(-0.0), x)
    if x.type == F32:
        start = approximate(builder, "rcp", x)
    else:
        start = emit(builder, "rcp.approx.ftz.f64 $0, $1;", "d", "d", [x])
        error = fused(builder, minus, start, one)
        start = fused(builder, start, fused(builder, error, error, error), start)
    return fused(builder, start, fused(builder, minus, start, one), start)


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
#: 9.7.9.6, shfl.sync.idx: the value of a lane. Of a thread's own it is what it was, which the
#: assembler does not know: it is computed there, and what is added to it is an offset of an access
value_of_lane = instruction(
    "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "r", "rr", "convergent"
)
#: 9.7.6.3, selp: one of two values, without a branch
select = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p; }", "f", "ffp", "pure"
)

# --- barriers -------------------------------------------------------------------------------------
#: 9.7.13.1, bar.sync: all threads of the block; `count` threads at barrier number `which`
block_barrier = instruction("bar.sync 0;", kind="convergent")
group_barrier = instruction("bar.sync $0, $1;", "", "rr", "convergent")
#: 9.7.13.1, bar.red.or: the same, and 1 for all if any of them brings a truth, else 0
group_any = instruction(
    "{ .reg .pred p, q; setp.ne.b32 p, $3, 0;"
    " bar.red.or.pred q, $1, $2, p; selp.s32 $0, 1, 0, q; }",
    "r", "rrp", "convergent",
)  # fmt: skip
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
