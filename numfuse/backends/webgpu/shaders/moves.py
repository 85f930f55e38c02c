"""The shaders that move numbers: sums of planes, and strided copies."""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.backends.webgpu.shaders.shader import TYPES, Access, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.language import wgsl

__all__ = ["COPY_AXES", "Copy", "Join"]

#: Axes of a strided copy; longer shapes are cut.
COPY_AXES = 4


@dataclass(frozen=True)
class Join(Shader):
    """Planes summed in their order, and rounded: out[o] = sum of planes[o, q] over q."""

    accumulator: str
    #: Of the planes; wide: both.
    source: Access
    out: Access
    #: Whether to add to what `out` holds.
    add: bool = False

    uniform = Uniform.of("size", "depth", "width", "groups", "planes", "out", "total")

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"join {self.source}->{self.out}"

    @property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return (
            Storage("planes", self.source.element, "read"),
            Storage("out", self.out.element, "read_write"),
        )

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        return expand(
            "join.wgsl",
            {
                "HEADER": self.header(),
                "FINITE": wgsl.prelude("nf_finite(", self.accumulator),
                "REAL": acc,
                "WORD": f"u{acc[1:]}",
                "WIDE": self.out.wide,
                "EACH": "each_" if self.out.wide else "",
                "ACC": f"vec4<{acc}>" if self.out.wide else acc,
                "OUT_TYPE": self.out.element,
                "ADD": self.add,
            },
        )


@dataclass(frozen=True)
class Copy(Shader):
    """A strided array into another of the same shape, converted."""

    source: Access
    out: Access

    uniform = Uniform(
        (
            *((name, f"vec{COPY_AXES}<u32>") for name in ("source", "out", "shape")),
            *((name, "u32") for name in ("source_first", "out_first", "size")),
        )
    )

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"copy {self.source}->{self.out}"

    @property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return (
            Storage("source", self.source.element, "read"),
            Storage("out", self.out.element, "read_write"),
        )

    def text(self) -> str:
        return expand("copy.wgsl", {"HEADER": self.header(), "OUT_TYPE": self.out.scalar})
