"""Shaders that find out by trying what WGSL leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.backends.webgpu.shaders.shader import TYPES, Access, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand

__all__ = ["Probe", "Rounding", "Subnormals"]


class Probe(Shader):
    """The base of probes: a number of each pair of factors."""

    uniform = Uniform.of("count")
    #: The type of the factors, and the number that is made of `f`, a pair in the accumulator.
    element: str
    number: str
    accumulator: str

    @property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return (
            Storage("factors", f"vec2<{self.element}>", "read"),
            Storage("found", self.element, "read_write"),
        )

    def text(self) -> str:
        number = {"TYPE": self.element, "ACC": TYPES[self.accumulator], "NUMBER": self.number}
        return expand("probe.wgsl", {"HEADER": self.header(), **number})


@dataclass(frozen=True)
class Rounding(Probe):
    """What fma leaves beside a rounded product: 0 if fma is two roundings."""

    accumulator: str
    label = "rounding of fma"
    number = "fma(f[0], f[1], -(f[0] * f[1]))"

    @property
    def element(self) -> str:  # type: ignore[override]
        return TYPES[self.accumulator]


@dataclass(frozen=True)
class Subnormals(Probe):
    """Products of positive numbers: 0 where a subnormal operand or result counts as one."""

    access: Access
    accumulator: str

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"subnormal numbers of {self.access}"

    @property
    def element(self) -> str:  # type: ignore[override]
        return self.access.scalar

    @property
    def number(self) -> str:  # type: ignore[override]
        zero = f"{TYPES[self.accumulator]}()"
        return f"select({zero}, f[0] * f[1], f[0] > {zero})"
