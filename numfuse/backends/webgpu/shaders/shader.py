"""The base of shaders: what one binds, its uniform, its WGSL text.

A shader is a frozen description; equal descriptions are one pipeline (`device.Device.pipeline`).
`text()` is the whole module, to be read or to be given to another tool.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from numfuse.expr import Expr

__all__ = ["TYPES", "Access", "Shader", "Storage", "Uniform"]

#: {storage dtype: its WGSL type}.
TYPES = {"float32": "f32", "float64": "f64", "float16": "f16"}
#: {type of a field of a uniform: its number of words}
_WORDS = {"u32": 1, "vec4<u32>": 4}


@dataclass(frozen=True)
class Uniform:
    """The fields of a shader's uniform, from which its WGSL struct and its words are made.

    Attributes
    ----------
    fields : tuple of (str, str)
        Name and WGSL type, in order; fields of four words come first, as they are aligned to four.
    """

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, *names: str) -> Uniform:
        """Return a uniform whose fields are single words."""
        return cls(tuple((name, "u32") for name in names))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(name for name, _ in self.fields)

    @cached_property
    def _layout(self) -> struct.Struct:
        return struct.Struct(f"<{sum(_WORDS[kind] for _, kind in self.fields)}I")

    @property
    def words(self) -> int:
        """How many words of 32 bits the fields have."""
        return self._layout.size // 4

    def struct(self, name: str = "Params") -> str:
        """Return the declaration in WGSL."""
        members = "".join(f"    {field}: {kind},\n" for field, kind in self.fields)
        return f"struct {name} {{\n{members}}}"

    def pack(self, values: Mapping[str, int | Sequence[int]]) -> bytes:
        """Return the words of a uniform with these values; negative ones wrap.

        Raises
        ------
        KeyError
            A field has no value.
        """
        words: list[int] = []
        for name, kind in self.fields:
            value = values[name]
            words += [value] if kind == "u32" else value  # type: ignore[list-item,arg-type]
        return self._layout.pack(*(word & 0xFFFFFFFF for word in words))


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
