"""The kernels: what each binds, and its WGSL text.

A kernel is a frozen description; equal descriptions are one pipeline (`device.Device.pipeline`).
`text()` is the whole module, to be read or to be given to another tool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.backends.webgpu.tiling import WebGpuTile
from numfuse.expr import Expr, Keyed
from numfuse.language import wgsl

__all__ = [
    "COPY_AXES",
    "TYPES",
    "Copy",
    "Gated",
    "Gemm",
    "Join",
    "Operand",
    "Rounding",
    "Subnormals",
]

#: {storage dtype: its WGSL type}.
TYPES = {"float32": "f32", "float64": "f64", "float16": "f16"}
#: Axes of a strided copy; longer shapes are cut.
COPY_AXES = 4


@dataclass(frozen=True)
class Operand:
    """How a kernel reads or writes one of its arrays."""

    dtype: str
    #: Four neighbours at a time: its contiguous axis has a length, and all else lies, in fours.
    wide: bool = False
    #: Of a factor: its axis of K is the contiguous one.
    turned: bool = False

    @property
    def element(self) -> str:
        return TYPES[self.dtype]

    @property
    def binding(self) -> str:
        return f"vec4<{self.element}>" if self.wide else self.element

    def __str__(self) -> str:
        return f"{self.element}{'x4' if self.wide else ''}{'t' if self.turned else ''}"


class _Array:
    """An array as the template sees it."""

    def __init__(self, name: str, operand: Operand) -> None:
        self.NAME, self.WIDE = name, operand.wide
        self.TYPE, self.STRIDE = operand.element, f"{name}_column"


class _Factor:
    """A factor of a product as the template sees it."""

    def __init__(self, name: str, operand: Operand, block: int, tile: WebGpuTile) -> None:
        row = name == "x"
        self.NAME, self.WIDE, self.TURNED, self.BLOCK = name, operand.wide, operand.turned, block
        self.ORIGIN, self.LENGTH = ("row0", "m") if row else ("column0", "n")
        self.STRIDE_O = "x_row" if row else "y_column"
        self.STRIDE_K = "x_column" if row else "y_row"
        # pieces to fetch: squares of 4 x 4 where turned, else runs of four outputs
        depth = tile.block_k // 4 if operand.turned else tile.block_k
        pieces = block // 4 * depth
        self.LOADS = -(-pieces // tile.invocations)
        self.IF_IN_TILE, self.END_IN_TILE = [], []
        for i in range(self.LOADS):
            partial = (i + 1) * tile.invocations > pieces
            inside = f"{name}_k{i} < {tile.block_k}u && {name}_o{i} < {block // 4}u"
            self.IF_IN_TILE.append(f"if ({inside}) {{" if partial else "")
            self.END_IN_TILE.append("}" if partial else "")


def _functions(graph: Expr | None, name: str, dtype: str, one_rounding: bool) -> str:
    if graph is None:
        return ""
    text = wgsl.function(graph, name, dtype)
    return f"{wgsl.prelude(text, dtype, one_rounding)}\n\n{text}\n"


#: The bits of the exponent, all of which an infinity and a NaN have, and the type of a word.
_EXPONENTS = {"f32": ("0x7f800000u", "u32"), "f64": ("0x7ff0000000000000lu", "u64")}


def _guarded(name: str, accumulator: str) -> str:
    """A derivative that is not finite counts as 0; found on the bits, as no comparison may."""
    mask, word = _EXPONENTS[accumulator]
    return (
        f"fn {name}_guarded(x: {accumulator}) -> {accumulator} {{\n"
        f"    let value = {name}(x);\n"
        f"    return select(value, {accumulator}(), (bitcast<{word}>(value) & {mask}) == {mask});\n"
        f"}}\n"
    )


class Kernel:
    """The base of kernels: a label for errors, buffers in the order of their bindings, a text."""

    label: str
    #: (name, WGSL type of an element, "read" or "read_write"), from binding 1 on.
    buffers: tuple[tuple[str, str, str], ...]

    def text(self) -> str:
        raise NotImplementedError

    def _buffers(self) -> list[tuple[int, str, str, str]]:
        return [(i + 1, *buffer) for i, buffer in enumerate(self.buffers)]


def _enable(types: Any) -> str:
    return "enable f16;" if any("f16" in name for name in types) else ""


@dataclass(frozen=True, eq=False)
class Gemm(Keyed, Kernel):
    """act(X Y + bias) + residual, grad * act'(X Y + bias), or the bare product."""

    tile: WebGpuTile
    accumulator: str
    #: None for both: the epilogue alone, on a saved pre-activation, or on grad.
    x: Operand | None
    y: Operand | None
    bias: Operand | None = None
    #: The residual, or grad.
    extra: Operand | None = None
    pre: Operand | None = None
    pre_is_read: bool = False
    out: Operand | None = None
    #: The activation or its derivative; None for the identity (the derivative of which is 1).
    function: Expr | None = None
    slope: bool = False
    guard: bool = False
    column_sums: bool = False
    places: bool = False
    segments: bool = False
    #: Whether the result is a stack of planes to be joined.
    planes: bool = False
    #: Whether the device's fma rounds once.
    one_rounding: bool = False

    @cached_property
    def label(self) -> str:  # type: ignore[override]
        what = "grad_pre" if self.slope else "product" if self.function is None else "forward"
        t = self.tile
        return (
            f"gemm {what} {self.x or '-'}.{self.y or '-'}->{self.out or '-'} "
            f"{t.block_m}x{t.block_n}x{t.block_k}"
        )

    @cached_property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        pre = "read" if self.pre_is_read else "read_write"
        named = (
            ("x", self.x, "read"),
            ("y", self.y, "read"),
            ("bias", self.bias, "read"),
            ("extra", self.extra, "read"),
            ("pre", self.pre, pre),
            ("out", self.out, "read_write"),
        )
        found = [(name, o.binding, access) for name, o, access in named if o is not None]
        if self.column_sums:
            found.append(("column_sums", TYPES[self.accumulator], "read_write"))
        if self.places:
            found.append(("places", "Place", "read"))
        return tuple(found)

    def text(self) -> str:
        t = self.tile
        acc = TYPES[self.accumulator]
        name = "" if self.function is None else "slope" if self.slope else "act"
        functions = _functions(self.function, name, self.accumulator, self.one_rounding)
        if self.guard and name:
            functions += "\n" + _guarded(name, acc)
            name += "_guarded"
        columns, rows = t.block_n // t.nr, t.block_m // t.mr
        if columns % 8 == 0 and rows % 4 == 0:
            # 32 invocations, which many devices run together, as 8 x 4: fewer distinct addresses
            tx = f"(t >> 5u) % {columns // 8}u * 8u + (t & 7u)"
            ty = f"(t >> 5u) / {columns // 8}u * 4u + ((t >> 3u) & 3u)"
        else:
            tx, ty = f"t % {columns}u", f"t / {columns}u"
        read = [("bias", self.bias), ("extra", self.extra)]
        written = [("out", self.out)]
        (read if self.pre_is_read else written).append(("pre", self.pre))
        factors = []
        if self.x is not None and self.y is not None:
            factors = [_Factor("x", self.x, t.block_m, t), _Factor("y", self.y, t.block_n, t)]
        return expand(
            "gemm.wgsl",
            {
                "ENABLE": _enable(b[1] for b in self.buffers),
                "ACC": acc,
                "BUFFERS": self._buffers(),
                "FUNCTIONS": functions,
                "LOADED": [_Array(n, o) for n, o in read if o is not None],
                "STORED": [_Array(n, o) for n, o in written if o is not None],
                "PRODUCT": bool(factors),
                "OPERANDS": factors,
                "X_PITCH": t.block_m // 4 + (self.x is not None and self.x.turned),
                "Y_PITCH": t.block_n // 4 + (self.y is not None and self.y.turned),
                "BLOCK_M": t.block_m,
                "BLOCK_N": t.block_n,
                "BLOCK_K": t.block_k,
                "CHAIN": tiling.CHAIN,
                "MR": t.mr,
                "NR": t.nr,
                "GROUP": t.group,
                "STAGES": t.stages,
                "K_FIRST": t.k_first,
                "INVOCATIONS": t.invocations,
                "TX": tx,
                "TY": ty,
                "BIAS": self.bias is not None,
                "PRE_READ": self.pre_is_read,
                "PRE_WRITTEN": self.pre is not None and not self.pre_is_read,
                "FUNCTION": name,
                "SLOPE": self.slope,
                "RESIDUAL": self.extra is not None and not self.slope,
                "OUT": self.out is not None,
                "COLUMN_SUMS": self.column_sums,
                "PLACES": self.places,
                "SEGMENTS": self.segments,
                "OUT_AT": "(plane * p.m + row)" if self.planes else "row",
            },
        )


@dataclass(frozen=True)
class Join(Kernel):
    """Planes summed in their order, and rounded: out[o] = sum of planes[o, q] over q."""

    accumulator: str
    #: Of the planes; wide: both.
    source: Operand
    out: Operand
    #: Whether to add to what `out` holds.
    add: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"join {self.source}->{self.out}"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        return ("planes", self.source.binding, "read"), ("out", self.out.binding, "read_write")

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        mask, word = _EXPONENTS[acc]
        return expand(
            "join.wgsl",
            {
                "ENABLE": _enable(b[1] for b in self.buffers),
                "BUFFERS": self._buffers(),
                "REAL": acc,
                "EXPONENT": mask,
                "WORD": word,
                "WIDE": self.out.wide,
                "EACH": "each_" if self.out.wide else "",
                "ACC": f"vec4<{acc}>" if self.out.wide else acc,
                "OUT_TYPE": self.out.binding,
                "ADD": self.add,
            },
        )


@dataclass(frozen=True, eq=False)
class Gated(Keyed, Kernel):
    """out = act(a) * b, or its gradients, element by element."""

    accumulator: str
    #: One kind for all arrays.
    operand: Operand
    #: The activation; None: the identity.
    value: Expr | None
    #: Its derivative; None: 1.
    slope: Expr | None = None
    backward: bool = False
    guard: bool = False
    d_a: bool = False
    d_b: bool = False
    #: Whether the device's fma rounds once.
    one_rounding: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"gated{' backward' if self.backward else ''} {self.operand}"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        kind = self.operand.binding
        if not self.backward:
            return ("a", kind, "read"), ("b", kind, "read"), ("out", kind, "read_write")
        found = [("grad", kind, "read")]
        if self.d_b or self.slope is not None:
            found.append(("a", kind, "read"))
        if self.d_a:
            found += [("b", kind, "read"), ("d_a", kind, "read_write")]
        if self.d_b:
            found.append(("d_b", kind, "read_write"))
        return tuple(found)

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        value, slope = self.value, self.slope if self.d_a else None
        if self.backward and not self.d_b:
            value = None
        texts = []
        names = {}
        for name, graph in (("act", value), ("slope", slope)):
            if graph is None:
                continue
            names[name] = name
            texts.append(wgsl.function(graph, name, self.accumulator))
        if self.guard and "slope" in names:
            texts.append(_guarded("slope", acc))
            names["slope"] = "slope_guarded"
        functions = "\n\n".join(texts)
        prelude = wgsl.prelude(functions, self.accumulator, self.one_rounding)
        return expand(
            "gated.wgsl",
            {
                "ENABLE": _enable(b[1] for b in self.buffers),
                "BUFFERS": self._buffers(),
                "FUNCTIONS": f"{prelude}\n\n{functions}\n",
                "SCALAR": acc,
                "WIDE": self.operand.wide,
                "ACC": f"vec4<{acc}>" if self.operand.wide else acc,
                "TYPE": self.operand.binding,
                "ACT": names.get("act", ""),
                "SLOPE": names.get("slope", ""),
                "READS_A": any(b[0] == "a" for b in self.buffers),
                "BACKWARD": self.backward,
                "D_A": self.d_a,
                "D_B": self.d_b,
            },
        )


@dataclass(frozen=True)
class Rounding(Kernel):
    """A kernel that finds what fma leaves beside a rounded product: 0 if fma is two roundings."""

    accumulator: str
    label = "rounding of fma"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        real = TYPES[self.accumulator]
        return ("factors", f"vec2<{real}>", "read"), ("rest", real, "read_write")

    def text(self) -> str:
        real = TYPES[self.accumulator]
        return (
            f"@group(0) @binding(0) var<uniform> p: vec4<u32>;\n"
            f"@group(0) @binding(1) var<storage, read> factors: array<vec2<{real}>>;\n"
            f"@group(0) @binding(2) var<storage, read_write> rest: array<{real}>;\n"
            f"@compute @workgroup_size(64)\n"
            f"fn main(@builtin(local_invocation_index) i: u32) {{\n"
            f"    if (i < p[0]) {{\n"
            f"        let f = factors[i];\n"
            f"        rest[i] = fma(f[0], f[1], -(f[0] * f[1]));\n"
            f"    }}\n"
            f"}}\n"
        )


@dataclass(frozen=True)
class Subnormals(Kernel):
    """Products of positive numbers: 0 where a subnormal operand or result counts as one."""

    operand: Operand
    accumulator: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"subnormal numbers of {self.operand}"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        kind = self.operand.element
        return ("factors", f"vec2<{kind}>", "read"), ("products", kind, "read_write")

    def text(self) -> str:
        kind, acc = self.operand.element, TYPES[self.accumulator]
        return (
            f"{_enable([kind])}\n"
            f"@group(0) @binding(0) var<uniform> p: vec4<u32>;\n"
            f"@group(0) @binding(1) var<storage, read> factors: array<vec2<{kind}>>;\n"
            f"@group(0) @binding(2) var<storage, read_write> products: array<{kind}>;\n"
            f"@compute @workgroup_size(64)\n"
            f"fn main(@builtin(local_invocation_index) i: u32) {{\n"
            f"    if (i < p[0]) {{\n"
            f"        let f = vec2<{acc}>(factors[i]);\n"
            f"        products[i] = {kind}(select({acc}(), f[0] * f[1], f[0] > {acc}()));\n"
            f"    }}\n"
            f"}}\n"
        )


@dataclass(frozen=True)
class Copy(Kernel):
    """A strided array into another of the same shape, converted."""

    source: Operand
    out: Operand

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"copy {self.source}->{self.out}"

    @property
    def buffers(self) -> tuple[tuple[str, str, str], ...]:  # type: ignore[override]
        return ("source", self.source.binding, "read"), ("out", self.out.binding, "read_write")

    def text(self) -> str:
        return expand(
            "copy.wgsl",
            {
                "ENABLE": _enable(b[1] for b in self.buffers),
                "BUFFERS": self._buffers(),
                "OUT_TYPE": self.out.element,
            },
        )
