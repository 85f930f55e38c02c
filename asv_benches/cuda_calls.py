"""The host's time of a repeated CUDA call, and what of it is the driver's and the new results'.

    python asv_benches/cuda_calls.py
    python asv_benches/cuda_calls.py --calls 2000 --json calls.json

Products of 64 cubed in bfloat16: the device needs less than the host, so a loop of calls takes
what the host does. The driver: the same launches in one native call, with the arguments of the
call before. Results: PyTorch's new tensors. What is left is Python, of numfuse and of what it
asks PyTorch for. Run it alone on the host: everything here is smaller than what another process
costs. Contestants take turns in random order; figures are medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from cuda_gpu import Clock, Contestants, gelu, operands

import numfuse as nf
from numfuse.backends.cuda.call.record import REPLAY

SHAPE = (64, 64, 64)


def launches(call: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """What launches all of a repeated call again, and how many launches there are."""
    REPLAY.clear()
    for _ in range(2):
        call()
    (known,) = REPLAY.programs()
    program = known.program
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: program._call(program._plan_at, stream, 0), len(program._launches)


def contestants() -> Contestants:
    a, b, bias, grad = operands("bf16", SHAPE)
    other = torch.randn_like(a)
    found: Contestants = {
        "forward": lambda: nf.matmul_bias_activation(a, b, bias, "gelu"),
        "backward": lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        "gate": lambda: nf.silu_mul(a, other),
        "torch.mm": lambda: torch.mm(a, b),
        "torch addmm, gelu": lambda: gelu(torch.addmm(bias, a, b)),
        "torch._addmm_activation": lambda: torch._addmm_activation(bias, a, b, use_gelu=True),
        "a new tensor": lambda: torch.empty_like(a),
    }
    own = [
        nf.to_device(x.float().cpu().numpy().astype(ml_dtypes.bfloat16), "cuda")
        for x in (a, b, bias)
    ]
    found["forward, numfuse's arrays"] = lambda: nf.matmul_bias_activation(*own, "gelu")
    try:
        import cupy
    except ImportError:
        pass
    else:
        x, y, z = (cupy.asarray(np.float32(t.float().cpu())) for t in (a, b, bias))
        found["forward, CuPy float32"] = lambda: nf.matmul_bias_activation(x, y, z, "gelu")
        found["CuPy matmul float32"] = lambda: x @ y
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", help="write the medians, in microseconds, to this file")
    arguments = parser.parse_args()
    calls = contestants()
    parts = {name: launches(calls[name]) for name in ("forward", "backward", "gate")}
    for name, (again, _) in parts.items():
        calls[f"{name}: driver"] = again
    times = Clock(0).wall(calls, arguments.calls)
    found = {name: seconds * 1e6 for name, seconds in times.items()}
    for name, us in found.items():
        print(f"| {name} | {us:.2f} |")
    results = {"forward": 1, "backward": 3, "gate": 1}
    print("| call | us | driver | new results | Python, of a launch |")
    for name, (_, count) in parts.items():
        driver, new = found[f"{name}: driver"], results[name] * found["a new tensor"]
        rest = (found[name] - driver - new) / count
        print(f"| {name}, {count} | {found[name]:.2f} | {driver:.2f} | {new:.2f} | {rest:.2f} |")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
