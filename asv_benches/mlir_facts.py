"""Show what keeps numfuse from numba-cuda-mlir, each by the smallest program that shows it.

Needs no GPU. In an environment that has ``numba-cuda-mlir[cu13]`` and nothing else::

    python asv_benches/mlir_facts.py

Each line is a fact of docs/cuda.md, "The compiler's successor", and what the installed version
does; a line that begins with "gone" says that the fact is one no more.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

NEW = "numba_cuda_mlir"
#: (fact, the program that prints "held" and what it saw, or "gone").
_FACTS: list[tuple[str, Callable[[], tuple[bool, str]]]] = []


def fact(text: str) -> Callable[..., Any]:
    """Note a function that returns whether a fact holds, and what it saw."""

    def noted(function: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
        _FACTS.append((text, function))
        return function

    return noted


def _kernel(x: Any, y: Any, z: Any) -> None:
    x[0] = x[0] * y[0] + z[0]


def _ptx(cc: tuple[Any, ...] = (8, 0), **options: Any) -> str:
    """Return the PTX of `_kernel`, with the device that the compiler would ask for given."""
    import_module(f"{NEW}.tools")._cached_cc = cc[:2]
    types = import_module(f"{NEW}.types")
    array = types.float32[::1]
    compiler = import_module(f"{NEW}.cuda")
    return str(compiler.compile_ptx(_kernel, types.void(array, array, array), cc=cc, **options)[0])


@fact("a compiler asks for a device, also where the capability is given")
def _device() -> tuple[bool, str]:
    types = import_module(f"{NEW}.types")
    array = types.float32[::1]
    try:
        compiler = import_module(f"{NEW}.cuda")
        compiler.compile_ptx(_kernel, types.void(array, array, array), cc=(8, 0))
    except Exception as error:
        return True, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return False, "compiled"


@fact("a product and a sum become one fma")
def _fma() -> tuple[bool, str]:
    found = re.findall(r"\b(?:fma|mul|add)\.[a-z.]*f32", _ptx())
    return any(name.startswith("fma") for name in found), ", ".join(found)


@fact("there is no option against that")
def _no_option() -> tuple[bool, str]:
    try:
        found = "fma.rn" in _ptx(fma=False)
    except Exception as error:
        return True, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found, "fma=False is taken, and " + ("changes nothing" if found else "holds")


@fact('"a" behind an architecture is dropped')
def _letter() -> tuple[bool, str]:
    (target,) = re.findall(r"\.target (\S+)", _ptx((9, 0, "a")))
    return target.rstrip(",") != "sm_90a", f".target {target}"


@fact("there is no simulator")
def _simulator() -> tuple[bool, str]:
    found = hasattr(import_module(f"{NEW}.numba_cuda.core.config"), "ENABLE_CUDASIM")
    return not found, "config.ENABLE_CUDASIM " + ("is there" if found else "is not there")


def main() -> None:
    if len(sys.argv) > 1:  # one fact in a process of its own
        held, seen = _FACTS[int(sys.argv[1])][1]()
        print(f"{'held' if held else 'gone'}: {_FACTS[int(sys.argv[1])][0]}: {seen}")
        return
    print(f"numba-cuda-mlir {importlib.metadata.version('numba-cuda-mlir')}")
    for number, (text, _) in enumerate(_FACTS):
        command = [sys.executable, __file__, str(number)]
        done = subprocess.run(command, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        print(done.stdout.strip() if not done.returncode else f"unknown: {text}: {last}")


if __name__ == "__main__":
    main()
