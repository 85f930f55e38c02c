"""The shader that finds out by trying what WGSL leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.backends.webgpu.shaders.shader import TYPES, Access, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand

__all__ = ["Probe"]


@dataclass(frozen=True)
class Probe(Shader):
    """A number of each pair of factors, which `number` calls ``f`` and `ACC` is the type of."""

    label: str
    access: Access
    accumulator: str
    number: str

    uniform = Uniform.of("count")

    @property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        scalar = self.access.scalar
        return (
            Storage("factors", f"vec2<{scalar}>", "read"),
            Storage("found", scalar, "read_write"),
        )

    def text(self) -> str:
        acc = TYPES[self.accumulator]
        number = self.number.replace("ACC", acc)
        bindings = {"TYPE": self.access.scalar, "ACC": acc, "NUMBER": number}
        return expand("probe.wgsl", {"HEADER": self.header(), **bindings})
