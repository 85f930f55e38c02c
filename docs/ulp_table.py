"""Errors of the compiled activations against double-double arithmetic: the tables of numerics.md.

    python docs/ulp_table.py                  every 4099th float32, 2^20 float64, every half: 20 s
    python docs/ulp_table.py --exhaustive     all 2^32 float32 and 2^27 float64: minutes
    python docs/ulp_table.py --check 100000   the reference itself against mpmath

It stands beside the page that it makes, because it is neither a benchmark nor a test: the test
suite runs it on a sample (`tests/language/test_ulp_table.py`), so that the page cannot grow
stale unnoticed.

What is measured is what users get: values and first derivatives are results of the public
functions (``activation(x) * 1`` and ``1 * 1 * activation'(x)``, whose products are exact); a second
derivative is the value of an activation that is made of it, in the same row function.

Reference. All in double-double arithmetic, 106 bits of which about 95 are right: e^v by a Taylor
series, and from p = e^-|v| - 1, never cancelling, everything else by sums, products and quotients.
A result is carried with an exponent of its own, so that it never underflows.

Units. An error is given in units in the last place (ULP) of the exact result; below the smallest
normal number the unit stays that of the smallest normal number. Within 1/4 of a zero of a
derivative no relative bound can hold, as the zero itself is no floating-point number: there the
bound is 4 ULP and a multiple of eps / 2, and the table gives that multiple ("near zeros").
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numba
import numpy as np
from numba import njit

import numfuse as nf
from numfuse.backends.cpu import host
from numfuse.backends.cpu.llvm import intrinsics
from numfuse.backends.cpu.llvm.primitives import exponent_parts, fused, select, two_powers_of_two

NAMES = ("gelu", "silu", "sigmoid", "tanh")
ORDERS = (0, 1, 2)
FUNCTIONS = tuple(itertools.product(NAMES, ORDERS))
#: Where a derivative crosses zero anywhere but at 0, where all odd ones keep their relative error.
ZEROS = {
    ("gelu", 1): (-0.7524614220710162,),
    ("gelu", 2): (-1.4185040087908284, 1.4185040087908284),
    ("silu", 1): (-1.2784645427610738,),
    ("silu", 2): (-2.3993572805154677, 2.3993572805154677),
}
NEAR = 0.25
#: Units of the relative part of the bound near a zero.
RELATIVE = 4.0
BLOCK = 1 << 15

# --- double-double arithmetic -------------------------------------------------------------------
# Dekker 1971 and Knuth; a product's error by fma. No fast-math flag: each sum is what it says.
_jit = njit(forceinline=True, error_model="numpy")
#: Beyond 1.5 * 2^52 a float64 is an integer: adding this rounds to the nearest one.
_MAGIC = 1.5 * 2.0**52


def _words(text: str, head_bits: int | None = None) -> tuple[float, ...]:
    """A decimal number as two float64 words, or as three with a short first one."""
    import mpmath as mp

    with mp.workdps(80):
        value, words = mp.mpf(text), []
        if head_bits:
            words.append(float(mp.nint(value * 2**head_bits) / 2**head_bits))
            value -= words[0]
        for _ in range(2):
            words.append(float(value))
            value -= words[-1]
    return tuple(words)


_LN2 = _words("0.69314718055994530941723212145817656807550013436025525412068", 32)
_V1 = _words("1.59576912160573071175978423973752747390343")
_V3 = _words("0.07135481627260024877633875227986354099559")
_LOG2E = math.log2(math.e)


@_jit
def _sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@_jit
def _quick(a, b):
    """The same for \\|a\\| >= \\|b\\|."""
    s = a + b
    return s, b - (s - a)


@_jit
def _add(a, b):
    s, e = _sum(a[0], b[0])
    t, f = _sum(a[1], b[1])
    s, e = _quick(s, e + t)
    return _quick(s, e + f)


@_jit
def _mul(a, b):
    p = a[0] * b[0]
    e = fused(a[0], b[0], -p) + (a[0] * b[1] + a[1] * b[0])
    return _quick(p, e)


@_jit
def _neg(a):
    return -a[0], -a[1]


@_jit
def _times(a, s):
    """By a power of two, or another factor that makes no error."""
    return a[0] * s, a[1] * s


@_jit
def _div(a, b):
    q = a[0] / b[0]
    r = _add(a, _neg(_mul((q, 0.0), b)))
    q2 = r[0] / b[0]
    r = _add(r, _neg(_mul((q2, 0.0), b)))
    q3 = r[0] / b[0]
    s, e = _quick(q, q2)
    return _quick(s, e + q3)


@_jit
def _pick(condition, a, b):
    return select(condition, a[0], b[0]), select(condition, a[1], b[1])


def _series() -> Any:
    """(e^r - 1) / r for \\|r\\| <= ln2 / 2: 22 terms, those of the last 2^-45 in float64."""
    import mpmath as mp

    with mp.workdps(60):
        terms = [_words(mp.nstr(1 / mp.factorial(k), 50)) for k in range(1, 23)]
    text = "    t = " + repr(terms[21][0]) + "\n"
    for k in range(20, 10, -1):
        text += f"    t = fused(t, r[0], {terms[k][0]!r})\n"
    text += "    q = (t, 0.0)\n"
    for k in range(10, -1, -1):
        text += f"    q = add({terms[k]!r}, mul(r, q))\n"
    scope: dict[str, Any] = {"fused": fused, "add": _add, "mul": _mul}
    exec(f"def series(r):\n{text}    return q", scope)
    return _jit(scope["series"])


_series_of = _series()


@_jit
def _decay(v):
    """Whether v < 0; n and m, e^-abs(v) = 2^n m; that and that less one, and plus one."""
    negative = v[0] < 0.0
    size = _pick(negative, v, _neg(v))
    size = _pick(size[0] < -1100.0, (-1100.0, 0.0), size)
    shifted = size[0] * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    r = _sum(size[0] - n * _LN2[0], size[1])
    r = _add(r, _neg(_mul((n, 0.0), (_LN2[1], _LN2[2]))))
    p = _mul(r, _series_of(r))
    m = _add((1.0, 0.0), p)
    # Below 2^-400 it is nothing beside 1.
    _, s = two_powers_of_two(_MAGIC + 2.0 * select(n < -400.0, -400.0, n))
    s = select(n < -400.0, 0.0, s)
    em = _add(_times(p, s), _sum(-1.0, s))
    return negative, n, m, _times(m, s), em, _add((2.0, 0.0), em)


@_jit
def _half_tanh(negative, v, em, d):
    """tanh(v / 2) and its exponent: v / 2 itself where v is tiny."""
    t = _div(_neg(em), d)
    t = _pick(negative, _neg(t), t)
    tiny = abs(v[0]) < 1e-60
    t = _pick(tiny, _times(v, 0.5 * 2.0**300), t)
    return t, select(tiny, -300.0, 0.0)


@_jit
def _sigmoids(x):
    """s(x), s(-x), s'(x) of a double word, each a double word and an exponent; tanh(x / 2)."""
    negative, n, m, e, em, d = _decay(x)
    one = (1.0, 0.0)
    s = _div(_pick(negative, m, one), d)
    other = _div(_pick(negative, one, e), d)
    bell = _div(m, _mul(d, d))
    t, tn = _half_tanh(negative, x, em, d)
    return s, select(negative, n, 0.0), other, bell, n, t, tn


@_jit
def _at_least(x, low):
    return select(x < low, low, x)


@_jit
def _between(x, limit):
    return select(x > limit, limit, _at_least(x, -limit))


@_jit
def _lifted(x):
    """x and an exponent, so that its products are normal numbers."""
    small = abs(x) < 1e-60
    return select(small, x * 2.0**300, x), select(small, -300.0, 0.0)


def gelu(x):
    xs, xn = _lifted(_at_least(x, -1200.0))  # beyond, e^-|v| is held
    w = (_between(x, 30.0), 0.0)
    square = _mul(w, w)
    cubic = _mul(square, _V3)
    s, sn, other, bell, n, t, _ = _sigmoids(_mul(w, _add(_V1, cubic)))
    v1 = _add(_V1, _mul(cubic, (3.0, 0.0)))
    v2 = _mul(w, _mul((6.0, 0.0), _V3))
    value = _mul((xs, 0.0), s)
    slope = _mul(s, _add((1.0, 0.0), _mul(_mul(w, v1), other)))
    bend = _mul(w, _add(v2, _neg(_mul(t, _mul(v1, v1)))))
    second = _mul(bell, _add(_times(v1, 2.0), bend))
    return value, sn + xn, slope, sn, second, n


def silu(x):
    xs, xn = _lifted(_at_least(x, -1200.0))
    w = (_between(x, 1200.0), 0.0)
    s, sn, other, bell, n, t, _ = _sigmoids(w)
    slope = _mul(s, _add((1.0, 0.0), _mul(w, other)))
    second = _mul(bell, _add((2.0, 0.0), _neg(_mul(w, t))))
    return _mul((xs, 0.0), s), sn + xn, slope, sn, second, n


def sigmoid(x):
    s, sn, _, bell, n, t, tn = _sigmoids((_between(x, 1200.0), 0.0))
    return s, sn, bell, n, _mul(bell, _neg(t)), n + tn


def tanh(x):
    _, _, _, bell, n, t, tn = _sigmoids((_between(2.0 * x, 1200.0), 0.0))
    return t, tn, _times(bell, 4.0), n, _mul(bell, _times(t, -8.0)), n + tn


REFERENCE = {f.__name__: _jit(f) for f in (gelu, silu, sigmoid, tanh)}


# --- errors -------------------------------------------------------------------------------------
@_jit
def _scaled_error(got, h, n):
    """\\|got - h 2^n\\| 2^-n: 2^-n in two factors, so that a subnormal result is scaled exactly."""
    s1, s2 = two_powers_of_two(_MAGIC - n)
    return abs((((got * s1) * s2) - h[0]) - h[1])


@_jit
def _units(got, h, n, mantissa, lowest):
    """The error in ULP."""
    size = abs(h[0])
    k, m, _ = exponent_parts(select(size == 0.0, 1e-300, size))
    k = select(m < 1.0, k - 1.0, k) + n
    unit = select(k < lowest, lowest, k) - mantissa - n
    u1, u2 = two_powers_of_two(_MAGIC - select(unit > 1900.0, 1900.0, unit))
    return (_scaled_error(got, h, n) * u1) * u2


_wide_vectors = intrinsics.make_wide_vectors(8 * host.vector_bytes())


def _measure(name: str) -> Any:
    """errors(x, g0, g1, g2, mantissa, lowest): results become their errors in ULP.

    In place, because LLVM gives up on a loop with too many arrays that might overlap.
    """
    reference = REFERENCE[name]

    @njit(nogil=True, error_model="numpy")
    def errors(x, g0, g1, g2, mantissa, lowest):
        _wide_vectors()
        for i in range(x.size):
            h0, n0, h1, n1, h2, n2 = reference(x[i])
            g0[i] = _units(g0[i], h0, n0, mantissa, lowest)
            g1[i] = _units(g1[i], h1, n1, mantissa, lowest)
            g2[i] = _units(g2[i], h2, n2, mantissa, lowest)

    return errors


def _values(name: str) -> Any:
    """values(x, out): per argument and order two words and their exponent."""
    reference = REFERENCE[name]

    @njit(nogil=True, error_model="numpy")
    def values(x, out):
        for i in range(x.size):
            h0, n0, h1, n1, h2, n2 = reference(x[i])
            out[i] = h0[0], h0[1], n0, h1[0], h1[1], n1, h2[0], h2[1], n2

    return values


@dataclass
class Row:
    """What is known of one function in one dtype so far."""

    worst: float = 0.0
    at: float = math.nan
    normal: float = 0.0  # the worst where result and argument are normal numbers
    count: int = 0
    above: list[int] = field(default_factory=lambda: [0, 0, 0])  # 0.5, 1 and 2 ULP
    absolute: float = 0.0  # near zeros
    wrong: int = 0  # NaN or infinite where it may not be

    def add(self, other: Row) -> None:
        if other.worst > self.worst:
            self.worst, self.at = other.worst, other.at
        self.normal = max(self.normal, other.normal)
        self.count += other.count
        self.above = [a + b for a, b in zip(self.above, other.above, strict=True)]
        self.absolute = max(self.absolute, other.absolute)
        self.wrong += other.wrong


Table = dict[tuple[str, int], Row]


def _second(name: str) -> Any:
    """An activation whose value is the second derivative of another one."""
    act = nf.activations()[name]
    return nf.activation(act.second_derivative, name=f"{name}_second", source="docs/ulp_table.py")


class Sweep:
    """Measures blocks of arguments of one dtype."""

    def __init__(self, dtype: Any, names: tuple[str, ...] = NAMES) -> None:
        self.dtype = np.dtype(dtype)
        info = ml_dtypes.finfo(self.dtype)
        self.mantissa, self.lowest = float(info.nmant), float(info.minexp)
        self.tiny, self.half_eps = float(info.smallest_normal), float(info.eps) / 2
        self.names = names
        self.acts = {name: (nf.activations()[name], _second(name)) for name in names}
        self.errors = {name: _measure(name) for name in names}
        self.values = {name: _values(name) for name in names}

    def got(self, name: str, x: np.ndarray) -> np.ndarray:
        """The three results of numfuse as float64."""
        act, second = self.acts[name]
        one = np.ones_like(x)
        value = nf.activation_mul(x, one, act)
        slope = nf.activation_mul_bwd(one, x, one, act, needs=("a",), guard=False).d_a
        bend = nf.activation_mul(x, one, second)
        return np.stack([y.astype(np.float64) for y in (value, slope, bend)])

    def block(self, x: np.ndarray) -> Table:
        """Errors of all functions over finite arguments."""
        numba.set_num_threads(1)
        wide = x.astype(np.float64)
        found: Table = {}
        for name in self.names:
            got = self.got(name, x)
            units = got.copy()
            self.errors[name](wide, *units, self.mantissa, self.lowest)
            for order in ORDERS:
                found[name, order] = self._row(name, order, wide, got[order], units[order])
        return found

    def _row(self, name: str, order: int, x: Any, got: Any, u: Any) -> Row:
        row = Row(count=x.size)
        if not np.isfinite(u.sum()):
            row.wrong = int(np.count_nonzero(~np.isfinite(u)))
        for zero in ZEROS.get((name, order), ()):
            near = np.abs(x - zero) < NEAR
            if near.any():
                out = np.empty((int(near.sum()), 9))
                self.values[name](x[near], out)
                h, low, n = out[:, 3 * order : 3 * order + 3].T
                off = np.abs(
                    (got[near] - np.ldexp(h, n.astype(int))) - np.ldexp(low, n.astype(int))
                )
                rest = off * (1.0 - np.minimum(1.0, RELATIVE / np.maximum(u[near], 1e-9)))
                row.absolute = max(row.absolute, float(rest.max()) / self.half_eps)
                u = np.where(near, 0.0, u)
        i = int(u.argmax())
        row.worst, row.at = float(u[i]), float(x[i])
        if abs(got[i]) >= self.tiny and abs(x[i]) >= self.tiny:
            row.normal = row.worst
        else:
            normal = (np.abs(got) >= self.tiny) & (np.abs(x) >= self.tiny)
            row.normal = float(u[normal].max(initial=0.0))
        if row.worst > 0.5:
            row.above = [int(np.count_nonzero(u > limit)) for limit in (0.5, 1.0, 2.0)]
        return row

    def run(self, blocks: Iterator[np.ndarray], workers: int, table: Table) -> None:
        """Add all blocks to the table, on some threads; few blocks wait at a time."""
        with ThreadPoolExecutor(workers) as pool:
            while some := list(itertools.islice(blocks, 8 * workers)):
                for found in pool.map(self.block, some):
                    for key, row in found.items():
                        table.setdefault(key, Row()).add(row)


def floats32(start: int, stop: int, step: int) -> Iterator[np.ndarray]:
    """The finite float32 numbers among those with the bits start, start + step, ..."""
    for first in range(start, stop, step * BLOCK):
        bits = np.arange(first, min(stop, first + step * BLOCK), step, dtype=np.uint64)
        x = bits.astype(np.uint32).view(np.float32)
        x = x[np.isfinite(x)]
        if x.size:
            yield x


def floats64(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Half of them even over +-45, a quarter over the whole range of tails, the rest by bits."""
    rng = np.random.default_rng(seed)
    quarter = BLOCK // 4
    for _ in range(-(-count // BLOCK)):
        x = np.concatenate([
            rng.uniform(-45.0, 45.0, 2 * quarter),
            rng.uniform(-760.0, 760.0, quarter),
            rng.integers(0, 2**64, quarter, np.uint64).view(np.float64),
        ])  # fmt: skip
        yield x[np.isfinite(x)]


def halves(dtype: Any) -> Iterator[np.ndarray]:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # ml_dtypes complains of NaN
        finite = np.isfinite(x)
    yield x[finite]


# --- the reference against mpmath ---------------------------------------------------------------
def exact(name: str, x: Any) -> tuple[Any, Any, Any]:
    """Value, first and second derivative in mpmath, by the textbook."""
    import mpmath as mp

    x = mp.mpf(x)

    def logistic(v: Any) -> tuple[Any, Any, Any]:
        e = mp.exp(-abs(v))
        s = (1 if v >= 0 else e) / (1 + e)
        bell = e / (1 + e) ** 2
        t = mp.sign(v) * -mp.expm1(-abs(v)) / (1 + e)  # 1 - 2 s, with its sign turned
        return s, bell, -bell * t

    if name == "tanh":
        _, bell, second = logistic(2 * x)
        return mp.tanh(x), 4 * bell, 8 * second
    if name == "gelu":
        c = 2 * mp.sqrt(2 / mp.pi)
        k = mp.mpf("0.044715")
        s, bell, second = logistic(c * (x + k * x**3))
        v1, v2 = c * (1 + 3 * k * x * x), 6 * c * k * x
        return x * s, s + x * bell * v1, 2 * bell * v1 + x * (second * v1 * v1 + bell * v2)
    s, bell, second = logistic(x)
    if name == "sigmoid":
        return s, bell, second
    return x * s, s + x * bell, 2 * bell + x * second


def check(count: int, seed: int = 1) -> dict[tuple[str, int], float]:
    """The largest error of the reference against mpmath, log2 of ULP of float64, by function."""
    import mpmath as mp

    rng = np.random.default_rng(seed)
    found: dict[tuple[str, int], float] = {}
    parts = [rng.uniform(-r, r, -(-count // 5)) for r in (1.0, 6.0, 45.0, 740.0)]
    x = np.concatenate([*parts, np.exp(rng.uniform(-740, 0, -(-count // 5)))])[:count]
    for name in NAMES:
        out = np.empty((x.size, 9))
        _values(name)(x, out)
        worst = [mp.mpf(0)] * 3
        with mp.workprec(240):
            for v, row in zip(x, out, strict=True):
                for order, want in enumerate(exact(name, float(v))):
                    h, low, n = row[3 * order : 3 * order + 3]
                    off = abs(mp.ldexp(mp.mpf(h) + mp.mpf(low), int(n)) - want)
                    place = max(mp.frexp(want)[1] - 1, -1022) - 52
                    worst[order] = max(worst[order], mp.ldexp(off, -place))
        for order in ORDERS:
            found[name, order] = float(mp.log(worst[order], 2)) if worst[order] else -math.inf
    return found


# --- tables -------------------------------------------------------------------------------------
def show(title: str, table: Table) -> None:
    print(f"\n{title}\n")
    print("| function | max ULP | at | normal range | > 0.5 | > 1 | > 2 | near zeros |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, order), row in table.items():
        shares = " | ".join(f"{100 * n / row.count:.3g}%" for n in row.above)
        zeros = f"{row.absolute:.2f}" if (name, order) in ZEROS else ""
        print(
            f"| `{name}`{chr(39) * order} | {row.worst:.3f} | {row.at:.9g} | {row.normal:.3f} | "
            f"{shares} | {zeros} |" + (f" {row.wrong} NOT FINITE" if row.wrong else "")
        )
    print(f"\n{next(iter(table.values())).count} arguments", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of the compiled activations.")
    parser.add_argument("--exhaustive", action="store_true", help="all float32, 2^27 float64")
    parser.add_argument("--step", type=int, default=4099, help="every step-th float32")
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts of the float32")
    parser.add_argument("--float64", type=int, default=1 << 20, help="how many float64")
    parser.add_argument("--seed", type=int, default=0, help="of the float64 sample")
    parser.add_argument("--check", type=int, metavar="COUNT", help="the reference against mpmath")
    parser.add_argument("--only", default="float32,float64,float16,bfloat16", help="dtypes")
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    parser.add_argument("--state", help="a file that parts add to, in place of a table each")
    parser.add_argument("--show", action="store_true", help="the tables of --state, nothing else")
    how = parser.parse_args()
    if how.check:
        for (name, order), bits in check(how.check).items():
            print(f"{name + chr(39) * order:12s} 2^{bits:.1f} ULP of float64")
        return
    tables: dict[str, Table] = {}
    if how.state:
        import pickle
        from pathlib import Path

        if Path(how.state).exists():
            tables = pickle.loads(Path(how.state).read_bytes())
    if how.show:
        for dtype, table in tables.items():
            show(dtype, table)
        return
    step = 1 if how.exhaustive else how.step
    count = 1 << 27 if how.exhaustive and how.float64 == 1 << 20 else how.float64
    part, parts = map(int, how.part.split("/"))
    start, stop = ((1 << 32) * k // parts for k in (part - 1, part))
    for dtype in how.only.split(","):
        began = time.perf_counter()
        table = tables.setdefault(dtype, {})
        kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
        blocks = {
            "float32": lambda: floats32(start, stop, step),
            "float64": lambda: floats64(count, how.seed),
        }.get(dtype, lambda kind=kind: halves(kind))
        Sweep(kind).run(blocks(), how.threads, table)
        if how.state:
            Path(how.state).write_bytes(pickle.dumps(tables))
        else:
            show(dtype, table)
        print(f"{dtype}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
