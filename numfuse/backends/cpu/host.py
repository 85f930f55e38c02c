"""The features that kernels can use on the processor for which they are compiled.

The processor is the host's, unless Numba is told of another (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES,
NUMBA_ENABLE_AVX).  LLVM fails for good, and the process with it, where code needs an instruction
or a library function that the processor it is told of lacks.  So the compiler itself is asked.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import sys
from typing import Any

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

from numfuse.backends.cpu.tiling import PARTS
from numfuse.runtime.compilation import compiled

# Each takes one instruction where the processor has it.  Without it, vectors come in pieces, and a
# conversion is a call of compiler-rt, which the process need not contain.
_PROBES = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
define <16 x float> @probe_64(<16 x float> %x) {
  %y = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %x, <16 x float> %x)
  ret <16 x float> %y
}
define <8 x i32> @probe_32(<8 x float> %x) {
  %y = call <8 x float> @llvm.fma.v8f32(<8 x float> %x, <8 x float> %x, <8 x float> %x)
  %i = bitcast <8 x float> %y to <8 x i32>
  %j = add <8 x i32> %i, %i
  ret <8 x i32> %j
}
define float @probe_half(i16 %x) {
  %h = bitcast i16 %x to half
  %y = fpext half %h to float
  ret float %y
}
"""


#: What NUMBA_THREADING_LAYER may be: a layer, or what one is wanted for.
_LAYERS = ("tbb", "omp", "workqueue")
_KINDS_OF_LAYERS = ("default", "safe", "threadsafe", "forksafe")


@functools.cache
def features() -> frozenset[str]:
    """Names of the instruction-set features that LLVM sees on this host."""
    found = llvm.get_host_cpu_features()
    return frozenset(name for name, present in found.items() if present)


def refused_setting() -> str | None:
    """Why Numba, with the settings it has, makes or runs no kernels; None where it does.

    Numba itself says so late, for every call in other words, or not at all: LLVM ends the process
    over a feature without a sign.
    """
    told: Any = config
    if told.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set, and without Numba's compiler there are no kernels"
    for feature in (told.CPU_FEATURES or "").split(","):
        if feature and feature[0] not in "+-":
            return (
                f"each feature in NUMBA_CPU_FEATURES must begin with + or -, "
                f"got {told.CPU_FEATURES!r}"
            )
    if str(told.THREADING_LAYER).lower() not in (*_LAYERS, *_KINDS_OF_LAYERS):
        known = ", ".join((*_LAYERS, *_KINDS_OF_LAYERS))
        return f"NUMBA_THREADING_LAYER must be one of {known}, got {told.THREADING_LAYER!r}"
    if sorted(told.THREADING_LAYER_PRIORITY) != sorted(_LAYERS):
        known = ", ".join(_LAYERS)
        got = " ".join(map(str, told.THREADING_LAYER_PRIORITY))
        return f"NUMBA_THREADING_LAYER_PRIORITY must name each of {known} once, got {got!r}"
    return None


@functools.cache
def _compiled_probes() -> str:
    """The assembly of `_PROBES`, by Numba's own target machine."""

    def assembly() -> str:
        machine: Any = cpu_target.target_context.codegen()._tm
        return str(machine.emit_assembly(llvm.parse_assembly(_PROBES)))

    return compiled(assembly)


def _probe(name: str) -> str:
    text = _compiled_probes()
    start = re.search(rf"^_?probe_{name}:", text, re.MULTILINE)
    assert start is not None
    return text[start.end() :].split("\tret", 1)[0]


@functools.cache
def vector_bytes() -> int:
    """Width of the vectors that the micro-kernel is written in: 64, 32 or 16 bytes."""
    if re.search(r"vfmadd\w+ps.*%zmm", _probe("64")):
        return 64
    probe = _probe("32")
    if re.search(r"vfmadd\w+ps.*%ymm", probe) and re.search(r"vp(addd|slld).*%ymm", probe):
        return 32
    return 16


@functools.cache
def converts_halves() -> bool:
    """Whether an instruction converts float16: x86's F16C, and that of every 64-bit ARM."""
    return re.search(r"__\w*(hf|h2f)", _probe("half")) is None


@functools.cache
def multiplies_by_lanes() -> bool:
    """Whether an FMA can take one factor from a lane of a register: every 64-bit ARM's can."""
    return llvm.get_process_triple().startswith(("aarch64", "arm64"))


def is_x86() -> bool:
    return llvm.get_process_triple().split("-")[0] in ("x86_64", "i686")


@functools.cache
def vector_name() -> str:
    """The instruction set behind `vector_bytes`, for people."""
    if multiplies_by_lanes():
        return "NEON"
    return {64: "AVX-512", 32: "AVX2 + FMA", 16: "128-bit vectors"}[vector_bytes()]


@functools.cache
def product(fmt: str) -> str:
    """How two factors of a storage format are multiplied: "amx", "dot", or widened to "fma".

    Dot products and tiles take bfloat16 (and tiles of some processors float16) as it is stored.
    """
    have = features()
    if _is_told_of_another():
        return "fma"
    if vector_bytes() != 64 or not {"avx512bw", "avx512vl"} <= have:
        return "fma"  # packing is written in 512 bits
    unit = {"bfloat16": "amx-bf16", "float16": "amx-fp16"}.get(fmt)
    if {unit, "amx-tile"} <= have:
        # Processors with tiles do a dot product in two cycles and two fma in one (measured on
        # Granite Rapids: 0.67 of the speed of widened factors), Zen 4 a dot product in one.
        return "amx" if tiles_permitted() else "fma"
    return "dot" if fmt == "bfloat16" and "avx512bf16" in have else "fma"


#: The environment variable that lets products of bfloat16 parts run without AMX, for tests of their
#: meaning: "emulated" computes each instruction on tiles by vectors, many times slower.
TILES_VARIABLE = "NUMFUSE_TILES"


@functools.cache
def tiles_of_parts() -> str | None:
    """Return what multiplies the bfloat16 parts of float32: "amx", "emulated", or None."""
    if os.environ.get(TILES_VARIABLE) == "emulated":
        return "emulated"
    return "amx" if product("bfloat16") == "amx" else None


@functools.cache
def tiles_of_residues() -> str | None:
    """Return what multiplies the 8-bit residues of float64: "amx", "emulated", or None."""
    if os.environ.get(TILES_VARIABLE) == "emulated":
        return "emulated"
    if _is_told_of_another() or not _RESIDUES_NEED <= features() or vector_bytes() != 64:
        return None
    return "amx" if tiles_permitted() else None


def _is_told_of_another() -> bool:
    """Whether Numba was told to compile for another processor."""
    told: Any = config
    return told.CPU_NAME is not None or told.CPU_FEATURES is not None or not told.ENABLE_AVX


#: The features of processors that products of parts, and of residues, are made with.
_PARTS_NEED = frozenset({"amx-tile", "amx-bf16", "avx512bw", "avx512vl"})
_RESIDUES_NEED = frozenset({"amx-tile", "amx-int8", "avx512bw", "avx512dq", "avx512vl"})


def tiles_refused(precision: str) -> str:
    """Return why this process has no products of bfloat16 parts, or of residues of 8 bits."""
    if _is_told_of_another():
        return "Numba is told to compile for another processor"
    lacking = sorted((_PARTS_NEED if precision in PARTS else _RESIDUES_NEED) - features())
    if lacking:
        return f"{name()} lacks {', '.join(lacking)}"
    return "the operating system does not let this process use AMX tiles (Linux from 5.16 on does)"


@functools.cache
def tiles_permitted() -> bool:
    """Ask the kernel of Linux, once a process, to let all of its threads use AMX tiles."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).  It fails on kernels before 5.16, and
    # where a thread has a signal stack that is too small to save tiles on.
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(ctypes.c_long(158), ctypes.c_long(0x1023), ctypes.c_long(18))) == 0


def product_name(kind: str, fmt: str) -> str:
    """The instruction set behind a kind of product, for people."""
    return {
        "fma": vector_name() + (", widened" if fmt in ("float16", "bfloat16") else ""),
        "dot": "AVX512-BF16 dot products",
        "amx": f"AMX tiles of {fmt}",
        **{
            how: f"{how} by {'emulated' if tiles_of_parts() == 'emulated' else 'AMX'} tiles"
            for how in PARTS
        },
    }[kind]


@functools.cache
def name() -> str:
    """The processor's name, as the operating system has it."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
