"""The cases of `cuda_sweep.py`: how they are drawn, who computes them, and what is exact."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import numfuse as nf

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
#: Unit roundoffs: an error below a quarter of it is that of the last rounding alone.
UNITS = {"bf16": 2.0**-9, "f16": 2.0**-12, "f32": 2.0**-24, "f64": 2.0**-53}
#: What is timed, and how often: a forward and both backwards of a layer and of a gated layer.
OPERATIONS = {
    "forward": 3, "backward": 2, "backward, saved": 2,
    "gated": 1, "gated backward": 1, "gated backward, saved": 1,
}  # fmt: skip
#: Products of M x K x N of each.
PRODUCTS = {
    "forward": 1, "backward": 3, "backward, saved": 2,
    "gated": 2, "gated backward": 6, "gated backward, saved": 4,
}  # fmt: skip
MOST = 1 << 16
#: Widths of layers of published models, and rows: tokens of a step, of a batch, of an image.
WIDTHS = (
    64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 576, 640, 768, 896, 960, 1024, 1152, 1280, 1408,
    1536, 1600, 1664, 1792, 2048, 2304, 2560, 2688, 2816, 3072, 3200, 3584, 4096, 4544, 4608, 4864,
    5120, 5504, 5632, 6144, 6656, 7168, 8192, 8960, 9216, 9728, 10240, 11008, 12288, 13824, 14336,
    16384, 18432, 18944, 20480, 22016, 24576, 27648, 28672, 29568, 32000, 32768, 49152, 50257,
    50304, 51200,
)  # fmt: skip
ROWS = (
    *(1, 2, 4, 8, 16, 32, 64, 77, 128, 196, 197, 256, 257, 512, 577, 1024, 1500, 2048, 4096, 8192),
    *(12608, 16384, 25216, 32768, 65536),
)
#: Multiply-adds, twice, of a case at the most: some 30 ms of an H200.
WORK = {"bf16": 1.5e13, "f16": 1.5e13, "f32": 1.5e12, "f64": 1.5e12}
#: The shares of the cases that torch.compile runs too (it takes 15 seconds ahead and 2 more where
#: it is timed), and of which other ways of a product are timed (a kernel of 2 seconds each).
COMPILED, WAYS = 0.25, 0.3
#: Ways beside the one that is chosen, those that the model expects the least of.
MOST_WAYS = 6
#: {name: (its function, its gradient of (grad, saved), whether the result is what is saved)}
_aten = torch.ops.aten
ACTIVATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any], bool]] = {
    "none": (lambda x: x, lambda g, x: g, False),
    "relu": (torch.relu, lambda g, x: _aten.threshold_backward(g, x, 0), False),
    "gelu": (
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
        False,
    ),
    "gelu_erf": (torch.nn.functional.gelu, _aten.gelu_backward, False),
    "silu": (torch.nn.functional.silu, _aten.silu_backward, False),
    "sigmoid": (torch.sigmoid, _aten.sigmoid_backward, True),
    "tanh": (torch.tanh, _aten.tanh_backward, True),
    "softplus": (
        lambda x: torch.nn.functional.softplus(x, 1.0, 40.0),
        lambda g, x: _aten.softplus_backward(g, x, 1.0, 40.0),
        False,
    ),
}
#: Units of roundoff, of a sum of absolute values, in which relu's kink is left alone: no sum of any
#: contestant is off by more.
KINK = 32
Contestants = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One call: what is computed, of what."""

    operation: str
    dtype: str
    m: int
    k: int
    n: int
    #: Members of a batch; 0: there is none.
    batch: int
    #: Whether they share one weight.
    shared: bool
    #: Whether the weight is stored as (out, in) and given as a view.
    turned: bool
    bias: bool
    activation: str
    #: Whether the sizes are those of models, or any.
    real: bool
    seed: int
    #: Whether torch.compile is a peer, and whether other ways of a product are timed too.
    compiled: bool = True
    ways: bool = False

    def __str__(self) -> str:
        size = f"{self.m} x {self.k} x {self.n}"
        words = [f"{self.batch} x ({size})" if self.batch else size]
        words += ["one weight"] * (self.batch > 0 and self.shared)
        words += ["(out, in)"] * self.turned + ["bias"] * self.bias
        return f"{self.operation}, {self.dtype}, {self.activation}: {', '.join(words)}"

    @property
    def work(self) -> float:
        """Operations: twice the multiply-adds."""
        return 2.0 * PRODUCTS[self.operation] * self.m * self.k * self.n * max(1, self.batch)

    @property
    def nbytes(self) -> float:
        """Bytes of all arrays, those of the exact results included."""
        members = max(1, self.batch)
        weights = (1 if self.shared else members) * (2 if self.operation.startswith("gated") else 1)
        elements = members * self.m * (self.k + 4 * self.n) + weights * self.k * self.n
        # the exact ones and their operands in float64; of float64 in slices
        return 2.0 * elements * (BYTES[self.dtype] + (48 if self.dtype == "f64" else 16))

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def log_uniform(rng: random.Random, most: int) -> int:
    """Return a whole number from 1 to `most`, of which each octave is as likely."""
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))


def draw(rng: random.Random, memory: float, most: int = MOST, real: bool | None = None) -> Case:
    """Return a case whose arrays take at most `memory` bytes; sizes go to `most`.

    Half are `real`, if nothing is said. Sizes are drawn again until they fit, all of them.
    """
    real = rng.random() < 0.5 if real is None else real
    operation = rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
    dtype = rng.choice(list(DTYPES))
    rows, widths = ([x for x in xs if x <= most] for xs in (ROWS, WIDTHS))
    while True:
        m, k, n = (log_uniform(rng, most) for _ in range(3))
        if real:
            m, k, n = rng.choice(rows), rng.choice(widths), rng.choice(widths)
        batch = min(most, 2 << int(rng.uniform(0, 6))) if rng.random() < 0.2 else 0
        if batch and not real:
            batch = max(2, batch + rng.randint(-batch // 4, batch // 4))
        case = Case(
            *(operation, dtype, m, k, n, batch),
            shared=bool(batch) and rng.random() < 0.5,
            turned=rng.random() < 0.5,
            bias=rng.random() < 0.7,
            activation=rng.choice(list(ACTIVATIONS)),
            real=real,
            seed=rng.getrandbits(32),
            compiled=rng.random() < COMPILED,
            ways=rng.random() < WAYS and not operation.startswith("gated"),
        )
        if case.nbytes <= memory and case.work <= WORK[dtype]:
            return case


# --- exact results --------------------------------------------------------------------------------
def slices(x: Any) -> list[Any]:
    """Return float64 numbers as sums of some of which each product with K terms is exact.

    A slice has S bits below the largest number of its row, with 2 S + log2 K <= 53 (Ozaki's way).
    """
    bits = (53 - math.ceil(math.log2(max(2, x.shape[-1])))) // 2
    found, rest = [], x
    for _ in range(-(-56 // bits) + 1):
        largest = rest.abs().amax(-1, keepdim=True).clamp_min(2.0**-900)
        shift = 0.75 * torch.exp2(torch.ceil(torch.log2(largest)) + 53 - bits)
        found.append((rest + shift) - shift)
        rest = rest - found[-1]
    return found


def exact_product(x: Any, y: Any, wide: bool) -> Any:
    """Return the product of float64 matrices; with `wide` to twice the digits, then rounded."""
    if not wide or not x.shape[-1]:
        return x @ y
    left, right = slices(x), [part.mT for part in slices(y.mT)]
    last = len(left) - 1
    pairs = sorted(((i, j) for i in range(len(left)) for j in range(last + 1 - i)), key=sum)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for i, j in reversed(pairs):  # the small ones first
        total = total + left[i] @ right[j]
    return total


def _long_gelu(x: Any) -> tuple[Any, Any]:
    c = np.sqrt(2 / np.arccos(np.longdouble(-1)))
    u, slope = c * (x + x**3 * 44715 / 1000000), c * (1 + 3 * x * x * 44715 / 1000000)
    cosh = np.cosh(np.clip(u, -5000, 5000))
    return x * (1 + np.tanh(u)) / 2, (1 + np.tanh(u)) / 2 + x * slope / (2 * cosh * cosh)


def _long_silu(x: Any) -> tuple[Any, Any]:
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x / (1 + np.exp(x)))


def _long_softplus(x: Any) -> tuple[Any, Any]:
    return np.log1p(np.exp(-abs(x))) + np.maximum(x, 0), 1 / (1 + np.exp(-x))


#: {name: its values and slopes at extended precision}, of those that a float64 case asks for:
#: PyTorch's own functions would have their roundings called exact.
LONG = {"gelu": _long_gelu, "silu": _long_silu, "softplus": _long_softplus}
#: Elements of a result up to which they are asked.
LONG_MOST = 1 << 20


def extended(name: str, x: Any, slope: bool) -> Any:
    """Return an activation, or its slope, of float64 numbers, rounded once."""
    made = LONG[name](x.cpu().numpy().astype(np.longdouble))[slope]
    return torch.from_numpy(made.astype(np.float64)).to(x.device)


# --- contestants ----------------------------------------------------------------------------------
class Layers:
    """The operands of a case, and what computes it."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.act, self.slope, self.keeps_result = ACTIVATIONS[case.activation]
        self.gated = case.operation.startswith("gated")
        self.backward, self.saved = "backward" in case.operation, "saved" in case.operation
        generator = torch.Generator(device).manual_seed(case.seed)
        kind, lead = DTYPES[case.dtype], (case.batch,) if case.batch else ()

        #: What was drawn, with its scale; and what is made of that by a forward, with how.
        self._drawn: list[tuple[Any, float]] = []
        self._made: list[tuple[list[Any], Callable[[], list[Any]]]] = []

        def normal(*lengths: int, scale: float = 1.0) -> Any:
            x = torch.randn(*lengths, device=device, dtype=torch.float32, generator=generator)
            self._drawn.append(((x * scale).to(kind), scale))
            return self._drawn[-1][0]

        def weight() -> Any:
            own = () if case.shared else lead
            if case.turned:
                return normal(*own, case.n, case.k, scale=case.k**-0.5).mT
            return normal(*own, case.k, case.n, scale=case.k**-0.5)

        count = 1 + self.gated
        self.a = normal(*lead, case.m, case.k)
        self.weights = [weight() for _ in range(count)]
        self.biases = [normal(case.n) if case.bias else None for _ in range(count)]
        self.grad = normal(*lead, case.m, case.n) if self.backward else None
        self.given = (self.grad, self.a, self.weights, self.biases)
        self._leave_kinks()

    def _leave_kinks(self) -> None:
        """Let no gradient come from where rounding decides on which side of relu's kink a sum is.

        One such sum of five million, of whichever contestant, is 4e-4 of the result's norm.
        """
        if not self.backward or self.case.activation != "relu":
            return
        a, b = self.a.double(), self.weights[0].double()
        sums, size = a @ b, a.abs() @ b.abs()
        if self.biases[0] is not None:
            sums, size = sums + self.biases[0].double(), size + self.biases[0].double().abs()
        unit = 2.0**-53 if self.case.dtype == "f64" else 2.0**-24
        self.grad[sums.abs() <= KINK * unit * size] = 0

    def draw_again(self, seed: int) -> None:
        """Write other numbers into all operands, and into what forwards saved of them."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for x, scale in self._drawn:
            new = torch.randn(x.shape, device=x.device, dtype=torch.float32, generator=generator)
            x.copy_(new * scale)
        self._leave_kinks()
        for tensors, make in self._made:
            for x, new in zip(tensors, make(), strict=True):
                x.copy_(new)

    # --- PyTorch's ways -------------------------------------------------------------------------
    def sums(self, a: Any, weights: Any, biases: Any, multiply: Any = None) -> list[Any]:
        """Return A B + bias of every weight, as PyTorch's users write it (`multiply`: by that)."""
        found = []
        for i, b in enumerate(weights):  # (torch.compile knows no strict zip everywhere)
            bias = biases[i]
            if multiply is not None or bias is None:
                z = (multiply or torch.matmul)(a, b)
                found.append(z if bias is None else z + bias)
            elif b.ndim == 2:
                found.append(torch.addmm(bias, a.reshape(-1, a.shape[-1]), b).reshape(
                    *a.shape[:-1], b.shape[-1]))  # fmt: skip
            else:
                found.append(torch.baddbmm(bias, a, b))
        return found

    def value(self, a: Any, weights: Any, biases: Any, multiply: Any = None) -> Any:
        """Return the forward."""
        sums = self.sums(a, weights, biases, multiply)
        return self.act(sums[0]) * sums[1] if len(sums) > 1 else self.act(sums[0])

    def kept(self, sums: Sequence[Any]) -> list[Any]:
        """Return what PyTorch's autograd keeps of a forward, beside the sums of a gate."""
        first = sums[0]
        if len(sums) == 1:
            return [self.act(first) if self.keeps_result else first]
        value = self.act(first)
        return [value if self.keeps_result else first, value, sums[1]]

    def gradients(
        self, grad: Any, a: Any, weights: Any, biases: Any, kept: Any = None, multiply: Any = None,
        add_rows: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return d_a, and d_b and d_bias of every weight; `kept`: of the forward."""
        product = multiply or torch.matmul
        if kept is None:
            kept = self.kept(self.sums(a, weights, biases, multiply))
        if len(weights) > 1:
            saved, value, up = kept
            through = [self.slope(grad * up, saved), grad * value]
        else:
            through = [self.slope(grad, kept[0])]
        d_a, of_weights = None, []
        for i, g in enumerate(through):
            b, bias = weights[i], biases[i]
            term = product(g, b.mT)
            d_a = term if d_a is None else d_a + term
            rows, flat = a, g
            if b.ndim == 2:
                rows, flat = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
            # in the order in which the weight lies
            by_rows = b.stride(-1) == 1
            d_b = product(rows.mT, flat) if by_rows else product(flat.mT, rows).mT
            of_weights.append(d_b)
            if bias is not None:
                flat = g.reshape(-1, g.shape[-1])
                of_weights.append(flat.sum(0) if add_rows is None else add_rows(flat))
        return d_a, *of_weights

    # --- all of them ----------------------------------------------------------------------------
    def numfuse(self) -> Callable[[], Any]:
        """Return numfuse's call."""
        act, a, grad = self.case.activation, self.a, self.grad
        operands = [x for pair in zip(self.weights, self.biases, strict=True) for x in pair]
        if self.gated:
            operands = [*self.weights, *self.biases]
        forward = nf.matmul_activation_mul if self.gated else nf.matmul_bias_activation
        if not self.backward:
            return lambda: forward(a, *operands, act)
        options: dict[str, Any] = {}
        if self.saved:

            def save() -> Any:
                return forward(a, *operands, act, return_pre_activation=True)[1]

            options["pre_activation"] = saved = save()
            pair = isinstance(saved, tuple)
            self._made.append((list(saved) if pair else [saved],
                               lambda: list(save()) if pair else [save()]))  # fmt: skip
        backward = nf.matmul_activation_mul_bwd if self.gated else nf.matmul_bias_activation_bwd

        def run() -> Any:
            found = backward(grad, a, *operands, act, **options)
            if self.gated:
                d_a, gate, up, of_gate, of_up = found
                found = d_a, gate, of_gate, up, of_up
            return tuple(x for x in found if x is not None)

        return run

    def product(self) -> Callable[[], Any]:
        """Return a call that is one product of the case: the forward, or d_a or d_b alone."""
        if not self.backward:
            return self.numfuse()
        which = ("a", "b")[self.case.seed % 2]
        given = self.grad, self.a, self.weights[0]
        return lambda: nf.matmul_bias_activation_bwd(*given, needs=(which,))

    def contestants(self, compiled: bool) -> Contestants:
        """Return numfuse and its peers, of which `compiled` has torch.compile."""
        case, (grad, a, weights, biases) = self.case, self.given
        found: Contestants = {"numfuse": self.numfuse()}
        call, given = self.value, (a, weights, biases)
        if self.backward:
            kept = None
            if self.saved:
                kept = self.kept(self.sums(a, weights, biases))
                self._made.append((kept, lambda: self.kept(self.sums(a, weights, biases))))
            call, given = self.gradients, (grad, a, weights, biases, kept)
        found["torch"] = lambda: call(*given)
        if case.bias and not self.saved:
            found["torch mm + add"] = lambda: call(*given, multiply=torch.matmul)
        if not self.backward and not self.gated:
            self._fused(found)
        if compiled and case.compiled:
            torch._dynamo.reset()
            made = torch.compile(call, dynamic=False)
            found["torch.compile"] = lambda: made(*given)
        return found

    def _fused(self, found: Contestants) -> None:
        """Add the ways of cuBLAS that end in an activation."""
        (b,), (bias,), a = self.weights, self.biases, self.a
        if bias is not None and b.ndim == 2 and self.case.activation in ("relu", "gelu"):
            rows, shape = a.reshape(-1, a.shape[-1]), (*a.shape[:-1], b.shape[-1])
            gelu = self.case.activation == "gelu"
            if gelu and self.device == "cpu":
                return  # there it is the other gelu
            found["fused cuBLAS"] = lambda: torch._addmm_activation(
                bias, rows, b, use_gelu=gelu
            ).reshape(shape)

    def exact(self) -> tuple[Any, ...]:
        """Return the results from float64, products of float64 from twice its digits."""
        wide, name = self.case.dtype == "f64", self.case.activation

        def multiply(x: Any, y: Any) -> Any:
            return exact_product(x, y, wide)

        if wide and name in LONG and self.a[..., 0].numel() * self.case.n <= LONG_MOST:
            exact = copy.copy(self)
            exact.act = functools.partial(extended, name, slope=False)
            exact.slope = lambda g, x: g * extended(name, x, slope=True)
            return exact._exact(multiply)
        return self._exact(multiply)

    def _exact(self, multiply: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
        """Return the results by products of float64 numbers as they are given."""
        a, weights = self.a.double(), [x.double() for x in self.weights]
        biases = [None if x is None else x.double() for x in self.biases]
        if not self.backward:
            return (self.value(a, weights, biases, multiply),)

        def add_rows(x: Any) -> Any:
            # (a plain sum would have the roundings of PyTorch's way, and call it exact)
            return multiply(torch.ones_like(x[:, :1]).mT, x)[0]

        given = self.grad.double(), a, weights, biases
        return self.gradients(*given, multiply=multiply, add_rows=add_rows)


#: Of each result of a call the Frobenius norms of its error and of what is exact.
Norms = list[tuple[float, float]]


def norms(given: Any, exact: Sequence[Any]) -> Norms:
    """Return of each result the Frobenius norms of its error and of what is exact."""
    parts = given if isinstance(given, tuple) else (given,)
    found = []
    for x, wanted in zip(parts, exact, strict=True):
        x = x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)
        if x.shape != wanted.shape:
            raise ValueError(
                f"a result must have shape {tuple(wanted.shape)}, got {tuple(x.shape)}"
            )
        found.append((float((x.double() - wanted).norm()), float(wanted.norm())))
    return found


def errors(*draws: Norms) -> list[float]:
    """Return the relative error of each result over `norms` of one or more draws; NaN is infinite.

    It is that of one long vector of all draws: an exact value near zero does not decide alone.
    """
    found = []
    for parts in zip(*draws, strict=True):
        off = math.hypot(*(x for x, _ in parts))
        size = math.hypot(*(x for _, x in parts))
        found.append(off / size if size and off == off else 0.0 if off == 0 else math.inf)
    return found
