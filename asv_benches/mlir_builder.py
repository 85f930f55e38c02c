"""Write MLIR where numba-cuda's intrinsics write LLVM: llvmlite's builder for numba-cuda-mlir.

:func:`intrinsic` makes the successor's intrinsic of a numba-cuda intrinsic's text, unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

__all__ = ["TOGETHER", "intrinsic"]

#: Behind the text of an instruction that all threads execute together: MLIR cannot say so.
TOGETHER = "// together"


class Value:
    """An MLIR value with its llvmlite type; `align` is that of the load or store that made it."""

    def __init__(self, made: Any, kind: Any, operation: Any = None) -> None:
        self.made, self.type, self.operation = made, kind, operation

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "align":
            mlir = import_module("numba_cuda_mlir._mlir.ir")
            bits = mlir.IntegerType.get_signless(64)
            self.operation.attributes["alignment"] = mlir.IntegerAttr.get(bits, value)
        super().__setattr__(name, value)


class Emitter:
    """The operations of llvmlite's `IRBuilder` that numfuse's intrinsics use, in MLIR."""

    #: Methods whose result has the type of the first operand.
    SAME = frozenset("add sub shl lshr ashr and_ or_ xor fadd fsub".split())
    #: Casts, whose last argument is the type of the result.
    CASTS = frozenset(
        "trunc zext bitcast fpext fptrunc sitofp inttoptr ptrtoint addrspacecast".split()
    )

    def __init__(self, lower: Any) -> None:
        self.lower = lower
        self.module = ir.Module()  # for intrinsics and globals, which are declared again in MLIR
        self.mlir = import_module("numba_cuda_mlir._mlir.ir")

    def kind(self, kind: Any) -> Any:
        """Return the MLIR type of an llvmlite type."""
        mlir = self.mlir
        if isinstance(kind, ir.IntType):
            return mlir.IntegerType.get_signless(kind.width)
        if isinstance(kind, ir.VectorType):
            return mlir.VectorType.get([kind.count], self.kind(kind.element))
        if isinstance(kind, ir.PointerType):
            space = f"<{kind.addrspace}>" if kind.addrspace else ""
            return mlir.Type.parse(f"!llvm.ptr{space}")
        if isinstance(kind, ir.LiteralStructType):
            return mlir.Type.parse(
                f"!llvm.struct<({', '.join(str(self.kind(e)) for e in kind.elements)})>"
            )
        reals = {"half": mlir.F16Type, "float": mlir.F32Type, "double": mlir.F64Type}
        return reals[str(kind)].get()

    def emit(
        self,
        name: str,
        kind: Any,
        operands: Sequence[Any],
        dialect: str = "llvm",
        **attributes: Any,
    ) -> Value:
        """Make an operation of an MLIR dialect; `kind` is the llvmlite type of its result."""
        parse = self.mlir.Attribute.parse
        made = self.mlir.Operation.create(
            f"{dialect}.{name}",
            results=[] if isinstance(kind, ir.VoidType) else [self.kind(kind)],
            operands=[self.operand(o) for o in operands],
            attributes={k: parse(v) if isinstance(v, str) else v for k, v in attributes.items()},
        )
        return Value(made.results[0] if made.results else None, kind, made)

    def operand(self, value: Any) -> Any:
        if isinstance(value, Value):
            return value.made
        if isinstance(value, ir.GlobalVariable):
            return self.address_of(value)
        assert isinstance(value, ir.Constant), value
        if value.constant is ir.Undefined or isinstance(value.type, ir.VectorType):
            return self.emit("mlir.undef", value.type, []).made
        kind = self.kind(value.type)
        mlir = self.mlir
        if isinstance(value.type, ir.IntType):
            number = int(value.constant) & ((1 << value.type.width) - 1)
            signed = number - (1 << value.type.width) * (number >> (value.type.width - 1))
            attribute = mlir.IntegerAttr.get(kind, signed if value.type.width > 1 else number)
        else:
            attribute = mlir.FloatAttr.get(kind, float(value.constant))
        return self.emit("mlir.constant", value.type, [], value=attribute).made

    def address_of(self, value: ir.GlobalVariable) -> Any:
        mlir, module = self.mlir, self.lower.mlir_gpu_module
        names = [
            str(op.attributes["sym_name"])
            for op in module.bodyRegion.blocks[0]
            if "sym_name" in op.attributes
        ]
        if f'"{value.name}"' not in names:
            declared = mlir.Operation.parse(
                f"llvm.mlir.global external @{value.name}() {{addr_space = 3 : i32, "
                f"alignment = {value.align} : i64}} : !llvm.array<0 x i8>"
            )
            mlir.InsertionPoint.at_block_begin(module.bodyRegion.blocks[0]).insert(declared)
        return self.emit("mlir.addressof", value.type, [], global_name=f"@{value.name}").made

    def __getattr__(self, name: str) -> Any:
        if name in self.SAME:
            flags = (
                {"overflowFlags": "#llvm.overflow<none>"} if name in ("add", "sub", "shl") else {}
            )
            return lambda *a: self.emit(name.rstrip("_"), a[0].type, a, **flags)
        if name in self.CASTS:
            return lambda x, kind: self.emit(name, kind, [x])
        raise AttributeError(name)

    def not_(self, x: Any) -> Value:
        return self.emit("xor", x.type, [x, ir.Constant(x.type, -1)])

    def icmp_unsigned(self, which: str, a: Any, b: Any) -> Value:
        number = {"==": 0, "!=": 1, "<": 6, "<=": 7, ">": 8, ">=": 9}[which]
        return self.emit("icmp", ir.IntType(1), [a, b], predicate=f"{number} : i64")

    def fcmp_unordered(self, which: str, a: Any, b: Any) -> Value:
        number = {"uno": 14, "!=": 13}[which]
        return self.emit("fcmp", ir.IntType(1), [a, b], predicate=f"{number} : i64")

    def select(self, condition: Any, a: Any, b: Any) -> Value:
        return self.emit("select", a.type, [condition, a, b])

    def insert_element(self, x: Any, value: Any, i: Any) -> Value:
        return self.emit("insertelement", x.type, [x, value, i])

    def extract_element(self, x: Any, i: Any) -> Value:
        return self.emit("extractelement", x.type.element, [x, i])

    def extract_value(self, x: Any, i: int) -> Value:
        return self.emit("extractvalue", x.type.elements[i], [x], position=f"array<i64: {i}>")

    def gep(self, pointer: Any, index: Sequence[Any]) -> Value:
        kind = self.mlir.TypeAttr.get(self.kind(pointer.type.pointee))
        return self.emit(
            "getelementptr",
            pointer.type,
            [pointer, *index],
            elem_type=kind,
            rawConstantIndices="array<i32: -2147483648>",
        )

    def load(self, pointer: Any) -> Value:
        return self.emit("load", pointer.type.pointee, [pointer])

    def store(self, value: Any, pointer: Any) -> Value:
        return self.emit("store", ir.VoidType(), [value, pointer])

    def call(self, function: Any, values: Sequence[Any], attrs: Sequence[str] = ()) -> Value:
        if isinstance(function, ir.InlineAsm):
            kind = function.type
            kind = getattr(kind, "pointee", kind)
            text = function.asm + (f" {TOGETHER}" if "convergent" in attrs else "")
            effect = {"has_side_effects": "unit"} if function.side_effect else {}
            return self.emit(
                "inline_asm",
                getattr(kind, "return_type", kind),
                values,
                asm_string=self.mlir.StringAttr.get(text),
                constraints=self.mlir.StringAttr.get(function.constraint),
                **effect,
            )
        assert function.name.startswith("llvm.fma."), function.name
        # (below compute capability 10.0 it has no translation of llvm.intr.fma)
        kind, rounding = function.function_type.return_type, "#nvvm.fp_rnd_mode<rn>"
        return self.emit("fma", kind, values, dialect="nvvm", rnd=rounding)


class Context:
    """Numba's lowering context, as far as the intrinsics use it."""

    def make_array(self, kind: Any) -> Any:
        def made(context: Any, builder: Emitter, value: Any) -> Any:
            lowering = import_module("numba_cuda_mlir.lowering_utilities")
            data = lowering.memref_data_pointer(value)
            space = int((re.search(r"ptr<(\d)>", str(data.type)) or [0, 0])[1])
            element = LLVM[str(kind.dtype)]
            pointer = Value(data, element.as_pointer(space))
            return SimpleNamespace(
                data=builder.addrspacecast(pointer, element.as_pointer()) if space else pointer
            )

        return made

    def get_dummy_value(self) -> None:
        return None

    def make_tuple(self, builder: Any, kind: Any, parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(parts)


LLVM = {
    "bool": ir.IntType(1),
    "int16": ir.IntType(16),
    "int32": ir.IntType(32),
    "uint32": ir.IntType(32),
    "int64": ir.IntType(64),
    "uint64": ir.IntType(64),
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}


def intrinsic(typing: Any) -> Any:
    """Return the successor's intrinsic of a numba-cuda intrinsic's text."""

    @functools.wraps(typing)
    def typed(typingctx: Any, *kinds: Any) -> Any:
        found = typing(typingctx, *kinds)
        if found is None:  # not for these types
            return None
        signature, codegen = found

        def lower(builder: Any, target: Any, given: Any, keywords: Any) -> None:
            emitter, values = Emitter(builder), []
            for kind, variable in zip(signature.args, given, strict=True):
                value = builder.load_var(variable)
                if str(kind) in LLVM:
                    cast = builder.lower_cast(builder.get_numba_type(variable.name), kind, value)
                    values.append(Value(cast, LLVM[str(kind)]))
                else:
                    values.append(value)
            made = codegen(Context(), emitter, signature, values)
            if isinstance(made, tuple):
                made = tuple(emitter.operand(part) for part in made)
            elif made is not None:
                made = emitter.operand(made)
            builder.store_var(target, made)

        return signature, lower

    extending = import_module("numba_cuda_mlir.extending")
    made = extending.intrinsic(typed)
    # one that is made after a compilation is not known otherwise
    extending.refresh_registries(target=False, include_uninitialized_cuda=False)
    return made
