"""Instructions of Hopper (compute capability 9.0, target sm_90a), one line of PTX each.

Sections are those of the PTX ISA 9.0.  Addresses in shared memory are 32-bit offsets into the
shared window, global addresses are 64-bit; both are signed integers here, since Numba makes a
float of int64 + uint64.  A `predicate` is a truth value: a masked access is one predicated
instruction and no branch, for a hundred branches in a body are more than Numba's compiler takes.

Three kinds of text: a function of its operands alone may be moved and merged by the compiler
(``pure``); one that reads or writes memory stays where it is; one that several threads execute
together is ``convergent``, and is never moved into or out of a branch.
"""

from __future__ import annotations

from typing import Any

from numfuse.backends.cuda.toolchain import intrinsic, ir, types

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LLVM = {"r": I32, "l": I64, "f": F32}
_TYPE = {"r": types.int32, "l": types.int64, "f": types.float32, "p": types.boolean}


def _assembly(text: str, results: str, operands: str, kind: str) -> Any:
    """(LLVM function type, InlineAsm, attributes of the call) of one text."""
    returned: ir.Type = ir.VoidType()
    if len(results) == 1:
        returned = _LLVM[results]
    elif results:
        returned = ir.LiteralStructType([_LLVM[r] for r in results])
    function = ir.FunctionType(returned, [_LLVM["r" if o == "p" else o] for o in operands])
    # a predicated load leaves its result as it was set before: never in an operand's register
    early = "&" if "p" in operands else ""
    constraints = [f"={early}{r}" for r in results] + [o.replace("p", "r") for o in operands]
    if kind != "pure":
        constraints.append("~{memory}")
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=kind != "pure")
    return assembly, ("convergent",) if kind == "convergent" else ()


def instruction(text: str, results: str = "", operands: str = "", kind: str = "memory") -> Any:
    """An intrinsic of one text of PTX.

    `results` and `operands` are letters: r (32-bit integer), l (64-bit integer), f (float32),
    p (truth value, in the text a 32-bit 0 or 1).  Several results are a tuple.
    """
    assembly, attributes = _assembly(text, results, operands, kind)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [
            builder.zext(a, I32) if o == "p" else a
            for o, a in zip(operands, arguments, strict=True)
        ]
        made = builder.call(assembly, values, attrs=attributes)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return made
        packed = ir.Constant(ir.ArrayType(_LLVM[results[0]], len(results)), ir.Undefined)
        for i in range(len(results)):
            packed = builder.insert_value(packed, builder.extract_value(made, i), i)
        return packed

    returned = types.void
    if len(results) == 1:
        returned = _TYPE[results]
    elif results:
        returned = types.UniTuple(_TYPE[results[0]], len(results))
    signature = returned(*[_TYPE[o] for o in operands])

    # Numba reads the number of arguments from the function itself
    names = ", ".join(f"a{i}" for i in range(len(operands)))
    scope = {"signature": signature, "codegen": codegen}
    exec(f"def made(context, {names}):\n    return signature, codegen\n", scope)
    made = intrinsic(scope["made"])
    made.numfuse_key = f"ptx({text})"
    return made


# --- who am I -------------------------------------------------------------------------------------

#: 10, Special Registers
thread_index = instruction("mov.u32 $0, %tid.x;", "r", kind="pure")
block_index = instruction("mov.u32 $0, %ctaid.x;", "r", kind="pure")
block_index_y = instruction("mov.u32 $0, %ctaid.y;", "r", kind="pure")
block_index_z = instruction("mov.u32 $0, %ctaid.z;", "r", kind="pure")
block_count = instruction("mov.u32 $0, %nctaid.x;", "r", kind="pure")
#: 9.7.1, div: of two non-negative numbers
quotient = instruction("div.u32 $0, $1, $2;", "r", "rr", "pure")


@intrinsic
def dynamic_shared(context: Any) -> Any:
    """Offset of the shared memory that the launch asks for (5.1.7, .extern .shared)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        module = builder.module
        if "dynamic_shared" in module.globals:
            window = module.globals["dynamic_shared"]
        else:
            window = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", 3)
            window.linkage, window.align = "external", 1024
        return builder.trunc(builder.ptrtoint(window, I64), I32)

    return types.int32(), codegen


# --- barriers -------------------------------------------------------------------------------------

#: 9.7.13.1, bar.sync: all threads of the block; `count` threads at barrier number `which`
block_barrier = instruction("bar.sync 0;", kind="convergent")
group_barrier = instruction("bar.sync $0, $1;", "", "rr", "convergent")
#: 9.7.13.4, barrier.cluster: all threads of all blocks of the cluster
cluster_barrier = instruction(
    "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", kind="convergent"
)
#: 10.22, %cluster_ctarank: the number of this block in its cluster
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", "r", "", "pure")
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
#: ... at the barrier of the same address in block number `rank` of the cluster (9.7.9.23, mapa)
barrier_arrive_at = instruction(
    "{ .reg .pred p; .reg .b32 there; setp.ne.b32 p, $2, 0;"
    " mapa.shared::cluster.u32 there, $0, $1;"
    " @p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }",
    "", "rrp",
)  # fmt: skip
#: waits until the phase of this parity is over; ambiguous beyond one phase, as parity has one bit
barrier_wait = instruction(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
    " @p bra done; bra again; done: }",
    "", "rr", "convergent",
)  # fmt: skip

# --- one launch after the other -------------------------------------------------------------------

#: griddepcontrol (parallel synchronization): the next launch may begin, where there is room for it
#: (`product.Launch.overlaps`); wait until the one before is over and all that it wrote is seen
grid_release = instruction("griddepcontrol.launch_dependents;")
grid_wait = instruction("griddepcontrol.wait;")

# --- registers ------------------------------------------------------------------------------------

#: 9.7.19.5, setmaxnreg: 40 for the group that only issues copies; what it gives up serves two
#: groups of 128 threads with 232 each: (40 + 2 * 232) * 128 <= 65536
registers_few = instruction("setmaxnreg.dec.sync.aligned.u32 40;", kind="convergent")
registers_many = instruction("setmaxnreg.inc.sync.aligned.u32 232;", kind="convergent")
#: 9.7.9.1, mov: x, of which the compiler knows nothing.  What is computed of it is computed there,
#: and not once before a loop: hundreds of addresses would not fit beside the accumulators.
fresh = instruction("mov.b32 $0, $1;", "r", "r")

# --- the copy engine (TMA) ------------------------------------------------------------------------

#: 9.7.9.27.1.2, cp.async.bulk.tensor: a box of a tensor at (inner, outer, place) into shared
#: memory; the mbarrier counts its bytes.  What lies outside the tensor is zero.
tensor_load = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [$0], [$1, {$2, $3, $4}], [$5];",
    "", "rlrrrr",
)  # fmt: skip
#: ... into the shared memory of both blocks of a cluster, to the same address; the mbarrier of each
#: counts the bytes that it gets
tensor_load_both = instruction(
    "{ .reg .b16 both; mov.b16 both, 3;"
    " cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [$0], [$1, {$2, $3, $4}], [$5], both; }",
    "", "rlrrrr",
)  # fmt: skip
#: ... and out of it: what lies outside is not written
tensor_store = instruction(
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3}], [$4];",
    "", "lrrrr",
)  # fmt: skip
#: 9.7.9.27.1.3, a box is brought to the second-level cache
tensor_prefetch = instruction(
    "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [$0, {$1, $2, $3}];", "", "lrrr"
)
#: 9.7.9.18, prefetch.tensormap: the map itself
map_prefetch = instruction("prefetch.tensormap [$0];", "", "l")
#: 9.7.9.25.4, groups of stores: close one; wait until at most 0, 1 or 3 are still read, or written
store_commit = instruction("cp.async.bulk.commit_group;")
store_wait_read0 = instruction("cp.async.bulk.wait_group.read 0;")
store_wait_read1 = instruction("cp.async.bulk.wait_group.read 1;")
store_wait_read3 = instruction("cp.async.bulk.wait_group.read 3;")
store_wait_all = instruction("cp.async.bulk.wait_group 0;")
#: 9.7.13.4, fence.proxy: what this thread wrote to shared memory is visible to the copy engine
copy_fence = instruction("fence.proxy.async.shared::cta;")

# --- the tensor cores (wgmma) ---------------------------------------------------------------------

#: 9.7.15.7.3, wgmma.wait_group: at most one group is in flight
multiply_wait1 = instruction("wgmma.wait_group.sync.aligned 1;", kind="convergent")


def _registers(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Address of the first element of a local array."""
    return context.make_array(kind)(context, builder, array).data


def _tied(text: str, count: int, extra: list[ir.Type], letters: list[str]) -> Any:
    """A function that emits `text` with an array's elements as operands read and written."""
    results = ir.LiteralStructType([F32] * count)
    function = ir.FunctionType(results, [F32] * count + extra)
    constraints = ["=f"] * count + [str(i) for i in range(count)] + letters + ["~{memory}"]
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=True)

    def emit(context: Any, builder: Any, kind: Any, array: Any, more: Any) -> Any:
        base = _registers(context, builder, kind, array)
        slots = [builder.gep(base, [ir.Constant(I32, i)]) for i in range(count)]
        values = [builder.load(slot) for slot in slots]
        made = builder.call(assembly, [*values, *more], attrs=("convergent",))
        for i, slot in enumerate(slots):
            builder.store(builder.extract_value(made, i), slot)
        return context.get_dummy_value()

    return emit


def multiply(columns: int, halves: int, kind: str, turned: tuple[int, int],
             steps: tuple[int, int], half: int) -> Any:  # fmt: skip
    """acc (+)= X Y of one slice of 128 bytes of K: one group of wgmma.mma_async (9.7.15.5).

    The intrinsic takes (acc, descriptor of X, of Y, whether to add to acc): acc is a local array
    of `halves` tiles of 64 x `columns`, of which a thread holds columns / 2 values each.
    `kind`: "bf16", "f16" or "tf32".  `turned`: 1 for an operand whose K is not the contiguous axis
    (the transpose bits; 16-bit kinds only).  `steps`: bytes from one instruction's K (32 bytes
    of it) to the next; `half`: bytes between two tiles of 64 rows.
    """
    each = columns // 2
    count = each * halves
    depth = 8 if kind == "tf32" else 16
    lines = [
        f"{{ .reg .pred p; .reg .b64 dx, dy; setp.ne.b32 p, ${2 * count + 2}, 0;",
        # 9.7.15.7.1: orders the registers' last use before the tensor cores'
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(4):
        if step == 1:
            lines.append("setp.eq.b32 p, 0, 0;")
        lines.append(f"add.s64 dy, ${2 * count + 1}, {step * steps[1] >> 4};")
        for h in range(halves):
            values = ", ".join(f"${i}" for i in range(h * each, (h + 1) * each))
            lines.append(f"add.s64 dx, ${2 * count}, {step * steps[0] + h * half >> 4};")
            bits = "" if kind == "tf32" else f", {turned[0]}, {turned[1]}"
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}"
                f" {{{values}}}, dx, dy, p, 1, 1{bits};"
            )
    # 9.7.15.7.2
    lines.append("wgmma.commit_group.sync.aligned; }")
    text = "\n".join(lines)
    emit = _tied(text, count, [I64, I64, I32], ["l", "l", "r"])

    @intrinsic
    def multiply_slice(context: Any, acc: Any, x: Any, y: Any, add: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            more = [arguments[1], arguments[2], builder.zext(arguments[3], I32)]
            return emit(context, builder, signature.args[0], arguments[0], more)

        return types.void(acc, types.int64, types.int64, types.boolean), codegen

    multiply_slice.numfuse_key = f"ptx({text})"
    return multiply_slice


def multiply_wait(count: int) -> Any:
    """Waits for all of wgmma (9.7.15.7.3); acc is an operand, so that no read moves above it."""
    text = "wgmma.wait_group.sync.aligned 0;"
    emit = _tied(text, count, [], [])

    @intrinsic
    def multiply_wait0(context: Any, acc: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(context, builder, signature.args[0], arguments[0], [])

        return types.void(acc), codegen

    multiply_wait0.numfuse_key = f"ptx({text} {count})"
    return multiply_wait0


def clear(count: int) -> Any:
    """acc[i] = 0 for each i below `count` (written out in Python, it takes Numba a second)."""

    @intrinsic
    def registers_clear(context: Any, acc: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = _registers(context, builder, signature.args[0], arguments[0])
            for i in range(count):
                builder.store(ir.Constant(F32, 0.0), builder.gep(base, [ir.Constant(I32, i)]))
            return context.get_dummy_value()

        return types.void(acc), codegen

    registers_clear.numfuse_key = f"clear {count}"
    return registers_clear


def add(count: int) -> Any:
    """total[i] += acc[i] for each i below `count`."""

    @intrinsic
    def registers_add(context: Any, total: Any, acc: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, of = (
                _registers(context, builder, kind, array)
                for kind, array in zip(signature.args, arguments, strict=True)
            )
            for i in range(count):
                slot = builder.gep(to, [ir.Constant(I32, i)])
                other = builder.load(builder.gep(of, [ir.Constant(I32, i)]))
                builder.store(builder.fadd(builder.load(slot), other), slot)
            return context.get_dummy_value()

        return types.void(total, acc), codegen

    registers_add.numfuse_key = f"add {count}"
    return registers_add


# --- between registers, shared and global memory --------------------------------------------------

#: 9.7.14.5.15/16, ldmatrix and stmatrix: four 8 x 8 matrices of 16-bit values; lane l holds the
#: address of row l % 8 of matrix l // 8
matrix_load = instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "rrrr", "r", "convergent"
)
matrix_store = instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "", "rrrrr", "convergent"
)
#: 9.7.9.8 and 9.7.9.11, ld and st, by space and width; masked: 0 is read, nothing written
shared_load16 = instruction("{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }", "r", "r")
shared_store32 = instruction("st.shared.b32 [$0], $1;", "", "rr")
shared_load4_b32 = instruction("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r")
shared_load_f32 = instruction("ld.shared.f32 $0, [$1];", "f", "r")
shared_load2_f32 = instruction("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", "r")
shared_store_f32 = instruction("st.shared.f32 [$0], $1;", "", "rf")
global_load16 = instruction(
    "{ .reg .pred p; .reg .b16 t; setp.ne.b32 p, $2, 0; mov.b16 t, 0;"
    " @p ld.global.nc.b16 t, [$1]; cvt.u32.u16 $0, t; }",
    "r", "lp",
)  # fmt: skip
global_load32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
    "r", "lp",
)  # fmt: skip
global_load_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.f32 $0, [$1]; }",
    "f", "lp",
)  # fmt: skip
global_load2_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
    " @p ld.global.nc.v2.f32 {$0, $1}, [$2]; }",
    "ff", "lp",
)  # fmt: skip
global_load4_f32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
    " mov.b32 $3, 0; @p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; }",
    "ffff", "lp",
)  # fmt: skip
global_store16 = instruction(
    "{ .reg .pred p; .reg .b16 t; cvt.u16.u32 t, $1; setp.ne.b32 p, $2, 0;"
    " @p st.global.b16 [$0], t; }",
    "", "lrp",
)  # fmt: skip
global_store4_b32 = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
    "", "lrrrrp",
)  # fmt: skip
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
    "", "lffffp",
)  # fmt: skip

#: cp.async: 16 bytes from global to shared memory without a register between; `bytes` of them are
#: read (16, or 0 where the address is outside), the others are zero.  Groups: close one; wait until
#: at most 0 or 1 are in flight
fetch16 = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", "", "rlr")
fetch_commit = instruction("cp.async.commit_group;")
fetch_wait0 = instruction("cp.async.wait_group 0;")
fetch_wait1 = instruction("cp.async.wait_group 1;")
#: prefetch: the line of 128 bytes around an address is brought to the second-level cache
prefetch = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "", "lp"
)

# --- values ---------------------------------------------------------------------------------------

#: 9.7.9.22, cvt: two float32 rounded to nearest even in one word, the first in its low half
#: (the instruction names the high half first); and back.  {format: (pack, low half, high half)}
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
#: 9.7.9.22, cvt.rna: the nearest tf32, halves away from zero, in a float32's bits
round_tf32 = instruction(
    "{ .reg .b32 t; cvt.rna.tf32.f32 t, $1; mov.b32 $0, t; }", "f", "f", "pure"
)
#: 9.7.9.6, shfl.sync.bfly: the value of the lane whose number differs in the bits of `mask`
shuffle_xor = instruction(
    "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "f", "fr", "convergent"
)
#: a float32 of these bits, and the bits of one
from_bits = instruction("mov.b32 $0, $1;", "f", "r", "pure")
to_bits = instruction("mov.b32 $0, $1;", "r", "f", "pure")
#: 9.7.7.8, selp: one of two values, without a branch
select = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p; }", "f", "ffp", "pure"
)
