"""The base of shaders: what one binds, its uniform, its WGSL text.

A shader is a frozen description; equal descriptions are one pipeline (`device.Device.pipeline`).
`text()` is the whole module, to be read or to be given to another tool.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from numfuse.expr import Expr

#: {storage dtype: its WGSL type}.
TYPES = {"float32": "f32", "float64": "f64", "float16": "f16"}


@dataclass(frozen=True)
class Uniform:
    """The fields of a shader's uniform, words, of which its WGSL struct and its bytes are made."""

    names: tuple[str, ...]

    def struct(self, name: str = "Params") -> str:
        """Return the declaration in WGSL."""
        members = "".join(f"    {field}: u32,\n" for field in self.names)
        return f"struct {name} {{\n{members}}}"

    def pack(self, values: Mapping[str, int]) -> bytes:
        """Return the words of a uniform with these values; negative ones wrap.

        KeyError if a field has no value.
        """
        words = [values[name] & 0xFFFFFFFF for name in self.names]
        return struct.pack(f"<{len(words)}I", *words)


@dataclass(frozen=True)
class Access:
    """How a shader reads or writes one of its arrays."""

    dtype: str
    #: Four neighbours at a time: its contiguous axis has a length, and all else lies, in fours.
    wide: bool = False
    #: Of a factor: its axis of K is the contiguous one.
    turned: bool = False

    @property
    def scalar(self) -> str:
        """The WGSL type of a number."""
        return TYPES[self.dtype]

    @property
    def element(self) -> str:
        """The WGSL type of an element of the binding."""
        return f"vec4<{self.scalar}>" if self.wide else self.scalar

    def __str__(self) -> str:
        return f"{self.scalar}{'x4' if self.wide else ''}{'t' if self.turned else ''}"


class Storage(NamedTuple):
    """A buffer that a shader binds."""

    name: str
    #: The WGSL type of an element.
    element: str
    #: "read" or "read_write"
    access: str


class Shader:
    """The base of shaders: a label for errors, buffers in the order of their bindings, a text."""

    label: str
    #: Bound from 1 on; 0 is the uniform.
    buffers: tuple[Storage, ...]
    uniform: Uniform
    #: Whether every index is in range and every loop ends, whatever the values are: no run-time
    #: check is asked for.
    trusted: ClassVar[bool] = False

    def text(self) -> str:
        """Return the module."""
        raise NotImplementedError

    def formulas(self) -> Iterable[Expr]:
        """Return the formulas with which the shader goes."""
        return ()

    def header(self, *structs: str) -> str:
        """Return the beginning of the module: its uniform and its buffers."""
        lines = ["enable f16;"] if any("f16" in b.element for b in self.buffers) else []
        lines += [self.uniform.struct(), *structs, ""]
        lines.append("@group(0) @binding(0) var<uniform> p: Params;")
        lines += [
            f"@group(0) @binding({i}) var<storage, {b.access}> {b.name}: array<{b.element}>;"
            for i, b in enumerate(self.buffers, 1)
        ]
        return "\n".join(lines)
