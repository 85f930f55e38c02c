"""Which registers and spills the kernels of calls have on GPUs that are not here.

    python asv_benches/cuda_kernels.py                        every operation, four generations
    python asv_benches/cuda_kernels.py --gpu t4 rtx4090 --only jet gated
    python asv_benches/cuda_kernels.py --draw 30              and 30 calls that `sweep_cases` draws

Calls are planned, compiled to PTX and assembled by `ptxas`, each kernel once; nothing runs. A
kernel that spills, has a stack or does not assemble is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cuda_plans
import sweep_cases
from cuda_plans import GPUS, NAMES, Planner, absent

import numfuse as nf
from numfuse import expr as ex

#: M, K, N: tiles that fill a device, edges, few rows, a long sum of few blocks.
SIZES = ((2048, 1024, 2048), (1001, 77, 333), (16, 4096, 1024), (300, 7000, 104))


def operations(dtype: str, m: int, k: int, n: int) -> dict[str, Callable[[Planner], Any]]:
    """Return calls that no case of the sweep is: what beside a layer ends in an epilogue."""
    acc = "float64" if dtype == "float64" else "float32"
    a, b, c, bias, row = (absent(dtype, *s) for s in ((m, k), (k, n), (k, n), (n,), (m, 1)))
    grad, u, v = (absent(dtype, *s) for s in ((m, n), (m, k), (k, n)))
    stack, grads = absent(dtype, 2, m, k), absent(dtype, 2, m, n)

    def formula(z: Any, x: Any, y: Any) -> Any:
        return ex.tanh(z + x) * y

    def two(z: Any, w: Any, x: Any, y: Any) -> Any:
        return ex.exp(-z * z) * (w + x) * y

    given = a, b, bias
    return {
        "residual": lambda p: nf.matmul_bias_residual(*given, grad, backend=p),
        "pre": lambda p: nf.matmul_bias_activation(
            *given, "gelu", return_pre_activation=True, backend=p),
        "epilogue": lambda p: nf.matmul_epilogue(a, b, formula, bias, row, backend=p),
        "epilogue backward": lambda p: nf.matmul_epilogue_bwd(
            grad, a, b, formula, bias, row, backend=p),
        "two products": lambda p: nf.matmul_epilogue_bwd(
            grad, a, (b, c), two, bias, 0.5, backend=p),
        "elementwise": lambda p: nf.elementwise_bwd(
            grad, two, grad, row, bias, 2.0, backend=p),
        "gate": lambda p: nf.gelu_mul_bwd(grad, grads[0], grads[1], backend=p),
        "double backward": lambda p: nf.matmul_bias_activation_double_bwd(
            u, v, bias, grad, *given, "tanh", backend=p),
        "tangent": lambda p: nf.matmul_bias_activation_jvp(
            *given, u, v, bias, "silu", backend=p),
        "jet": lambda p: nf.matmul_bias_activation_jet(*given, "tanh", stack, stack, backend=p),
        "jet backward": lambda p: nf.matmul_bias_activation_jet_bwd(
            grad, grads, grads, *given, "tanh", stack, stack, backend=p),
        "saved": lambda p: nf.matmul_bias_activation_bwd(
            grad, *given, "gelu_erf", pre_activation=absent(acc, m, n), backend=p),
    }  # fmt: skip


def calls(only: list[str], draw: int, seed: int) -> Iterator[tuple[str, Callable[[Planner], Any]]]:
    """Yield every call by its name."""
    for dtype, (m, k, n) in itertools.product(NAMES.values(), SIZES):
        for name, call in operations(dtype, m, k, n).items():
            if not only or any(word in name for word in only):
                yield f"{name}, {dtype}, {m} x {k} x {n}", call
    rng = random.Random(seed)
    for operation, dtype, (m, k, n), turned in itertools.product(
        sweep_cases.OPERATIONS, NAMES, SIZES, (False, True)
    ):
        if not only or any(word in operation for word in only):
            case = sweep_cases.Case(
                operation, dtype, m, k, n, 0, False, turned, True, "silu", True, 0
            )  # fmt: skip
            yield str(case), lambda p, case=case: cuda_plans.call(case, p)
    for _ in range(draw):
        case = sweep_cases.draw(rng, float(3 << 30))
        yield str(case), lambda p, case=case: cuda_plans.call(case, p)


def planned(gpu: str, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return every kernel of all calls on a GPU, by its key: its name, and the first call of it."""
    found: dict[str, tuple[str, str]] = {}
    planner = Planner(GPUS[gpu])
    for name, call in calls(arguments.only, arguments.draw, arguments.seed):
        planner.device.launches.clear()
        call(planner)
        for launch in planner.device.launches:
            key = launch.kernel.key(planner.device.info.capability)
            if key not in found:
                found[key] = launch.kernel.name, name
                KERNELS[gpu, key] = launch.kernel
    return found


#: The kernels of this process, by GPU and key.
KERNELS: dict[tuple[str, str], Any] = {}


def share(gpu: str, part: int, parts: int, arguments: argparse.Namespace) -> list[str]:
    """Assemble every `parts`-th kernel of a GPU; return a line for each, "!" before a bad one."""
    found, lines = planned(gpu, arguments), []
    for key in sorted(found)[part::parts]:
        name, call = found[key]
        try:
            told, bad = assembled(KERNELS[gpu, key], GPUS[gpu].capability)
        except Exception as reason:
            told, bad = f"{type(reason).__name__}: {str(reason)[:400]}", True
        lines.append(f"{'!' if bad else ' '} {gpu}: {name}: {told} ({call})")
    return lines


def assembled(kernel: Any, capability: tuple[int, int]) -> tuple[str, bool]:
    """Return what `ptxas` tells of a kernel, and whether it spills or has a stack."""
    text = kernel.ptx(capability)
    done = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    assert release is not None, done.stdout
    newest = int(release[1]) - 4, int(release[2])  # CUDA 13.0 reads PTX 9.0
    version = re.search(r"\.version (\d+)\.(\d+)", text)
    assert version is not None
    if tuple(map(int, version.groups())) > newest:
        text = text.replace(version[0], ".version {}.{}".format(*newest))
    arch = "sm_" + "".join(map(str, kernel.architecture(capability)))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(text)
        command = ["ptxas", f"-arch={arch}", "-v", str(source), "-o", f"{source}.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-300:], True
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    stack = sum(map(int, re.findall(r"(\d+) bytes stack frame", done.stderr)))
    registers = re.search(r"Used (\d+) registers", done.stderr)
    told = f"{registers[1] if registers else '?'} registers, {spilled} spilled, {stack} of stack"
    return told, bool(spilled or stack)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", nargs="*", default=["t4", "a100", "rtx3090", "rtx4090"])
    parser.add_argument("--only", nargs="*", default=[], help="operations that hold one of these")
    parser.add_argument("--draw", type=int, default=0, help="so many drawn calls too")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="the kernels, and no more")
    arguments = parser.parse_args()
    if not arguments.list and shutil.which("ptxas") is None:
        print("ptxas is not on this machine", file=sys.stderr)
        return 2
    print(f"seed {arguments.seed}")
    bad = 0
    for gpu in arguments.gpu:
        if arguments.list:
            found = planned(gpu, arguments)
            print(f"{gpu}: {len(found)} kernels", *sorted(set(found.values())), sep="\n  ")
            continue
        with ProcessPoolExecutor(arguments.processes) as pool:
            count = 4 * arguments.processes
            done = [pool.submit(share, gpu, i, count, arguments) for i in range(count)]
            for future in done:
                for line in future.result():
                    bad += line.startswith("!")
                    print(line, flush=True)
    print(f"{bad} of them spill, have a stack or do not assemble")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
