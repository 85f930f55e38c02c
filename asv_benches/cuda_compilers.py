"""Compile every CUDA kernel by numba-cuda and by its successor numba-cuda-mlir, side by side.

Needs no GPU. In an environment that has numba-cuda, numba-cuda-mlir[cu13] and what numfuse's
tests import, with `ptxas` on the PATH, from the repository's root::

    PYTHONPATH=. python asv_benches/cuda_compilers.py            # a table of both
    PYTHONPATH=. python asv_benches/cuda_compilers.py wgmma bf16 # rows whose name has these words
    PYTHONPATH=. python asv_benches/cuda_compilers.py --one numba-cuda-mlir mirror f32
    PYTHONPATH=. python asv_benches/cuda_compilers.py --beside llvmlite

The last needs no numba-cuda-mlir: numba-cuda's text goes to LLVM's NVPTX target in place of NVVM
(`nvptx`); with `numba` in place of `llvmlite`, Numba's own CUDA target takes numba-cuda's too.

The rows are those of test_cuda_compile.py. A kernel's text and its intrinsics are taken as they
are: in the successor's process `mlir_builder` stands for llvmlite's builder, and the successor's
modules stand under numba-cuda's names (`substitute`). docs/cuda.md, "The compiler's successor",
has the findings.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvptx
from mlir_builder import TOGETHER, intrinsic

COMPILERS = ("numba-cuda", "numba-cuda-mlir", "llvmlite", "numba")


def substitute() -> None:
    """Put modules of numba-cuda-mlir where numfuse's toolchain looks for numba-cuda's."""
    new = "numba_cuda_mlir"
    package, cuda = import_module(new), import_module(f"{new}.cuda")
    extending = import_module(f"{new}.extending")
    overload = functools.partial(extending.overload, typing_registry=extending.typing_registry)
    sys.modules |= {
        "numba_cuda": package,
        "numba.cuda": cuda,
        "numba.cuda.types": import_module(f"{new}.types"),
        "numba.cuda.core.config": SimpleNamespace(ENABLE_CUDASIM=False),  # it has no simulator
        "numba.cuda.cudadrv.nvvm": import_module(f"{new}.numba_cuda.cudadrv.nvvm"),
        "numba.cuda.extending": SimpleNamespace(intrinsic=intrinsic, overload=overload),
        "numba.cuda.dispatcher": SimpleNamespace(get_current_device=None),
        "numba.cuda.compiler": SimpleNamespace(compile=compile_by_mlir),
    }  # type: ignore[operator]
    import_module("numba").cuda = cuda


def compile_by_mlir(
    function: Any,
    signature: Any,
    *,
    device: bool,
    abi: str,
    cc: tuple[Any, ...],
    launch_bounds: tuple[int, ...],
) -> tuple[str, Any]:
    """Return the PTX of a kernel; products are merged with sums nowhere, as in numfuse's own.

    The successor's own `compile_ptx` takes no such option, and no "a" behind the architecture with
    `cc`: it ends at LLVM's text here, which NVVM compiles with the options of numba-cuda.
    """
    new = "numba_cuda_mlir"
    import_module(f"{new}.tools")._cached_cc = cc[:2]  # else it asks the driver
    optimization = import_module(f"{new}.mlir_optimization")
    chip = "sm_" + "".join(map(str, cc))
    options = {"chip": chip, "launch_bounds": launch_bounds, "opt_level": 3}
    found: dict[str, Any] = {}

    def stop(module: Any, target_options: Any, **given: Any) -> bytes:
        text = translate(module, {**target_options, "chip": chip}, gen_llvmir=True).decode()
        if "define ptx_kernel" not in text:  # an overload is compiled by itself first
            return bytes(translate(module, target_options, **given))
        found["llvm"] = text
        raise _Stop

    translate = optimization._call_llvm70_capi
    optimization._call_llvm70_capi = stop
    try:
        with suppress(_Stop):
            import_module(f"{new}.compiler")._compile_and_optimize(function, signature, options)
    finally:
        optimization._call_llvm70_capi = translate
    # (it inlines device functions, and leaves them in the text for others to call)
    text = re.sub(r"^define (?!ptx_kernel)", "define internal ", found["llvm"], flags=re.M)
    text = _convergent(text)
    nvvm = import_module("numba.cuda.cudadrv.nvvm")
    unit = nvvm.CompilationUnit({"arch": chip.replace("sm_", "compute_"), "fma": False, "opt": 3})
    unit.add_module(text.encode())
    unit.lazy_add_module(nvvm.LibDevice().get())
    return unit.compile().decode().rstrip(chr(0)), None


class _Stop(Exception):
    pass


def _convergent(text: str) -> str:
    """Mark the calls of instructions that threads execute together, which MLIR cannot."""
    lines = []
    for line in text.splitlines():
        if TOGETHER in line:
            line = re.sub(r"\)(\s*(#\d+)?)$", r") convergent\1", line.replace(f" {TOGETHER}", ""))
        lines.append(line)
    return "\n".join(lines) + "\n"


# --- the rows -------------------------------------------------------------------------------------
def rows() -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Yield (name, kernel, compute capability) of every launch."""
    tests = Path(__file__).parents[1] / "tests"
    (found,) = tests.rglob("test_cuda_compile.py")
    sys.path[:0] = [str(tests), str(found.parent)]
    cases = import_module(found.stem)
    seen = set()
    for case in cases.CASES:
        for launch in case.launches:
            capability = case.info.capability
            key = launch.kernel.key(capability)
            if key not in seen:
                seen.add(key)
                yield f"{case.name}: {launch.kernel.name}", launch.kernel, capability


def measure(kernel: Any, capability: tuple[int, int], directory: Path) -> dict[str, Any]:
    """Compile and assemble a kernel; return what it became, or why it did not."""
    try:
        begin = time.process_time()  # (others may run beside it)
        text = kernel.ptx(capability)
        seconds = time.process_time() - begin
    except Exception as error:
        reason = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
        return {"error": reason}
    body = [line.strip() for line in text.splitlines()]
    lines = sum(line.endswith(";") and not line.startswith(".") for line in body)
    found = {"seconds": seconds, "lines": lines, "depot": "__local_depot" in text}
    return found | assemble(text, kernel.architecture(capability), directory)


def assemble(text: str, architecture: tuple[Any, ...], directory: Path) -> dict[str, Any]:
    """Return registers, spilled and stack bytes by ptxas, and whether it assembled the text."""
    arch = "sm_" + "".join(map(str, architecture))
    source = directory / "kernel.ptx"
    version = re.search(r"release (\d+)\.(\d+)", _run([ptxas(), "--version"]).stdout)
    assert version
    known = f".version {int(version[1]) - 4}.{version[2]}"  # CUDA 13.0 reads PTX 9.0
    source.write_text(re.sub(r"^\.version .*$", known, text, count=1, flags=re.MULTILINE))
    done = _run(
        [ptxas(), f"-arch={arch}", "-v", str(source), "-o", str(directory / "kernel.cubin")]
    )
    if done.returncode:
        return {"error": "ptxas: " + re.sub(r"\s+", " ", done.stderr)[:300]}
    log = done.stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),  # type: ignore[index]
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "stack": int(re.search(r"(\d+) bytes stack frame", log)[1]),  # type: ignore[index]
        "serialised": "wgmma" in log,
    }


@functools.cache
def ptxas() -> str:
    path = shutil.which("ptxas")
    if path is None:
        raise SystemExit("ptxas must be on the PATH")
    return path


def _run(command: list[str]) -> Any:
    return subprocess.run(command, capture_output=True, text=True)


def compiled_by(compiler: str, words: Sequence[str]) -> None:
    """Print a line of JSON for each row whose name has all `words`."""
    if compiler == COMPILERS[1]:
        os.environ["NUMBA_CUDA_MLIR_ICE_FULL_TB"] = "1"  # else an error names a file instead
        substitute()
    elif compiler == COMPILERS[2]:
        nvptx.substitute()
    elif compiler == COMPILERS[3]:
        nvptx.substitute_numbas_own()
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, kernel, capability) in enumerate(rows()):
            if not number:  # the compiler makes its tables when it is first used
                measure(kernel, capability, Path(directory))
            if all(word in name for word in words):
                found = measure(kernel, capability, Path(directory))
                print(json.dumps({"name": name, **found}), flush=True)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--one"]:
        compiled_by(words[1], words[2:])
        return
    pair = COMPILERS[:2]
    if words[:1] == ["--beside"]:
        pair, words = (COMPILERS[0], words[1]), words[2:]
    found: dict[str, dict[str, Any]] = {}
    for compiler in pair:
        command = [sys.executable, __file__, "--one", compiler, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith('{"name"'):  # (the successor prints what it failed with)
                row = json.loads(line)
                found.setdefault(row["name"], {})[compiler] = row
    print("| kernel | compiles | registers | spilled | PTX instructions | seconds |")
    print("|---|---|---|---|---|---|")
    for name, made in found.items():
        both = [made.get(c, {"error": "not tried"}) for c in pair]
        state = both[1].get("error", "yes")[:200]
        cells = [
            " / ".join(str(b.get(k, "-")) for b in both) for k in ("registers", "spilled", "lines")
        ]
        seconds = " / ".join(f"{b['seconds']:.1f}" if "seconds" in b else "-" for b in both)
        print(f"| {name} | {state} | {' | '.join(cells)} | {seconds} |")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
