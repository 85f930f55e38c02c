"""What the suites share: named shapes, and contestants made ready.

A contestant is one of numfuse's backends or a peer. Each suite has both in one benchmark, as values
of one parameter, so that asv shows them in one picture. What cannot run here (no device, no such
package, a version of numfuse without the operation) raises NotImplementedError with the reason:
asv skips it, and shows the reason with `--show-stderr`.

The suites run on old versions too, so they take only what every version has: the public functions,
and `numfuse.cli` for the peers.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable

import ml_dtypes  # noqa: F401 - makes "bfloat16" a name of NumPy's
import numba
import numpy as np
from threadpoolctl import threadpool_limits

import numfuse as nf
from numfuse.cli import ceilings, peers, timing

# (M, N, K). Gated operations work on (M, N).
SHAPES = {
    "cube_64": (64, 64, 64),
    "cube_256": (256, 256, 256),
    "cube_512": (512, 512, 512),
    "cube_1024": (1024, 1024, 1024),
    "shallow": (2048, 2048, 64),
    "tall": (8192, 2048, 512),
    "odd": (1000, 777, 1003),
}
GATED_SHAPES = {
    "cache": (256, 256, 1),
    "square": (2048, 2048, 1),
    "large": (8192, 4096, 1),  # 32 Mi elements
}
BACKENDS = ["cpu", "cuda", "webgpu"]
PEERS = [name for name in peers.PEERS if name != "torch.compile"]  # compiles for seconds
CONTESTANTS = [*BACKENDS, *PEERS]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
WIDE = ["float32", "float64"]
# On a device that is a processor, WebGPU is there for tests: minutes for a large case.
WEBGPU_ON_CPU = 1 << 26  # flops, or elements of a gate times 64
Run = Callable[[], object]


def one_thread() -> None:
    """One thread for everyone: the history is of kernels, not of a machine's other tenants.

    JAX has no switch for it, and takes as many as there are processors that the process may use.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    numba.set_num_threads(1)
    threadpool_limits(1)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


def case_of(operation, dtype, shape, layout="contiguous"):
    """A case of `numfuse.cli.peers`; versions before there were views have no such field."""
    sizes = SHAPES.get(shape) or GATED_SHAPES[shape]
    view = () if layout == "contiguous" else (layout,)
    return peers.Case(operation, *sizes, dtype, "gelu", *view)


def draw(case) -> peers.Operands:
    """The operands of a case, all in its dtype: NumPy's product of bfloat16 is float32."""
    operands = peers.draw_operands(case, np.random.default_rng(0))
    return operands._replace(pre=operands.pre.astype(case.dtype, copy=False))


def contestant(name, operation, dtype, shape, layout="contiguous") -> Run:
    """A call that has run once: compiled, or found in the disk cache; it returns when it is done.

    Raises
    ------
    NotImplementedError
        It cannot run here, and why.
    """
    one_thread()
    case = case_of(operation, dtype, shape, layout)
    if name in BACKENDS:
        return _ours(name, case)
    if not peers.installed(name):
        raise NotImplementedError(f"{name} is not installed")
    if dtype in ("float16", "bfloat16") and name == "NumPy":
        raise NotImplementedError("NumPy has no products of halves but by a loop")
    operands = draw(case)
    try:
        run = call_of(peers.PEERS[name][1](case, operands))
        run()
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise NotImplementedError(f"{name} cannot: {error}") from error
    return run


def call_of(made) -> Run:
    """The call of a contestant; old versions have it as an attribute."""
    return getattr(made, "run", made)


def _ours(name: str, case) -> Run:
    status = nf.backends().get(name)
    if not status:
        raise NotImplementedError(str(status) if status is not None else f"no {name} backend yet")
    operands = draw(case)
    if name == "cpu":
        run = call_of(peers.numfuse_contestant(case, operands))
        run()
        return run
    return _on_device(name, case, operands)


def _on_device(name: str, case, o) -> Run:
    """The same on arrays that stay on the device; a call waits for its result."""
    work = case.flop or 64 * case.m * case.n
    if name == "webgpu" and work > WEBGPU_ON_CPU and _is_processor(name):
        raise NotImplementedError("webgpu: its only adapter is the processor")
    try:
        a, b, bias, grad, pre, up = (nf.to_device(x, name) for x in o)
    except TypeError as error:
        raise NotImplementedError(f"{name}: {error}") from error
    calls = {
        "forward": lambda: nf.matmul_bias_activation(a, b, bias, "gelu"),
        "backward": lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        "backward_saved": lambda: nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "gelu", pre_activation=pre
        ),
        "gated": lambda: nf.activation_mul(pre, up, "gelu"),
        "gated_backward": lambda: nf.activation_mul_bwd(grad, pre, up, "gelu"),
    }
    call = calls[case.operation.removesuffix("_fresh")]  # results are new in any case

    def run() -> object:
        result = call()
        nf.synchronize(result[0] if isinstance(result, tuple) else result)
        return result

    run()
    return run


def _is_processor(name: str) -> bool:
    from numfuse.backends import load

    return load(name).device.adapter.kind == "CPU"


# --- tracked shares and ratios --------------------------------------------------------------------
# What disturbs a round can only lengthen it, so of many short rounds the fastest count, on either
# side of a ratio: measured with ten other programs on two cores, the fastest of 41 rounds of 512
# cubed differed by 0.5% from run to run, where medians differed by half.
ROUNDS = 101
PEAK_SECONDS = 0.002  # of multiply-adds: the time of such a round


def share_of_peak(operation, dtype, shape) -> float:
    """The CPU backend's rate over the FMA peak of one thread, both in the same rounds."""
    from numfuse.backends.cpu.peak import fma_peak  # that of `numfuse.cli` had no third argument

    peaks: list[float] = []
    runs = {
        "run": contestant("cpu", operation, dtype, shape),
        "peak": lambda: peaks.append(fma_peak(dtype, 1, PEAK_SECONDS)),
    }
    seconds = _fastest(runs)
    return case_of(operation, dtype, shape).flop / seconds["run"] / 1e9 / max(peaks)


def share_of_triad(operation, dtype, shape) -> float:
    """The CPU backend's bytes a second over those of a triad, measured before and after it."""
    run = contestant("cpu", operation, dtype, shape)
    before, _ = ceilings.triad(1)
    seconds = _fastest({"run": run})["run"]
    after, _ = ceilings.triad(1)
    m, n, _ = GATED_SHAPES[shape]
    size = peers.STREAMS[operation] * m * n * np.dtype(dtype).itemsize
    return size / seconds / 1e9 / max(before, after)


def ratio_to_best_peer(backend, operation, dtype, shape) -> float:
    """Our time over the fastest peer's: below 1 numfuse is faster; asv takes less for better."""
    runs = {backend: contestant(backend, operation, dtype, shape)}
    reasons = []
    for name in PEERS:
        try:
            runs[name] = contestant(name, operation, dtype, shape)
        except NotImplementedError as error:
            reasons.append(str(error))
    if len(runs) == 1:
        raise NotImplementedError("no peer: " + "; ".join(reasons))
    seconds = _fastest(runs)
    return seconds[backend] / min(seconds[name] for name in runs if name != backend)


def _fastest(runs: dict[str, Run]) -> dict[str, float]:
    """The seconds of each one's fastest round; long calls have rounds enough after some seconds."""
    first = timing.interleave(runs, rounds=3)
    rounds = max(5, min(ROUNDS, int(2.0 / sum(map(min, first.values())))))
    seconds = timing.interleave(runs, rounds=rounds)
    return {name: min(first[name] + seconds[name]) for name in runs}


def needs(name: str) -> None:
    """Skip where this version has no public function of that name."""
    if not hasattr(nf, name):
        raise NotImplementedError(f"this version has no {name}")


def normal(generator, dtype, *shape):
    """Random numbers; a product of two such matrices, the second over sqrt(K), is of size 1."""
    return (generator.standard_normal(shape) / math.sqrt(shape[0])).astype(dtype)
