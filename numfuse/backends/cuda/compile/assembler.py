"""A kernel's Python as PTX, by numba-cuda, and PTX as machine code, by nvJitLink or the driver."""

from __future__ import annotations

import contextlib
import re
import types as pytypes
from collections.abc import Iterator
from importlib import import_module
from typing import Any

#: An instruction in a line of its own; an entry; a float64 whose lower half is not zero.
_INSTRUCTION = re.compile(r"\t(@!?%p\d+ )?[a-z][\w.:]*\s[^{}]*;")
_ENTRY = re.compile(r"\s*(\.visible\s+)?\.entry\b")
_LONG = re.compile(r"\b0d([0-9A-Fa-f]{8}(?!0{8})[0-9A-Fa-f]{8})\b")


@contextlib.contextmanager
def compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """numba-cuda asks its current device for what a device function is compiled for."""
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: pytypes.SimpleNamespace(
        compute_capability=capability, id=0
    )
    try:
        yield
    finally:
        dispatcher.get_current_device = before


def ptx(
    function: Any, signature: Any, architecture: tuple[Any, ...], bounds: tuple[int, ...]
) -> str:
    """Return the PTX text of a kernel, for (threads of a block, blocks of a multiprocessor)."""
    compiler: Any = import_module("numba.cuda.compiler")
    options = {"device": False, "abi": "numba", "cc": architecture, "launch_bounds": bounds}
    low_level = getattr(compiler, "_compile_pyfunc_with_fixup", None)
    if low_level is None:
        return str(compiler.compile(function, signature, **options)[0])
    library, _ = low_level(function, signature, **options)
    # A product is merged with a sum where the text says so, and nowhere else: elsewhere it would
    # depend on what is computed beside it. (A new dict: this one is in the keys of numba-cuda's
    # table of overloads, which would find none of them again.)
    library._nvvm_options = {**library._nvvm_options, "fma": False}
    (text,) = library.get_asm_strs(cc=architecture)
    return str(text)


def with_maps(text: str, signature: tuple[str, ...]) -> str:
    """Make the uint64 that stands for a map 128 bytes of the arguments, and its value its address.

    numba-cuda has no argument that is a structure; a tensor map must be one (PTX ISA, tensors: a
    map lies in the space of the parameters, of constants or in global memory, 64-byte aligned).
    """
    for index, kind in enumerate(signature):
        if kind != "map":
            continue
        declared = re.search(rf"\.param \.[bu]64 (\w+_param_{index})\b", text)
        assert declared is not None, "the PTX has a parameter for each argument"
        name = declared[1]
        # the declaration alone: "_param_1" is the beginning of "_param_10" too
        text = re.sub(rf"{re.escape(declared[0])}\b", f".param .align 64 .b8 {name}[128]", text)
        text, loads = re.subn(
            rf"ld\.param\.[bu]64\s+(%\w+), \[{name}\];",
            rf"mov.b64 \1, {name};\n\tcvta.param.u64 \1, \1;",
            text,
        )
        assert loads, "the kernel reads the map"
    return text


def with_constants(text: str) -> str:
    """Take float64's constants from constant memory, where machine code holds no 64 bits.

    An instruction has room for the upper half of one (so 1.0 stays), and ptxas moves any other into
    registers by two instructions, in loops too: a quarter of what a pass by a float64 tanh issues.
    From constant memory they are operands, or lie in uniform registers outside of the loop.
    """
    places: dict[str, int] = {}
    lines, loads = list[str](), 0
    for line in text.split("\n"):
        if not _INSTRUCTION.fullmatch(line):
            lines.append(line)
            continue
        found = {
            x: f"%constant{loads + i}" for i, x in enumerate(dict.fromkeys(_LONG.findall(line)))
        }
        for word, register in found.items():
            at = 8 * places.setdefault(word.upper(), len(places))
            lines.append(f"\tld.const.f64 \t{register}, [numfuse_constants+{at}];")
            line = line.replace(f"0d{word}", register)
        loads += len(found)
        lines.append(line)
    if not places:
        return text
    values = ", ".join(f"0x{word}" for word in places)
    table = f".const .align 8 .b64 numfuse_constants[{len(places)}] = {{{values}}};"
    first = next(i for i, line in enumerate(lines) if _ENTRY.match(line))
    body = next(i for i in range(first, len(lines)) if lines[i].rstrip().endswith("{"))
    lines.insert(body + 1, f"\t.reg .f64 \t%constant<{loads}>;")
    lines.insert(first, table)
    return "\n".join(lines)


def machine_code(text: str, architecture: tuple[Any, ...], name: str) -> bytes:
    """Machine code; or the text, for the driver to assemble (it keeps what it makes on disk).

    nvJitLink assembles for being linked with other code, and then ignores ``setmaxnreg`` ("to
    maintain compatibility across compilation units"): a kernel of three groups has 168 registers a
    thread where two of the groups were to have 232, and spills. The driver assembles it alone.
    """
    if "setmaxnreg" in text:
        # A driver refuses a version of the PTX ISA that is newer than itself, whatever is in the
        # text. These kernels are made for Hopper, whose instructions 8.0 brought.
        text = re.sub(r"^\.version .*$", ".version 8.0", text, count=1, flags=re.MULTILINE)
        return text.encode() + b"\0"
    try:
        return link(text, architecture, name)
    except ImportError:
        return text.encode() + b"\0"


def link(text: str, architecture: tuple[Any, ...], name: str) -> bytes:
    """Machine code by nvJitLink; ImportError where that is not installed."""
    nvjitlink: Any = import_module("cuda.bindings.nvjitlink")
    arch = "sm_" + "".join(map(str, architecture))
    raw = text.encode()
    options = [f"-arch={arch}", "-O3"]
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, raw, len(raw), name)
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise RuntimeError(
                f"{name} for {arch}: {error}: {log.decode(errors='replace')}"
            ) from error
        made = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, made)
    finally:
        nvjitlink.destroy(handle)
    return bytes(made)
