"""Errors of the WGSL functions on a WebGPU adapter, against long double: a table of numerics.md.

    python docs/webgpu_ulp.py                 2^20 arguments of float32 and of float64
    python docs/webgpu_ulp.py --count 65536 --only float32

The adapter is a Vulkan one where there is any, or one that ``NUMFUSE_WEBGPU_ADAPTER`` names (any
part of its name or of its interface's). One compute pipeline evaluates every function of a module
for each argument.

Reference. The same formula in long double (64 bits), whose products, argument words and constants
carry their rounding errors along as in float64. So it is right to about 2^-60: the table's figures
of float64 are not its own errors.

Units. An error is given in units in the last place (ULP) of ``max(|f^(k)|, |f^(k+1)| / (1 + |x|))``
for the derivative of order k, so that a zero of a derivative has a scale, and of the value itself
for k = 0; below the smallest normal number the unit stays that of the smallest normal number.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from numfuse import activations
from numfuse import expr as ex
from numfuse.backends.webgpu.device import adapters as known
from numfuse.backends.webgpu.device.device import FEATURES
from numfuse.errors import BackendUnavailable
from numfuse.expr import Expr, topological
from numfuse.language import wgsl

LONG = np.longdouble
ENDINGS = ("", "_prime", "_second", "_third")
#: Arguments of one submission: all results of all functions stay below 128 MiB, the least that an
#: adapter can bind.
BLOCK = 1 << 17
WORKGROUP = 64

# --- the adapter --------------------------------------------------------------------------------


class Unavailable(Exception):
    """No adapter, or not the one that was asked for."""


def adapters() -> list[Any]:
    """Every adapter of numfuse's list (a second one of wgpu's would not go beside it)."""
    try:
        return [adapter.handle for adapter in known.adapters()]
    except BackendUnavailable as why:
        raise Unavailable(str(why)) from why


def find_adapter() -> Any:
    """The first adapter that the environment names, Vulkan before others, a GPU before a CPU."""
    found = adapters()
    wanted = os.environ.get("NUMFUSE_WEBGPU_ADAPTER", "").lower()
    found = [a for a in found if wanted in f"{a.info['device']} {a.info['backend_type']}".lower()]
    if not found:
        raise Unavailable(f"no WebGPU adapter{f' is called {wanted!r}' if wanted else ''}")
    return min(
        found, key=lambda a: (a.info["backend_type"] != "Vulkan", a.info["adapter_type"] == "CPU")
    )


def module(functions: Mapping[str, Expr], dtype: str) -> str:
    """A shader that evaluates every function: ``y[f * n + i] = f(x[i])``."""
    texts = [wgsl.function(graph, name, dtype) for name, graph in functions.items()]
    real = {"float32": "f32", "float64": "f64"}[dtype]
    stores = "\n".join(
        f"    y[{k}u * n + i] = {name}(v);" for k, name in enumerate(functions)
    )  # fmt: skip
    main = f"""\
@group(0) @binding(0) var<storage, read> x: array<{real}>;
@group(0) @binding(1) var<storage, read_write> y: array<{real}>;

@compute @workgroup_size({WORKGROUP})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    let i = id.x;
    let n = arrayLength(&x);
    if (i >= n) {{
        return;
    }}
    let v = x[i];
{stores}
}}"""
    return "\n\n".join([wgsl.prelude("\n".join(texts), dtype), *texts, main]) + "\n"


class Runner:
    """Some functions as one compute pipeline: called with arguments, it gives a row for each."""

    def __init__(self, adapter: Any, functions: Mapping[str, Expr], dtype: str) -> None:
        missing = set(FEATURES[dtype]) - set(adapter.features)
        if missing:
            raise Unavailable(f"{adapter.info['device']} has no {', '.join(sorted(missing))}")
        self.names, self.dtype = tuple(functions), np.dtype(dtype)
        try:
            self.device = adapter.request_device_sync(required_features=list(FEATURES[dtype]))
        except RuntimeError as error:
            raise Unavailable(f"{adapter.info['device']} gives no device: {error}") from error
        shader = self.device.create_shader_module(code=module(functions, dtype))
        self.pipeline = self.device.create_compute_pipeline(
            layout="auto", compute={"module": shader, "entry_point": "main"}
        )

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        parts = [self._block(x[i : i + BLOCK]) for i in range(0, x.size, BLOCK)]
        return dict(zip(self.names, np.concatenate(parts, axis=1), strict=True))

    def _block(self, x: np.ndarray) -> np.ndarray:
        device, layout = self.device, self.pipeline.get_bind_group_layout(0)
        shape = len(self.names), x.size
        size = int(np.prod(shape)) * self.dtype.itemsize
        # What a shader does not write stays NaN.
        before = np.full(shape, np.nan, self.dtype)
        given = device.create_buffer_with_data(data=np.ascontiguousarray(x), usage="STORAGE")
        made = device.create_buffer_with_data(data=before, usage="STORAGE | COPY_SRC")
        entries = [
            {"binding": k, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
            for k, buffer in enumerate((given, made))
        ]
        group = device.create_bind_group(layout=layout, entries=entries)
        encoder = device.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(self.pipeline)
        work.set_bind_group(0, group)
        work.dispatch_workgroups(-(-x.size // WORKGROUP))
        work.end()
        device.queue.submit([encoder.finish()])
        result = np.frombuffer(device.queue.read_buffer(made, 0, size), self.dtype).reshape(shape)
        given.destroy()
        made.destroy()
        return result


# --- the reference ------------------------------------------------------------------------------
_SPLITTER = LONG(2) ** 32 + 1
_ROOT_HALF = np.sqrt(LONG(0.5))
_ROOT_PI = np.sqrt(4 * np.arctan(LONG(1)))


def _long(value: Any) -> Any:
    """An exact constant in long double."""
    if not isinstance(value, Fraction):
        return LONG(value)
    words = []
    for _ in range(2):
        words.append(float(value))
        value -= Fraction(words[-1])
    return LONG(words[0]) + LONG(words[1])


def _halves(a: Any) -> tuple[Any, Any]:
    big = a * _SPLITTER
    high = big - (big - a)
    return high, a - high


def _product_low(a: Any, b: Any) -> Any:
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    low = ((ah * bh - a * b) + ah * bl + al * bh) + al * bl
    return np.where(np.isfinite(low), low, 0)


def _fma(a: Any, b: Any, c: Any) -> Any:
    p = a * b
    s = p + c
    back = s - p
    low = (p - (s - back)) + (c - back) + _product_low(a, b)
    return s + np.where(np.isfinite(low), low, 0)


def _erfc(z: Any) -> Any:
    """erfc(z) e^(z^2) for z >= 0: a series of positive terms, or the continued fraction."""
    w = np.minimum(z, 1)
    term = total = w
    for n in range(1, 40):
        term = term * 2 * w * w / (2 * n + 1)
        total = total + term
    near = np.exp(w * w) - 2 / _ROOT_PI * total
    w = np.maximum(z, 1)
    below = w
    for n in range(250, 0, -1):
        below = w + LONG(n) / 2 / below
    return np.where(z < 1, near, 1 / (_ROOT_PI * below))


def _scaled_exp(factor: Any, hi: Any, lo: Any) -> Any:
    return factor * np.exp(hi) * np.exp(lo)


def _scaled_sigmoid(factor: Any, hi: Any, lo: Any) -> Any:
    e = np.exp(-np.abs(hi)) * np.exp(np.where(hi < 0, lo, -lo))
    return factor * np.where(hi < 0, e, 1) / (1 + e)


def _scaled_bell(factor: Any, hi: Any, lo: Any) -> Any:
    e = np.exp(-np.abs(hi)) * np.exp(np.where(hi < 0, lo, -lo))
    return factor * e / ((1 + e) * (1 + e))


def _scaled_normal_cdf(factor: Any, x: Any) -> Any:
    y = np.minimum(np.abs(x), 100)
    tail = _scaled_exp(_erfc(y * _ROOT_HALF) / 2, -y * y / 2, -_product_low(y, y) / 2)
    return factor * np.where(x > 0, 1 - tail, tail)


def _erf(x: Any) -> Any:
    z = np.abs(x)
    w = np.minimum(z, 1)
    term = total = w
    for n in range(1, 40):
        term = term * 2 * w * w / (2 * n + 1)
        total = total + term
    far = 1 - _erfc(z) * np.exp(-z * z)
    return np.copysign(np.where(z < 1, 2 / _ROOT_PI * total * np.exp(-w * w), far), x)


_OPERATIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "abs": np.abs, "sqrt": np.sqrt, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "both": np.logical_and, "either": np.logical_or,
    "negation": np.logical_not, "where": np.where, "maximum": np.maximum,
    "minimum": np.minimum, "copysign": np.copysign, "fma": _fma, "product": np.multiply,
    "product_low": _product_low, "exp": np.exp, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "sigmoid": lambda x: _scaled_sigmoid(1, x, 0), "erf": _erf,
    "scaled_normal_cdf": _scaled_normal_cdf, "scaled_exp": _scaled_exp,
    "scaled_sigmoid": _scaled_sigmoid, "scaled_bell": _scaled_bell,
}  # fmt: skip


def reference(graph: Expr, x: np.ndarray) -> np.ndarray:
    """The graph in long double."""
    value: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for e in topological((graph,)):
            if e.op == "x":
                value[e] = x.astype(LONG)
            elif e.op == "const":
                value[e] = _long(e.payload)
            else:
                value[e] = _OPERATIONS[e.op](*(value[a] for a in e.args))
        return np.broadcast_to(value[graph], x.shape).astype(LONG)


# --- errors -------------------------------------------------------------------------------------
def table_functions() -> dict[str, Expr]:
    """Every activation and its derivatives; a prefix keeps their names apart from those of WGSL."""
    return {
        f"act_{name}{ending}": act.trace(order)
        for name, act in activations().items()
        for order, ending in enumerate(ENDINGS)
    }


@functools.cache
def _above(graph: Expr) -> Expr:
    return ex.differentiate(graph)


def errors(graph: Expr, order: int, x: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The error of each result in ULP; infinite for a NaN or an infinity that should be none."""
    want, info = reference(graph, x), np.finfo(x.dtype)
    scale = np.abs(want)
    if order:
        # Beyond 30 no derivative has a zero, and the next one may overflow on its way.
        near = np.abs(x) < 30
        slope = np.where(near, np.abs(reference(_above(graph), np.where(near, x, 1))), 0)
        scale = np.maximum(scale, slope / (1 + np.abs(x)))
    with np.errstate(all="ignore"):
        rounded = want.astype(x.dtype)
        unit = np.spacing(np.maximum(scale, info.smallest_normal).astype(x.dtype)).astype(LONG)
        off = np.abs(got.astype(LONG) - want) / unit
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(same & ~np.isfinite(rounded), 0, np.where(np.isnan(off), np.inf, off))


def arguments(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Half of them even over +-20, a quarter over all tails, and a quarter over all finite bits."""
    random = np.random.default_rng(seed)
    tail, bits = {"float32": (110.0, 32), "float64": (760.0, 64)}[dtype]
    by_bits = random.integers(0, 2**bits, count // 4, f"u{bits // 8}").view(dtype)
    x = np.concatenate(
        [
            random.uniform(-20, 20, count - 2 * (count // 4)).astype(dtype),
            random.uniform(-tail, tail, count // 4).astype(dtype),
            np.where(np.isfinite(by_bits), by_bits, 0).astype(dtype),
        ]
    )
    return x


def measure(adapter: Any, dtype: str, count: int) -> dict[str, tuple[float, float]]:
    """The largest error of each function in ULP, and the argument where it is met."""
    functions = table_functions()
    run, x = Runner(adapter, functions, dtype), arguments(dtype, count)
    found = dict.fromkeys(functions, (0.0, 0.0))
    for first in range(0, x.size, BLOCK):
        part = x[first : first + BLOCK]
        for k, (name, got) in enumerate(run(part).items()):
            off = errors(functions[name], k % len(ENDINGS), part, got)
            i = int(off.argmax())
            found[name] = max(found[name], (float(off[i]), float(part[i])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of the WGSL functions.")
    parser.add_argument("--count", type=int, default=1 << 20, help="how many arguments")
    parser.add_argument("--only", default="float32,float64", help="dtypes")
    parser.add_argument("--where", action="store_true", help="the arguments of the largest errors")
    how = parser.parse_args()
    adapter = find_adapter()
    dtypes = how.only.split(",")
    tables = {dtype: measure(adapter, dtype, how.count) for dtype in dtypes}
    info = adapter.info
    print(
        f"{info['device']}, {info['backend_type']}, {info['description']}: {' / '.join(dtypes)}\n"
    )
    print("| | value | first derivative | second | third |\n|---|---|---|---|---|")
    for name in activations():
        cells = []
        for ending in ENDINGS:
            rows = [table[f"act_{name}{ending}"] for table in tables.values()]
            at = [f" at {x:.9g}" if how.where else "" for _, x in rows]
            cells.append(" / ".join(f"{e:.3g}{w}" for (e, _), w in zip(rows, at, strict=True)))
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
