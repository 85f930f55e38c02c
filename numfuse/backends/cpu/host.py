"""What the host's processor offers to the kernels."""

from __future__ import annotations

import functools
import platform

import llvmlite.binding as llvm


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


def is_x86() -> bool:
    return llvm.get_process_triple().split("-")[0] in ("x86_64", "i686")


def vector_name() -> str:
    """The instruction set behind `vector_bytes`, for people."""
    return {64: "AVX-512", 32: "AVX2 + FMA", 16: "128-bit vectors"}[vector_bytes()]


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
