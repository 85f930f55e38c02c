"""Tensor cores, the copy engine and launches that overlap: what newer devices have beside cores.

Each intrinsic is a line of PTX (`intrinsics`), with its section of the PTX ISA 9.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numfuse.backends.cuda.compile.intrinsics import (
    F32,
    I32,
    emit,
    instruction,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import ir

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


def registers_of(count: int, more: bool) -> Any:
    """``registers()``: a group's threads have so many from here on, more or fewer than before."""
    how = "inc" if more else "dec"
    return instruction(f"setmaxnreg.{how}.sync.aligned.u32 {count};", kind="convergent")


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
#: 9.7.9.15, prefetch: the line of an address is brought to the second-level cache
line_prefetch = instruction("prefetch.global.L2 [$0];", "", "l")
#: 9.7.13.4, fence.proxy: what this thread wrote to shared memory is visible to the copy engine
copy_fence = instruction("fence.proxy.async.shared::cta;")


# --- matrices of a warp ---------------------------------------------------------------------------
def store_matrix(
    builder: Any, address: Any, words: Sequence[Any], turned: bool = False, more: int = 0
) -> None:
    """stmatrix.x4, .trans where `turned` (9.7.14.5.16): four 8 x 8 matrices of 16-bit values.

    Lane l gives the address of row l % 8 of matrix l // 8, which is `more` bytes further.
    """
    trans = ".trans" if turned else ""
    at = f"[$0+{more}]" if more else "[$0]"
    text = f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {at}, {{$1, $2, $3, $4}};"
    emit(builder, text, "", "rrrrr", [address, *words], "convergent")


#: `store_matrix`, and the same turned
matrix_store = intrinsic_of(
    "matrix_store", "", "rrrrr", lambda builder, at, *words: store_matrix(builder, at, words)
)
matrix_store_turned = intrinsic_of(
    "matrix_store", "turned", "rrrrr",
    lambda builder, at, *words: store_matrix(builder, at, words, True),
)  # fmt: skip


def load_matrix(builder: Any, address: Any, turned: bool, more: int = 0) -> list[Any]:
    """ldmatrix.x4, .trans where `turned` (9.7.14.5.15): four 8 x 8 matrices of 16-bit values.

    Lanes 8 i to 8 i + 7 give the rows' addresses of matrix i, which are `more` bytes further.
    """
    trans = ".trans" if turned else ""
    at = f"[$4+{more}]" if more else "[$4]"
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, {at};"
    # reads shared memory: ordered by the clobber after copies and barriers
    found: list[Any] = emit(builder, text, "rrrr", "r", [address], "convergent")
    return found


#: `load_matrix`, not turned and turned
matrix_load = intrinsic_of(
    "matrix_load", "", "r", lambda builder, at: load_matrix(builder, at, False), "rrrr"
)
matrix_load_turned = intrinsic_of(
    "matrix_load", "turned", "r", lambda builder, at: load_matrix(builder, at, True), "rrrr"
)


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


def mma_tf32(builder: Any, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k8 of tf32 (9.7.14.5.6; 9.7.14.5.14), of words that `round_tf32` gives."""
    text = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    return _mma(builder, text, "ffff", "rrrr", "rr", [*a, *b, *c])


def mma_double(builder: Any, k: int, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k4, k8 or k16 of f64 (9.7.14.5.14): compute capability 9.0."""
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dddd", "d" * (k // 2), "d" * (k // 4), [*a, *b, *c])


def mma_double_small(builder: Any, a: Any, b: Any, c: list[Any]) -> list[Any]:
    """mma.m8n8k4 of f64 (9.7.14.5.1; 9.7.14.5.14): compute capability 8.0."""
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    return _mma(builder, text, "dd", "d", "d", [a, b, *c])


def _multiply_add(builder: Any, acc: Any, first: int, *factors: Any) -> None:
    """mma.m16n8k32 of s8, sums in s32 (9.7.14.5.10; 9.7.14.5.14): compute capability 8.0."""
    text = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    sums = read_registers(builder, acc, first, 4)
    made = _mma(builder, text, "rrrr", "rrrr", "rr", [*factors, *sums])
    write_registers(builder, acc, first, made)


#: ``multiply_add(acc, first, a, a, a, a, b, b)``: four int32 of a local array, from `first` on
multiply_add_s8 = intrinsic_of("multiply_add_s8", "", "anrrrrrr", _multiply_add)

# --- matrices of a warp group, from shared memory -------------------------------------------------
#: 9.7.15.7.3, wgmma.wait_group: at most one group is in flight
multiply_wait1 = instruction("wgmma.wait_group.sync.aligned 1;", kind="convergent")


#: Of wgmma, by the kind of its operands where it is not 16 bits wide and sums are no float32:
#: values of K in 32 bytes; type of the sums, their LLVM type and the letter of their registers.
_DEPTHS = {"tf32": 8, "s8": 32}
_SUMS = {"s8": ("s32", I32, "r")}
_FLOATS = "f32", F32, "f"


#: Registers of an array that an instruction reads and writes: the array, the first one, how many.
Registers = tuple[Any, int, int]


def _tied(
    builder: Any, text: str, parts: Sequence[Registers], kind: str, more: Sequence[Any] = ()
) -> None:
    """Emit `text`, which reads and writes parts of arrays in this order, and reads words `more`."""
    _, value, letter = _SUMS.get(kind, _FLOATS)
    count = sum(n for _, _, n in parts)
    results = ir.LiteralStructType([value] * count)
    function = ir.FunctionType(results, [value] * count + [I32] * len(more))
    constraints = [f"={letter}"] * count + [str(i) for i in range(count)] + ["r"] * len(more)
    assembly = ir.InlineAsm(function, text, ",".join([*constraints, "~{memory}"]), side_effect=True)
    values = [y for array, first, n in parts for y in read_registers(builder, array, first, n)]
    made = builder.call(assembly, [*values, *more], attrs=("convergent",))
    found = [builder.extract_value(made, i) for i in range(count)]
    for array, first, n in parts:
        write_registers(builder, array, first, found[:n])
        found = found[n:]


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
    `kind`: "bf16", "f16", "tf32" or "s8", whose sums are int32. `turned`: 1 for an operand whose K
    is not the contiguous axis (the transpose bits; 16-bit kinds only). `steps`: bytes from one
    instruction's K (32 bytes of it) to the next; `half`: bytes between two tiles of 64 rows;
    `high`: the upper words of the descriptors.
    """
    each = columns // 2
    count = each * halves
    depth, sums = _DEPTHS.get(kind, 16), _SUMS.get(kind, _FLOATS)[0]
    # signs of the operands, of floats; whether they are turned, of 16 bits
    bits = ", 1, 1" if sums == "f32" else ""
    bits += f", {turned[0]}, {turned[1]}" if depth == 16 else ""
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
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{sums}.{kind}.{kind}"
                f" {{{values}}}, dx, dy, p{bits};"
            )
    # 9.7.15.7.2
    lines.append("wgmma.commit_group.sync.aligned; }")
    text = "\n".join(lines)

    def body(builder: Any, acc: Any, x: Any, y: Any, add: Any) -> None:
        words = [builder.trunc(x, I32), builder.trunc(y, I32), builder.zext(add, I32)]
        _tied(builder, text, [(acc, 0, count)], kind, words)

    return intrinsic_of("multiply", text, "allp", body)


def _descriptor(name: str, word: int, offset: int, high: int) -> list[str]:
    """Return what makes a descriptor of a lower word among the operands, so many bytes further."""
    return [f"add.s32 w, ${word}, {offset >> 4};", f"mov.b64 {name}, {{w, {high}}};"]


def _operands(first: int, count: int) -> str:
    """Return operands one behind the other."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def _half_product(kind: str, columns: int, first: int, x: str, bits: str) -> str:
    """Return wgmma.mma_async.m64nNk16 of 16 bits, of which the first sum is an operand (9.7.15.5).

    `x` is a descriptor or registers; `bits` say of each descriptor whether it is turned.
    """
    sums = _operands(first, columns // 2)
    return (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
        f" {sums}, {x}, dy, p, 1, 1{bits};"
    )


def multiply_registers(
    columns: int, products: Sequence[tuple[int, int]], turned: bool, high: int
) -> Any:
    """acc (+)= a sum of products of X in registers: one group of wgmma.mma_async.m64nNk16 of bf16.

    The intrinsic takes (acc, words, lower word of Y's descriptor, whether to add to acc). Each of
    `products` is the first of four words, a fragment as of mma.m16n8k16, and how many bytes behind
    the descriptor its Y begins.  Nothing waits: neither acc nor the words may be written before a
    wait.  `turned`, `high`: whether K is not Y's contiguous axis; its descriptor's upper word.
    """
    count, words = columns // 2, max(first for first, _ in products) + 4
    more = 2 * count
    lines = [
        f"{{ .reg .pred p; .reg .b32 w; .reg .b64 dy; setp.ne.b32 p, ${more + words + 1}, 0;",
        # 9.7.15.7.1: orders the registers' last use before the tensor cores'
        "wgmma.fence.sync.aligned;",
    ]
    for number, (first, offset) in enumerate(products):
        if number == 1:
            lines.append("setp.eq.b32 p, 0, 0;")
        lines += _descriptor("dy", more + words, offset, high)
        x = _operands(more + first, 4)
        lines.append(_half_product("bf16", columns, 0, x, f", {int(turned)}"))
    # 9.7.15.7.2
    text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    def body(builder: Any, acc: Any, given: Any, y: Any, add: Any) -> None:
        own = read_registers(builder, given, 0, words)
        both = builder.trunc(y, I32), builder.zext(add, I32)
        _tied(builder, text, [(acc, 0, count)], "bf16", [*own, *both])

    return intrinsic_of("multiply_registers", text, "aalp", body)


@dataclass(frozen=True)
class Factor:
    """A factor of `group_product` in shared memory: how its descriptors are made."""

    #: Whether K is not its contiguous axis.
    turned: bool
    #: Bytes from where it begins to the K of each instruction.
    steps: tuple[int, ...]
    #: The upper word of its descriptors.
    high: int


@dataclass(frozen=True)
class GroupProduct:
    """sums (+)= X Y of a warp group's 64 rows, by wgmma.mma_async.m64nNk16 (9.7.15.5)."""

    columns: int
    #: X: None where it is in registers, four words for each instruction, which are fragments as
    #: those of mma.m16n8k16.
    left: Factor | None
    right: Factor
    #: Whether it is added to what the sums are before; else they begin with 0.
    added: bool

    @property
    def sums(self) -> int:
        """Return how many sums a thread has."""
        return self.columns // 2

    @property
    def words(self) -> int:
        """Return the words that stand for X: registers, or the lower one of its descriptor."""
        return 4 * len(self.right.steps) if self.left is None else 1

    def lines(self, kind: str, first: int, word: int) -> list[str]:
        """Return the instructions: sums are operands from `first`, words of X, then Y, from `word`.

        `kind`: "bf16" or "f16".
        """
        found = [f"setp.ne.b32 p, {int(self.added)}, 0;"]
        for step, y_step in enumerate(self.right.steps):
            if step == 1:
                found.append("setp.eq.b32 p, 0, 0;")
            found += _descriptor("dy", word + self.words, y_step, self.right.high)
            bits = f", {int(self.right.turned)}"
            if self.left is None:
                x = _operands(word + 4 * step, 4)
            else:
                found += _descriptor("dx", word, self.left.steps[step], self.left.high)
                x, bits = "dx", f", {int(self.left.turned)}{bits}"
            found.append(_half_product(kind, self.columns, first, x, bits))
        return found


def _group_text(kind: str, products: Sequence[tuple[GroupProduct, int]], count: int) -> str:
    """Return one group of instructions for products, and the wait for it.

    Each product goes with the first of its sums, of which there are `count`. Nothing is in flight
    behind the text: ptxas lets no register of it be touched there, and waits itself where it does
    not see that.
    """
    lines = [
        "{ .reg .pred p; .reg .b32 w; .reg .b64 dx, dy;",
        # 9.7.15.7.1: orders the registers' last use before the tensor cores'
        "wgmma.fence.sync.aligned;",
    ]
    word = 2 * count
    for p, first in products:
        lines += p.lines(kind, first, word)
        word += p.words + 1
    # 9.7.15.7.2; 9.7.15.7.3
    ends = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"
    return "\n".join([*lines, *ends])


def group_product(kind: str, p: GroupProduct) -> Any:
    """``multiply(sums, x, y)``: a product, which is waited for.

    x is an array of words, or the lower word of the descriptor; y is that of Y's.
    """
    text = _group_text(kind, [(p, 0)], p.sums)

    def body(builder: Any, sums: Any, x: Any, y: Any) -> None:
        given = read_registers(builder, x, 0, p.words) if p.left is None else [x]
        _tied(builder, text, [(sums, 0, p.sums)], kind, [*given, y])

    return intrinsic_of("group_product", text, "aar" if p.left is None else "arr", body)


def group_products(
    kind: str,
    products: Sequence[tuple[GroupProduct, int]],
    others: Sequence[tuple[GroupProduct, int]],
) -> Any:
    """``multiply(sums, first, more, second, words)``: products that are waited for together.

    Each of `products` has its sums in `sums`, from the one that it goes with behind the `first`;
    `others` in `more`, behind the `second`. Words are the lower ones of X's and Y's descriptors, of
    one product after the other.
    """
    count, extra = (max((at + p.sums for p, at in own), default=0) for own in (products, others))
    every = [*products, *((p, count + at) for p, at in others)]
    text = _group_text(kind, every, count + extra)

    def body(builder: Any, sums: Any, first: int, more: Any, second: int, words: Any) -> None:
        given = read_registers(builder, words, 0, 2 * len(every))
        _tied(builder, text, [(sums, first, count), (more, second, extra)], kind, given)

    return intrinsic_of("group_products", text, "anana", body)


@dataclass(frozen=True)
class PartProduct:
    """One wgmma.mma_async.m64nNk16 of `group_parts`: the first of its sums, its X and its Y."""

    sums: int
    #: The first of four words, or bytes behind X's descriptor.
    x: int
    #: Bytes behind Y's descriptor.
    y: int


def group_parts(
    columns: int,
    count: int,
    products: Sequence[PartProduct],
    left: tuple[bool, int] | None,
    right: tuple[bool, int],
    waits: bool = True,
) -> Any:
    """``multiply(sums, x, y)``: products of bfloat16 are added to `count` sums.

    They are waited for, or (`waits` False) no sum may be touched before `multiply_wait`. A factor
    is whether K is not its contiguous axis, and the upper word of its descriptors; `left` None: x
    is an array of words, fragments as those of mma.m16n8k16. Else x, like y, is the lower word of
    the descriptor (9.7.15.5).
    """
    words = max(p.x for p in products) + 4 if left is None else 1
    lines = [
        "{ .reg .pred p; .reg .b32 w; .reg .b64 dx, dy; setp.eq.b32 p, 0, 0;",
        # 9.7.15.7.1: orders the registers' last use before the tensor cores'
        "wgmma.fence.sync.aligned;",
    ]
    for p in products:
        lines += _descriptor("dy", 2 * count + words, p.y, right[1])
        bits = f", {int(right[0])}"
        if left is None:
            x = _operands(2 * count + p.x, 4)
        else:
            lines += _descriptor("dx", 2 * count, p.x, left[1])
            x, bits = "dx", f", {int(left[0])}{bits}"
        lines.append(_half_product("bf16", columns, p.sums, x, bits))
    # 9.7.15.7.2; 9.7.15.7.3
    wait = ["wgmma.wait_group.sync.aligned 0;"] * waits
    text = "\n".join([*lines, "wgmma.commit_group.sync.aligned;", *wait, "}"])

    def body(builder: Any, sums: Any, x: Any, y: Any) -> None:
        given = read_registers(builder, x, 0, words) if left is None else [x]
        _tied(builder, text, [(sums, 0, count)], "bf16", [*given, y])

    return intrinsic_of("group_parts", text, "aar" if left is None else "arr", body)


def multiply_wait(count: int, kind: str) -> Any:
    """Waits for all of wgmma (9.7.15.7.3); acc is an operand, so that no read moves above it."""
    text = "wgmma.wait_group.sync.aligned 0;"

    def body(builder: Any, acc: Any) -> None:
        _tied(builder, text, [(acc, 0, count)], kind)

    return intrinsic_of("multiply_wait", f"{text} {count} {kind}", "a", body)
