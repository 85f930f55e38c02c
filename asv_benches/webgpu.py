"""Products and gates of the WebGPU backend on a GPU: their time, beside PyTorch's in one process.

    python asv_benches/webgpu.py --tiles              which tile is the fastest here
    python asv_benches/webgpu.py                      the tables of docs/webgpu.md
    python asv_benches/webgpu.py --loops              wall time of a call in a loop, with a submit
                                                      for each and together, and the host's part
    python asv_benches/webgpu.py --gated 8192,2048,5632 333,1000,777
                                                      gated layers, beside two products and a gate
    python asv_benches/webgpu.py --sizes 4096 --chain 0 256 512 1024 --tile 128x128x16:8x16
                                                      chains of sums of these lengths, and tiles

WebGPU's times are the device's own (timestamps around a pass that repeats a call, so that neither
Python nor the wait for the result counts), PyTorch's are those of CUDA events around as many
calls. Contestants take turns, figures are medians of the turns, operands are random and new in
every case, and results are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import time
from dataclasses import replace
from functools import partial

import numpy as np
import wgpu

import numfuse as nf
from numfuse.backends import load
from numfuse.backends.webgpu import split, tiling
from numfuse.backends.webgpu.stores import Store
from numfuse.backends.webgpu.tiling import WebGpuTile
from numfuse.gated import layer
from numfuse.problem import gates as gate_problems
from numfuse.problem import product as problem


class Stopwatch:
    """The device's seconds for a pass."""

    def __init__(self, device) -> None:
        self.device = device
        self.queries = device.handle.create_query_set(type="timestamp", count=2)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self.found = device.handle.create_buffer(size=16, usage=usage)
        # nanoseconds of a tick: wgpu has no call for it, and it is 1 on NVIDIA's devices
        self.tick = 1e-9

    def seconds(self, dispatches) -> float:
        """Of these (pipeline handle, bind group, grid), one after another."""
        self.device.submit()  # calls that wait come first
        encoder = self.device.handle.create_command_encoder()
        run = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": self.queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        )
        for pipeline, group, grid in dispatches:
            run.set_pipeline(pipeline)
            run.set_bind_group(0, group)
            run.dispatch_workgroups(*grid)
        run.end()
        encoder.resolve_query_set(self.queries, 0, 2, self.found, 0)
        self.device.queue.submit([encoder.finish()])
        first, last = struct.unpack("<QQ", self.device.queue.read_buffer(self.found))
        return (last - first) * self.tick


def recorded(p, kind, operands, outs):
    """The dispatches of a problem of ghosts, each result where the caller wants it."""
    device = operands[0].device
    store = Store(device, operands, outs)
    split.run(store, kind, p)
    steps = [
        (pipeline.handle, device.group(pipeline.layout, bindings), grid)
        for pipeline, bindings, grid in store.commands.steps
    ]
    store.finish()
    return steps


def operands(rng, m, n, k, dtype):
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dtype)
    b = (rng.standard_normal((k, n), dtype=np.float32) / np.sqrt(k)).astype(dtype)
    bias = rng.standard_normal(n, dtype=np.float32).astype(dtype)
    grad = rng.standard_normal((m, n), dtype=np.float32).astype(dtype)
    return a, b, bias, grad


def work(arrays, outs, activation="gelu"):
    """{operation: (dispatches, flops)} on arrays of the device; outs are out, d_a, d_b, d_bias."""
    a, b, bias, grad = arrays
    out, *gradients = outs
    m, k = a.shape
    flops = 2 * m * b.shape[1] * k
    product = problem.gemm(a.ghost, b.ghost, None, "none", False, out.ghost)
    forward = problem.gemm(a.ghost, b.ghost, bias.ghost, activation, False, out.ghost)
    backward = problem.gemm_backward(
        grad.ghost, a.ghost, b.ghost, bias.ghost, activation,
        out=tuple(x.ghost for x in gradients),
    )  # fmt: skip
    return {
        "product": (recorded(product, "forward", arrays, outs), flops),
        "forward": (recorded(forward, "forward", arrays, outs), flops),
        "backward": (recorded(backward, "backward", arrays, outs), 3 * flops),
    }


def contract_work(arrays, outs, number=2):
    """The same by the reference shaders of the contract (gelu is number 2)."""
    device = arrays[0].device
    _, pipelines = load("webgpu").reference_shaders().pipelines()
    a, b, bias, grad = arrays
    out, *gradients = outs
    (m, k), n = a.shape, b.shape[1]
    grad_pre = nf.to_device(np.zeros((m, n), np.float32), "webgpu")

    def group(pipeline, arrays, words):
        content = struct.pack(f"<{len(words)}I", *words)
        uniform = device.constant(content)
        parts = [x.buffer.handle for x in arrays] + [uniform]
        return device.handle.create_bind_group(
            layout=pipeline.layout,
            entries=[
                {"binding": i, "resource": {"buffer": x, "offset": 0, "size": x.size}}
                for i, x in enumerate(parts)
            ],
        )

    def blocks(length, tile=16):
        return -(-length // tile)

    words = (m, k, n, 1, number, 0, 0, 0)
    every = (a, b, bias, grad, grad_pre, *gradients)
    backward = []
    for name, grid in (
        ("gemm_bwd_grad_pre_f32", (blocks(n), blocks(m), 1)),
        ("gemm_bwd_da_f32", (blocks(k), blocks(m), 1)),
        ("gemm_bwd_db_f32", (blocks(n), blocks(k), 1)),
        ("gemm_bwd_dbias_f32", (blocks(n, 256), 1, 1)),
    ):
        pipeline = pipelines[name]
        backward.append((pipeline.handle, group(pipeline, every, words), grid))
    pipeline = pipelines["gemm_bias_act_f32"]
    forward = (
        pipeline.handle, group(pipeline, (a, b, bias, out), words), (blocks(n), blocks(m), 1)
    )  # fmt: skip
    return {"forward": [forward], "backward": backward}


def torch_work(host, size):
    """{operation: a call} of PyTorch on CUDA in IEEE float32 (or float16); {} without it."""
    try:
        import torch
    except ImportError:
        return {}, None
    if not torch.cuda.is_available():
        return {}, None
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b, bias, grad = (torch.from_numpy(x).cuda() for x in host)
    out, d_a, d_b = torch.empty_like(grad), torch.empty_like(a), torch.empty_like(b)
    gelu = torch.nn.functional.gelu
    derive = torch.ops.aten.gelu_backward

    def product():
        torch.mm(a, b, out=out)

    def forward():
        torch.addmm(bias, a, b, out=out)
        return gelu(out, approximate="tanh")

    def backward():
        torch.addmm(bias, a, b, out=out)
        grad_pre = derive(grad, out, approximate="tanh")
        torch.mm(grad_pre, b.T, out=d_a)
        torch.mm(a.T, grad_pre, out=d_b)
        return grad_pre.sum(0)

    def timed(call, repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats / 1e3

    return {"product": product, "forward": forward, "backward": backward}, timed


def exact(host):
    """{result: float64}, by PyTorch on the GPU where there is one."""
    a, b, bias, grad = (x.astype(np.float64) for x in host)
    try:
        import torch

        if torch.cuda.is_available():
            a, b, bias, grad = (torch.from_numpy(x).cuda() for x in (a, b, bias, grad))
            pre = a @ b + bias
            grad_pre = torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")
            found = (
                torch.nn.functional.gelu(pre, approximate="tanh"),
                grad_pre @ b.T, a.T @ grad_pre, grad_pre.sum(0),
            )  # fmt: skip
            return [x.cpu().numpy() for x in found]
    except ImportError:
        pass
    with nf.use_backend("reference"):
        return [
            nf.matmul_bias_activation(a, b, bias, "gelu"),
            *nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        ]


def error(x, wanted):
    return float(np.linalg.norm(x.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def products(device, shapes, dtype, slow):
    """Our shaders, the reference shaders and PyTorch, turn by turn."""
    watch = Stopwatch(device)
    rng = np.random.default_rng()
    # flops of a turn: enough for a steady clock, few on a CPU
    budget = 3e8 if device.adapter.kind == "CPU" else 5e11
    for m, n, k in shapes:
        host = operands(rng, m, n, k, dtype)
        arrays = [nf.to_device(x, "webgpu") for x in host]
        outs = [
            nf.to_device(np.full(shape, np.nan, dtype), "webgpu")
            for shape in ((m, n), (m, k), (k, n), (n,))
        ]
        ours = work(arrays, outs)
        plain = contract_work(arrays, outs) if slow and dtype == np.float32 else {}
        peers, timed = torch_work(host, m)
        wanted = exact(host)
        for name, (steps, flops) in ours.items():
            repeats = min(200, max(3, int(budget / flops)))
            turns = {"numfuse": [], "reference": [], "torch": []}
            for _ in range(5):
                turns["numfuse"].append(watch.seconds(steps * repeats) / repeats)
                if name in peers:
                    turns["torch"].append(timed(peers[name], repeats))
            if name in plain:
                few = max(1, repeats // 20)
                turns["reference"] = [watch.seconds(plain[name] * few) / few for _ in range(3)]
                watch.seconds(steps)  # what is checked below is ours
            best = statistics.median(turns["numfuse"])
            line = f"{name} {np.dtype(dtype).name} {m}x{n}x{k}: {best * 1e3:.4g} ms, "
            line += f"{flops / best / 1e9:.4g} GFLOP/s"
            for peer in ("torch", "reference"):
                if turns[peer]:
                    line += f"; {peer} {statistics.median(turns[peer]) / best:.3g} of its time"
            if name == "forward":
                line += f"; error {error(nf.to_numpy(outs[0]), wanted[0]):.1e}"
            if name == "backward":
                found = [
                    error(nf.to_numpy(x), w) for x, w in zip(outs[1:], wanted[1:], strict=True)
                ]
                line += "; errors " + ", ".join(f"{e:.1e}" for e in found)
            print(line, flush=True)


def copying(watch, device, source, out):
    """Seconds of a copy by a kernel of four values an invocation, the fastest there is."""
    module = device.handle.create_shader_module(
        code="""
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> out: array<vec4<u32>>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
    let i = id.x + id.y * grid.x * 256u;
    if (i < arrayLength(&out)) {
        out[i] = source[i];
    }
}
"""
    )
    pipeline = device.handle.create_compute_pipeline(
        layout="auto", compute={"module": module, "entry_point": "main"}
    )
    group = device.handle.create_bind_group(
        layout=pipeline.get_bind_group_layout(0),
        entries=[
            {"binding": i, "resource": {"buffer": x.buffer.handle, "offset": 0, "size": x.nbytes}}
            for i, x in enumerate((source, out))
        ],
    )
    step = (pipeline, group, (*device.grid(-(-source.nbytes // 16 // 256)), 1))
    return statistics.median(watch.seconds([step] * 10) / 10 for _ in range(5))


def gates(device, count, dtype):
    """Gated operations as shares of the bandwidth of a copy on the device."""
    watch = Stopwatch(device)
    rng = np.random.default_rng()
    shape = (count // 4096, 4096)
    a, b, grad = (
        nf.to_device(rng.standard_normal(shape, np.float32).astype(dtype), "webgpu")
        for _ in range(3)
    )
    out, d_a, d_b = (nf.to_device(np.zeros(shape, dtype), "webgpu") for _ in range(3))
    work = {}
    for act in ("none", "relu", "silu", "gelu"):
        work[f"{act}"] = (gate_problems.gated(a.ghost, b.ghost, act, out.ghost), "gated", 3)
        work[f"{act} backward"] = (
            gate_problems.gated_backward(
                grad.ghost, a.ghost, b.ghost, act, out=(d_a.ghost, d_b.ghost)
            ),
            "gated_backward", 4 if act == "none" else 5,
        )  # fmt: skip
    del work["none backward"]
    steps = {
        name: recorded(p, kind, (a, b, grad), (out, d_a, d_b))
        for name, (p, kind, _) in work.items()
    }
    copy = 2 * a.nbytes / copying(watch, device, a, out)
    print(f"copy of {a.nbytes >> 20} MiB: {copy / 1e9:.0f} GB/s", flush=True)
    for name, (_, _, arrays) in work.items():
        seconds = statistics.median(watch.seconds(steps[name] * 10) / 10 for _ in range(5))
        rate = arrays * a.nbytes / seconds
        print(
            f"gated {name} {np.dtype(dtype).name}: {rate / 1e9:.0f} GB/s, {rate / copy:.0%} of the "
            f"copy",
            flush=True,
        )


def calls(device):
    """Microseconds of a call on arrays of the device, and its submits."""
    rng = np.random.default_rng()
    for size in (8, 64, 512):
        a, b, bias, grad = (
            nf.to_device(x, "webgpu") for x in operands(rng, size, size, size, np.float32)
        )
        for name, call in (
            ("forward", partial(nf.matmul_bias_activation, a, b, bias, "gelu")),
            ("backward", partial(nf.matmul_bias_activation_bwd, grad, a, b, bias, "gelu")),
            ("gated", partial(nf.silu_mul, a, b)),
        ):
            for _ in range(20):
                call()
            device.wait()
            submits, turns = device.submits, []
            for _ in range(10):
                start = time.perf_counter()
                for _ in range(50):
                    call()
                turns.append((time.perf_counter() - start) / 50)
                device.wait()
            each = (device.submits - submits - 10) / 500
            print(
                f"call {name} {size}: {statistics.median(turns) * 1e6:.0f} us, {each:.2g} submits",
                flush=True,
            )


#: M, K and N of the loops: small, square, few rows of a large weight, many rows of a small one.
LOOPS = (
    (8, 8, 8), (96, 96, 96), (1000, 1000, 1000), (2048, 2048, 2048), (64, 4096, 4096),
    (20000, 96, 320),
)  # fmt: skip
SCALED = nf.epilogue(lambda x, y: x * y, name="scaled")


def torch_loop(host, name):
    """A call of PyTorch on CUDA for one of `loops`, and its wait; None without it."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    grad, a, b, bias = (torch.from_numpy(x).cuda() for x in host)
    gelu, derive = torch.nn.functional.gelu, torch.ops.aten.gelu_backward

    def forward():
        return gelu(torch.addmm(bias, a, b), approximate="tanh")

    def backward():
        g = derive(grad, torch.addmm(bias, a, b), approximate="tanh")
        return g @ b.T, a.T @ g, g.sum(0)

    def gated():
        return torch.nn.functional.silu(grad) * grad

    def copied():
        return grad.clone()

    def number():
        return grad * 0.5

    calls = {
        "forward": forward, "backward": backward, "gated": gated, "number": number, "copy": copied,
    }  # fmt: skip
    return calls[name], torch.cuda.synchronize


def loops(device, shapes, elements):
    """Wall time of a call in a loop over arrays of the device, which ends when all is done.

    "together" is as it is in use, "each" with a submit for every call, and "host" the calls alone,
    without their submits.
    """
    rng, most = np.random.default_rng(), device.most
    cases = [(shape, name) for shape in shapes for name in ("forward", "backward")]
    cases += [((8, 8, 8), "gated"), ((8, 8, 8), "number"), ((elements // 4096, 1, 4096), "gated")]
    for (m, k, n), name in cases:
        a, b, bias, grad = operands(rng, m, n, k, np.float32)
        host = grad, a, b, bias
        x = [nf.to_device(y, "webgpu") for y in host]
        call = {
            "forward": partial(nf.matmul_bias_activation, *x[1:], "gelu"),
            "backward": partial(nf.matmul_bias_activation_bwd, *x, "gelu"),
            "gated": partial(nf.silu_mul, x[0], x[0]),
            "number": partial(nf.elementwise, SCALED, x[0], 0.5),
        }[name]
        contestants = {"together": (call, device.wait), "each": (call, device.wait)}
        if (peer := torch_loop(host, name)) is not None:
            contestants["torch"] = peer
            if name == "gated":
                contestants["torch's copy"] = torch_loop(host, "copy")
        turns = {way: [] for way in (*contestants, "host")}
        count = 0
        for turn in range(6):
            for way, (run, wait) in contestants.items():
                device.most = device.left = 0 if way == "each" else most
                run()
                wait()
                if not count:  # a tenth of a second, by the first
                    start = time.perf_counter()
                    run()
                    wait()
                    count = int(min(500, max(2, 0.1 / (time.perf_counter() - start))))
                start = time.perf_counter()
                for _ in range(count):
                    run()
                wait()
                turns[way].append((time.perf_counter() - start) / count)
            device.most = device.left = 1 << 60
            device.due = float("inf")
            start = time.perf_counter()
            for _ in range(50):
                call()
            turns["host"].append((time.perf_counter() - start) / 50)
            device.wait()
            if not turn:  # the first is for what is kept
                for kept in turns.values():
                    kept.clear()
        device.most = device.left = most
        figures = ", ".join(f"{w} {statistics.median(t) * 1e6:.1f}" for w, t in turns.items())
        print(f"{name} {m} x {k} x {n}, us of wall time a call: {figures}", flush=True)


def tiles(device, sizes, names):
    """Every tile's speed, and the time that its compilation takes."""
    watch = Stopwatch(device)
    rng = np.random.default_rng()
    candidates = [
        WebGpuTile(128, 128, 16, 8, 16),
        WebGpuTile(128, 128, 16, 8, 16, k_first=True),
        WebGpuTile(128, 256, 16, 8, 16, k_first=True),
        WebGpuTile(128, 64, 16, 8, 16, k_first=True),
        WebGpuTile(64, 128, 16, 8, 8, k_first=True),
        WebGpuTile(64, 64, 16, 8, 8),
        WebGpuTile(64, 64, 16, 8, 8, k_first=True),
        WebGpuTile(32, 64, 16, 8, 8, k_first=True),
        WebGpuTile(32, 64, 16, 4, 8, k_first=True),
        WebGpuTile(32, 32, 16, 4, 4, k_first=True),
        WebGpuTile(32, 32, 32, 4, 4, k_first=True),
    ]
    chosen = tiling.tile
    for size in sizes:
        host = operands(rng, size, size, size, np.float32)
        arrays = [nf.to_device(x, "webgpu") for x in host]
        outs = [nf.to_device(np.zeros_like(x), "webgpu") for x in (host[3], *host[:3])]
        for tile in candidates:
            tiling.tile = lambda *_, tile=tile: tile
            start = time.perf_counter()
            row = []
            for name, (steps, flops) in work(arrays, outs).items():
                if name in names:
                    repeats = min(100, max(2, int(5e11 / flops)))
                    turns = [watch.seconds(steps * repeats) / repeats for _ in range(3)]
                    row.append(f"{name} {flops / statistics.median(turns) / 1e12:.1f} TFLOP/s")
            row.append(f"all of it {time.perf_counter() - start:.1f} s")
            print(size, tile, "; ".join(row), flush=True)
    tiling.tile = chosen


def chains(device, sizes, lengths, tiles):
    """Times of tiles with chains of sums of these lengths, by turns, and their largest errors."""
    watch = Stopwatch(device)
    rng = np.random.default_rng()
    chosen = tiling.tile
    for size in sizes:
        host = operands(rng, size, size, size, np.float32)
        arrays = [nf.to_device(x, "webgpu") for x in host]
        outs = [nf.to_device(np.zeros_like(x), "webgpu") for x in (host[3], *host[:3])]
        wanted = host[0].astype(np.float64) @ host[1].astype(np.float64)
        contestants = {}
        for tile in tiles or (None,):
            for length in lengths:

                def patched(*given, tile=tile, length=length):
                    return replace(tile or chosen(*given), chain=length)

                tiling.tile = patched
                made = work(arrays, outs)
                watch.seconds(made["product"][0])
                off = np.abs(nf.to_numpy(outs[0]) - wanted).max()
                contestants[tile, length] = made, off, {"forward": [], "backward": []}
        for _ in range(7):
            for made, _, turns in contestants.values():
                for name, seconds in turns.items():
                    steps, flops = made[name]
                    repeats = min(50, max(1, int(2e11 / flops)))
                    seconds.append(watch.seconds(steps * repeats) / repeats)
        for (tile, length), (_, off, turns) in contestants.items():
            times = ", ".join(
                f"{name} {statistics.median(seconds) * 1e3:.4g} ms"
                for name, seconds in turns.items()
            )
            name = "its own tile" if tile is None else tile
            print(f"{size}, chains of {length}, {name}: {times}; error {off:.3g}", flush=True)
    tiling.tile = chosen


def gated_layers(device, shapes):
    """The gated layer in one operation, beside our own two products and their gate."""
    watch, rng = Stopwatch(device), np.random.default_rng()
    silu = nf.activations()["silu"]

    def random(*shape):
        host = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-2]) ** 0.5
        return nf.to_device(host, "webgpu")

    for m, k, n in shapes:
        a, b, c, z, w, grad = (random(*x) for x in ((m, k), (k, n), (k, n), *[(m, n)] * 3))
        out, g, h, d_a, d_b, d_c = (random(*x) for x in (*[(m, n)] * 3, (m, k), (k, n), (k, n)))
        named = {"a": a.ghost, "b_0": b.ghost, "b_1": c.ghost}
        forward = layer("forward").problem(silu, **named, out=out.ghost)
        named |= {"g_0": grad.ghost, "needs": ("a", "b_0", "b_1")}
        named["out"] = d_a.ghost, d_b.ghost, d_c.ghost, None, None
        gate = gate_problems.gated(z.ghost, w.ghost, silu, out.ghost)
        saved = grad.ghost, z.ghost, w.ghost
        slopes = gate_problems.gated_backward(*saved, silu, out=(g.ghost, h.ghost))
        parts = [("gated", gate, (z, w), (out,))]
        back = [("gated_backward", slopes, (grad, z, w), (g, h))]
        for x, y, slope, d in ((b, z, g, d_b), (c, w, h, d_c)):
            p = problem.gemm(a.ghost, x.ghost, None, "none", False, y.ghost)
            parts.insert(0, ("forward", p, (a, x), (y,)))
            made = d_a.ghost, d.ghost, None
            p = problem.gemm_backward(slope.ghost, a.ghost, x.ghost, None, "none", out=made)
            back.append(("backward", p, (slope, a, x), (d_a, d)))
        read, written = (a, b, c, grad, z, w), (d_a, d_b, d_c)
        again = layer("backward").problem(silu, **named)
        kept = layer("backward").problem(silu, **named, z_0=z.ghost, z_1=w.ghost)
        calls = {
            "forward": [("fused", forward, (a, b, c), (out,))],
            "two products and a gate": parts,
            "backward": [("fused", again, read, written)],
            "backward, saved": [("fused", kept, read, written)],
            "a gate's and two products', without the sum of both d_a": back,
        }
        found = {}
        for name, of in calls.items():
            steps = [step for kind, p, *how in of for step in recorded(p, kind, *how)]
            found[name] = steps, []
        for _ in range(7):
            for steps, turns in found.values():
                turns.append(watch.seconds(steps * 3) / 3)
        for name, (_, turns) in found.items():
            print(f"{m} x {k} -> {n}, {name}: {statistics.median(turns) * 1e3:.4g} ms", flush=True)


def tile_of(text):
    """The tile that ``BMxBNxBK:MRxNR`` says."""
    block, _, sums = text.partition(":")
    return WebGpuTile(*map(int, block.split("x")), *map(int, sums.split("x")), k_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--operations", nargs="+", default=["product", "forward", "backward"])
    parser.add_argument("--elements", type=int, default=1 << 27)
    parser.add_argument("--loops", action="store_true", help="wall time of calls in a loop")
    parser.add_argument("--gated", nargs="+", help="shapes M,K,N of gated layers")
    parser.add_argument("--chain", type=int, nargs="+", help="0 is one chain")
    parser.add_argument("--tile", type=tile_of, nargs="+", help="as 128x128x16:8x16")
    arguments = parser.parse_args()
    device = load("webgpu").device
    print(json.dumps(device.describe(), indent=1), flush=True)
    if arguments.tiles:
        tiles(device, arguments.sizes, arguments.operations)
        return
    if arguments.loops:
        cpu = device.adapter.kind == "CPU"
        loops(device, LOOPS[:2] if cpu else LOOPS, 1 << (18 if cpu else 24))
        return
    if arguments.gated:
        gated_layers(device, [tuple(map(int, x.split(","))) for x in arguments.gated])
        return
    if arguments.chain or arguments.tile:
        chains(device, arguments.sizes, arguments.chain or [tiling.CHAIN], arguments.tile)
        return
    shapes = [(size,) * 3 for size in arguments.sizes]
    products(device, shapes, np.float32, True)
    if device.adapter.kind != "CPU":
        products(device, [(8192, 2048, 512), (65536, 256, 256)], np.float32, False)
    if "float16" in device.dtypes:
        products(device, shapes[-1:], np.float16, False)
    if "float64" in device.dtypes:
        products(device, shapes[-2:-1], np.float64, False)
    gates(device, arguments.elements, np.float32)
    calls(device)


if __name__ == "__main__":
    main()
