"""Every way of some products on a GPU, first right and then timed; and what `numfuse.tune` makes.

    python asv_benches/cuda_ways.py --prepare 14           everything: some 4 minutes on 16 cores
    python asv_benches/cuda_ways.py --only small --rounds 15
    python asv_benches/cuda_ways.py --check                the results alone
    python asv_benches/cuda_ways.py --products f32:577x1600x1664:T:slope f64:4*196x1664x2816
    python asv_benches/cuda_ways.py --products bf16:333x1000x777:gated

Of each product all ways of all tiers are run (`tiers.ways`). Results are compared with float64
within a bound for each element, and ways that add up in the same order with each other bit by bit.
Then they are timed by turns as `tune` does, beside the fastest of PyTorch's ways. At last a call is
tuned, and run again in a process that is switched to what was kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cuda_tiles import prepare

import numfuse as nf

DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
#: Roundoffs of a sum and of a store.
UNITS = {"f32": (2.0**-24,) * 2, "f64": (2.0**-53,) * 2,
         "bf16": (2.0**-22, 2.0**-8), "f16": (2.0**-22, 2.0**-11)}  # fmt: skip
#: Ways of a product that are run.
MOST = 12


@dataclass(frozen=True)
class Work:
    """One product: a layer (M, K, N) of a batch, d_b of one, its slope with column sums; or gated.

    A gated layer ("gated") is two sums over one left factor.
    """

    group: str
    dtype: str
    m: int
    k: int
    n: int
    batch: int = 0
    turned: bool = False
    what: str = "layer"

    def __str__(self) -> str:
        size = f"{self.m} x {self.k} x {self.n}"
        size = f"{self.batch} x ({size})" if self.batch else size
        return f"{self.dtype} {self.what} {size}{', (out, in)' * self.turned}"


WORK = [
    Work("turned", "f32", 2048, 2048, 2048, turned=True),
    Work("turned", "f32", 1024, 1024, 1024, turned=True),
    Work("turned", "f32", 512, 512, 512, turned=True),
    Work("turned", "f32", 1, 5000, 3000, turned=True),
    Work("turned", "f32", 2046, 2046, 2046, turned=True),
    Work("turned", "f32", 4096, 1024, 784),
    Work("turned", "f32", 4096, 1024, 784, what="slope"),
    Work("batch", "f32", 777, 257, 130, 16),
    Work("batch", "f32", 777, 257, 130, 16, what="slope"),
    Work("batch", "f32", 777, 257, 130, 16, what="d_b"),
    *(Work("small", d, 20, 16, 16, count) for d in DTYPES for count in (1000, 100_000)),
    Work("small", "f32", 8, 8, 8, 100_000),
    Work("small", "f32", 32, 16, 32, 20_000, turned=True),
    Work("small", "f32", 20, 16, 16, 100_000, what="slope"),
    Work("small", "f64", 20, 16, 16, 100_000, what="d_b"),
    Work("thin", "f32", 1, 4096, 4096),
    Work("thin", "f32", 8, 4096, 4096),
    Work("thin", "f32", 1, 4096, 11008, turned=True),
    Work("thin", "f64", 8, 4096, 4096),
    Work("thin", "bf16", 1, 4096, 11008),
    Work("thin", "bf16", 8, 4096, 11008, turned=True),
    Work("thin", "bf16", 16384, 2048, 8),
    Work("thin", "f32", 17574, 1670, 1, turned=True),
    Work("thin", "f32", 17574, 1670, 1, turned=True, what="d_b"),
    Work("thin", "f32", 17574, 1670, 1, what="slope"),
    Work("thin", "f32", 52, 484, 4375, turned=True),
    Work("thin", "f32", 512, 4096, 3200, turned=True),
    Work("others", "bf16", 3000, 1000, 5000),
    Work("others", "f64", 3000, 500, 700),
    Work("others", "f16", 1001, 777, 333),
    Work("others", "f32", 300, 7000, 100),
]


def product_of(word: str) -> Work:
    """Return a product by its word: dtype, [BATCH*]MxKxN, "T" for (out, in), and what it is of."""
    dtype, sizes, *more = word.split(":")
    *batch, sizes = sizes.split("*")
    m, k, n = map(int, sizes.split("x"))
    what = next((x for x in more if x != "T"), "layer")
    return Work("given", dtype, m, k, n, int(batch[0]) if batch else 0, "T" in more, what)


class Layer:
    """The operands of a product, numfuse's call and PyTorch's ways."""

    def __init__(self, work: Work) -> None:
        self.work, kind = work, DTYPES[work.dtype]
        lead = (work.batch,) if work.batch else ()
        generator = torch.Generator("cuda").manual_seed(work.m + work.k)

        def normal(*lengths: int) -> Any:
            x = torch.randn(*lengths, device="cuda", generator=generator)
            return x.to(kind)

        self.a, self.grad = normal(*lead, work.m, work.k), normal(*lead, work.m, work.n)
        if work.turned:
            self.b = normal(*lead, work.n, work.k).mT
        else:
            self.b = normal(*lead, work.k, work.n)
        self.bias = normal(work.n)
        self.up = normal(*self.b.mT.shape).mT if work.turned else normal(*self.b.shape)

    def numfuse(self) -> Any:
        """Return the result of one product, or of the slope's with its column sums."""
        if self.work.what == "d_b":
            return nf.matmul_bias_activation_bwd(self.grad, self.a, self.b, needs=("b",)).d_b
        if self.work.what == "slope":
            given = self.grad, self.a, self.b, self.bias, "relu"
            return nf.matmul_bias_activation_bwd(*given, needs=("bias",)).d_bias
        if self.work.what == "gated":
            return nf.matmul_activation_mul(self.a, self.b, self.up, activation="relu")
        return nf.matmul_bias_activation(self.a, self.b, self.bias, "relu")

    def torch(self) -> dict[str, Callable[[], Any]]:
        """Return PyTorch's ways."""
        a, b, bias, grad = self.a, self.b, self.bias, self.grad
        if self.work.what == "d_b":
            return {"matmul": lambda: a.mT @ grad}
        if self.work.what == "slope":
            return {"eager": lambda: torch.ops.aten.threshold_backward(
                grad, a @ b + bias, 0).reshape(-1, b.shape[-1]).sum(0)}  # fmt: skip
        if self.work.what == "gated":
            both = torch.cat((b, self.up), -1)

            def wide() -> Any:
                gate, up = (a @ both).chunk(2, -1)
                return torch.relu(gate) * up

            return {"two": lambda: torch.relu(a @ b) * (a @ self.up), "wide": wide}
        found = {"matmul, add, relu": lambda: torch.relu(a @ b + bias)}
        if a.ndim == 2:
            found["addmm, relu"] = lambda: torch.relu(torch.addmm(bias, a, b))
            found["fused"] = lambda: torch._addmm_activation(bias, a, b)
        else:
            found["baddbmm, relu"] = lambda: torch.relu(torch.baddbmm(bias, a, b))
        return found

    def wrong(self, result: Any) -> float:
        """Return the largest error beside its bound; 1 or less is right."""
        a, b, bias, grad = (x.double() for x in (self.a, self.b, self.bias, self.grad))
        unit, stored = UNITS[self.work.dtype]
        if self.work.what == "gated":
            sums, more = a @ b, a @ self.up.double()
            sizes = a.abs() @ b.abs(), a.abs() @ self.up.double().abs()
            exact, off = torch.relu(sums) * more, 2 * (a.shape[-1] + 4) * unit
            bound = off * (sizes[0] * more.abs() + sums.abs() * sizes[1])
            bound += off * off * sizes[0] * sizes[1] + 2 * stored * exact.abs() + 1e-300
            return float(((result.double() - exact).abs() / bound).max())
        if self.work.what == "d_b":
            exact, size, terms = a.mT @ grad, a.mT.abs() @ grad.abs(), self.work.m
        else:
            sums, size, terms = a @ b + bias, a.abs() @ b.abs() + bias.abs(), self.work.k
            exact = torch.relu(sums)
            if self.work.what == "slope":
                # what rounding may put on the other side of 0
                near = sums.abs() <= 4 * (terms + 4) * unit * size
                flat = (grad * (sums > 0)).reshape(-1, grad.shape[-1])
                off = (grad.abs() * near).reshape(-1, grad.shape[-1]).sum(0)
                bound = off + 64 * (unit + stored) * flat.abs().sum(0)
                return float(((result.double() - flat.sum(0)).abs() / (bound + 1e-300)).max())
        bound = 2 * (terms + 4) * unit * size + 2 * stored * exact.abs() + 1e-300
        return float(((result.double() - exact).abs() / bound).max())


def ways(layer: Layer) -> Iterator[tuple[str, Any, str, Callable[[], Any]]]:
    """Return each way's name, its result, what tells its order, and its program as a call."""
    from numfuse.backends.cuda.call import entry, tuner
    from numfuse.backends.cuda.plan import tiers, tuned

    with tuned.trial(True) as trial:
        try:
            first = tuner._recorded(layer.numfuse)
            ((key, (product, info)),) = trial.seen.items()
            same = {name for name, _, _ in tiers.ways(product, info)}
            chosen = f"chosen, {tiers.name_of(product, info) or 'in two launches'}"
            runs = [(chosen, first, "same")]
            for name, _, _ in tiers.ways(product, info, True)[:MOST]:
                trial.ways[key] = name
                runs.append((name, tuner._recorded(layer.numfuse), "same" * (name in same)))
            for name, calls, order in runs:
                run = calls.program.launch
                yield name, calls.result, order, lambda r=run, c=calls: r(c.stream, c.addresses)
        finally:
            entry.forget()


def compiled(work: Work) -> None:
    """Compile all ways of a product."""
    for _ in ways(Layer(work)):
        pass
    torch.cuda.synchronize()


def measured(work: Work, rounds: int) -> bool:
    """Print the ways of a product and their times; return whether all are right."""
    from cuda_gpu import Clock

    layer, right, bits = Layer(work), True, None
    contestants: dict[str, Callable[[], Any]] = {}
    for name, result, order, call in ways(layer):
        off = layer.wrong(result)
        bits = result if bits is None else bits
        differs = bool(order) and not torch.equal(bits, result)
        if not off <= 1 or differs:
            right = False
            print(f"  WRONG, {work}, {name}: {off:.2g} of the bound{', other bits' * differs}")
            continue
        contestants[name] = call
    if rounds:
        times = Clock(rounds).device(contestants | layer.torch())
        best = min(t for name, t in times.items() if name not in contestants)
        ours = next(iter(contestants))
        print(f"{work}: {best / times[ours]:.2f} of PyTorch's best {best * 1e6:.1f} us")
        for name, t in sorted(times.items(), key=lambda x: x[1])[:8]:
            print(f"    {t * 1e6:8.1f} {name}")
        if sorted(times, key=lambda x: times[x]).index(ours) > 7:
            print(f"    {times[ours] * 1e6:8.1f} {ours}")
    else:
        print(f"{work}: {len(contestants)} ways, {'right' if right else 'WRONG'}")
    sys.stdout.flush()
    return right


def tuned_again() -> bool:
    """Tune a call, and run it in another process that takes what was kept; print both."""
    text = (
        "import sys, torch, numfuse as nf\n"
        "torch.manual_seed(0)\n"
        "a, b = (torch.randn(s, device='cuda') for s in ((2048, 1500), (2048, 1500)))\n"
        "if sys.argv[1:]:\n"
        "    for c in nf.tune('matmul_bias_activation', a, b.mT, None, 'gelu'):\n"
        "        print(c.product, '|', c.way or 'as chosen', c.before, c.seconds, c.tried)\n"
        "out = nf.matmul_bias_activation(a, b.mT, None, 'gelu')\n"
        "print(nf.last_call().tiling, out.view(torch.int32).long().sum().item())\n"
    )
    with tempfile.TemporaryDirectory() as kept:
        lines = []
        for on, arguments in (("0", []), ("0", ["tune"]), ("1", [])):
            environment = {**os.environ, "NUMFUSE_TUNED": on, "XDG_CACHE_HOME": kept}
            environment |= {"NUMBA_CACHE_DIR": kept}
            command = [sys.executable, "-c", text, *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            print(done.stdout.strip() or done.stderr[-2000:])
            lines.append(done.stdout.split()[-1:])
    # (the bits of the result are the same, whatever way was taken)
    return bool(lines[0]) and lines[0] == lines[1] == lines[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[], help="turned, batch, small, thin, others, tune"
    )
    parser.add_argument("--products", nargs="*", default=[], help="these, in place of the table's")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument(
        "--prepare", type=int, default=0, metavar="N", help="compile in N processes"
    )
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = [w for w in WORK if not arguments.only or w.group in arguments.only]
    if arguments.products:
        chosen = [product_of(word) for word in arguments.products]
    if arguments.prepare:
        prepare(chosen, compiled, arguments.prepare)  # type: ignore[arg-type]
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", flush=True)
    right = True
    for work in chosen:
        try:
            right &= measured(work, 0 if arguments.check else arguments.rounds)
        except Exception as error:
            right = False
            print(f"{work}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
    if "tune" in arguments.only or not (arguments.only or arguments.products):
        right &= tuned_again()
    print("all right" if right else "SOMETHING IS WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
