"""The shaders without an epilogue: strided copies, sums of planes, and the trials of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numfuse.backends.webgpu.shaders.shader import TYPES, Access, Shader, Storage, Uniform
from numfuse.backends.webgpu.shaders.template import expand
from numfuse.language import wgsl

#: Axes of a strided copy; longer shapes are cut.
COPY_AXES = 4
#: Planes that a join reads before it adds them: the way to memory once for all of them.
AHEAD = 8
_AXES = [f"{name}_{axis}" for name in ("source", "out", "shape") for axis in range(COPY_AXES)]
_COPY = Uniform((*_AXES, "source_first", "out_first", "size"))
_JOIN = Uniform(("size", "depth", "width", "groups", "planes", "out", "total"))
_PROBE = Uniform(("count",))


@dataclass(frozen=True)
class Plain(Shader):
    """A file with words bound in it, from one buffer to another."""

    label: str
    file: str
    uniform: Uniform
    #: The buffers, read and written: name and WGSL type of an element.
    source: tuple[str, str]
    out: tuple[str, str]
    words: tuple[tuple[str, Any], ...]

    @property
    def buffers(self) -> tuple[Storage, ...]:  # type: ignore[override]
        return Storage(*self.source, "read"), Storage(*self.out, "read_write")

    def text(self) -> str:
        return expand(self.file, {"HEADER": self.header(), **dict(self.words)})


def _plain(name: str, label: str, uniform: Uniform, source: Any, out: Any, **words: Any) -> Plain:
    return Plain(label, f"{name}.wgsl", uniform, source, out, tuple(words.items()))


def copy(source: Access, out: Access) -> Plain:
    """Return the shader of a strided array into another of the same shape, converted."""
    label, buffers = f"copy {source}->{out}", (("source", source.element), ("out", out.element))
    return _plain("copy", label, _COPY, *buffers, OUT_TYPE=out.scalar)


def join(
    accumulator: str, source: Access, out: Access, add: bool = False, plain: bool = False
) -> Plain:
    """Return the shader of planes summed in their order, and rounded; both are wide, or none.

    It is out[o] = sum of planes[o, q] over q; with `add` that is added to what `out` holds. With
    `plain`, what the additions lose is not added.
    """
    acc = TYPES[accumulator]
    return _plain(
        "join",
        f"join {'plain ' * plain}{source}->{out}",
        _JOIN,
        ("planes", source.element),
        ("out", out.element),
        FINITE=wgsl.prelude("nf_finite(", accumulator),
        REAL=acc,
        WORD=f"u{acc[1:]}",
        WIDE=out.wide,
        EACH="each_" if out.wide else "",
        ACC=f"vec4<{acc}>" if out.wide else acc,
        OUT_TYPE=out.element,
        ADD=add,
        PLAIN=plain,
        AHEAD=AHEAD,
    )


def probe(label: str, access: Access, accumulator: str, number: str) -> Plain:
    """Return the shader of a number of each pair of factors; `number` calls them ``f``.

    `ACC` in it is the type of the accumulator.
    """
    scalar, acc = access.scalar, TYPES[accumulator]
    buffers = ("factors", f"vec2<{scalar}>"), ("found", scalar)
    number = number.replace("ACC", acc)
    return _plain("probe", label, _PROBE, *buffers, TYPE=scalar, ACC=acc, NUMBER=number)
