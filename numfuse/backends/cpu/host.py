"""What the host's processor offers to the kernels."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

import llvmlite.binding as llvm
from numba.core import config


@functools.cache
def features() -> frozenset[str]:
    """Names of the instruction-set features that LLVM sees on this host."""
    found = llvm.get_host_cpu_features()
    return frozenset(name for name, present in found.items() if present)


@functools.cache
def vector_bytes() -> int:
    """Width of the vectors that the micro-kernel is written in: 64, 32 or 16 bytes."""
    have = features()
    if "avx512f" in have:
        return 64
    if "avx2" in have and "fma" in have:
        return 32
    return 16


@functools.cache
def multiplies_by_lanes() -> bool:
    """Whether an FMA can take one factor from a lane of a register: every 64-bit ARM's can."""
    return llvm.get_process_triple().startswith(("aarch64", "arm64"))


def is_x86() -> bool:
    return llvm.get_process_triple().split("-")[0] in ("x86_64", "i686")


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
    told: Any = config
    if told.CPU_NAME is not None or told.CPU_FEATURES is not None:
        return "fma"  # Numba was told to compile for another processor
    if vector_bytes() != 64 or not {"avx512bw", "avx512vl"} <= have:
        return "fma"  # packing is written in 512 bits
    unit = {"bfloat16": "amx-bf16", "float16": "amx-fp16"}.get(fmt)
    if {unit, "amx-tile"} <= have:
        # Processors with tiles do a dot product in two cycles and two fma in one (measured on
        # Granite Rapids: 0.67 of the speed of widened factors), Zen 4 a dot product in one.
        return "amx" if tiles_permitted() else "fma"
    return "dot" if fmt == "bfloat16" and "avx512bf16" in have else "fma"


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
