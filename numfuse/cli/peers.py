"""The benchmark's work by numfuse and by each peer, every one in its best form.

A peer writes into arrays that were allocated before where its interface can (NumPy, PyTorch), and
uses explicit derivative formulas, not a tape. ``backward`` recomputes the pre-activation,
``backward_saved`` is given it: two products instead of three. Operands that are views are the same
views for everyone; JAX, which has none, takes them inside its compiled function.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

OPERATIONS = (
    *("forward", "backward", "backward_saved"),
    *("gated", "gated_backward", "gated_fresh", "gated_backward_fresh"),
)
PRODUCTS = {"forward": 1, "backward": 3, "backward_saved": 2}  # GEMMs of 2 m n k flop each
# Arrays of m n elements, read or written. "fresh": the results are new arrays, and the memory that
# the system has to find and clear for them is part of the time.
STREAMS = {"gated": 3, "gated_backward": 5, "gated_fresh": 3, "gated_backward_fresh": 5}
# How often a product's a, b and grad (or the saved pre-activation) cross the bus, read or written.
TRAFFIC = {"forward": (1, 1, 1), "backward": (2, 2, 1), "backward_saved": (2, 2, 2)}
ACTIVATIONS = ("gelu", "silu", "relu")


class View(NamedTuple):
    """An operand as a part of a larger array, or turned round."""

    shape: Callable[[int, int], tuple[int, int]]  # of the array, for an operand of (rows, columns)
    take: Callable[[Any], Any]  # the operand, from that array in any library


MARGIN = 16  # columns on either side of a slice: its rows are no longer one piece of memory
WHOLE = View(lambda rows, columns: (rows, columns), lambda x: x)
TURNED = View(lambda rows, columns: (columns, rows), lambda x: x.T)
SLICE = View(lambda rows, columns: (rows, columns + 2 * MARGIN), lambda x: x[:, MARGIN:-MARGIN])
COLUMNS = View(lambda rows, columns: (rows, 2 * columns), lambda x: x[:, ::2])
ROWS = View(lambda rows, columns: (2 * rows, columns), lambda x: x[::2])
# Views of a, b and grad. BLAS takes the first three as they are; in the last, neither stride of a
# and b is one element.
LAYOUTS: dict[str, tuple[View, View, View]] = {
    "contiguous": (WHOLE, WHOLE, WHOLE),
    "transposed": (TURNED, TURNED, WHOLE),
    "sliced": (SLICE, SLICE, SLICE),
    "strided": (COLUMNS, COLUMNS, ROWS),
}


class Case(NamedTuple):
    """One measurement: a is (m, k), b is (k, n); the gated ones work on (m, n), their k is 0."""

    operation: str
    m: int
    n: int
    k: int
    dtype: str
    activation: str
    layout: str = "contiguous"

    @property
    def flop(self) -> int:
        return 2 * PRODUCTS.get(self.operation, 0) * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that have to cross the memory bus: every operand and every result once."""
        m, n, k = self.m, self.n, self.k
        elements = STREAMS.get(self.operation, 0) * m * n
        if self.operation in TRAFFIC:
            a, b, grad = TRAFFIC[self.operation]
            # bias and d_bias: one of them in a forward and where pre is saved
            vectors = 2 if self.operation == "backward" else 1
            # Of every second column, whole lines are read: twice the bytes.
            unused = m * k + k * n if self.layout == "strided" else 0
            elements = a * m * k + b * k * n + grad * m * n + vectors * n + unused
        return elements * np.dtype(self.dtype).itemsize


class Operands(NamedTuple):
    a: Array
    b: Array
    bias: Array
    grad: Array
    pre: Array  # for the gated operations, the gate's input
    up: Array  # the gate's other factor


class Contestant(NamedTuple):
    """A callable without arguments that does the work, and what turns its result into arrays."""

    run: Callable[[], Any]
    arrays: Callable[[Any], tuple[Array, ...]]


def draw_operands(case: Case, generator: np.random.Generator) -> Operands:
    """Fresh random operands. b is scaled by 1 / sqrt(k), so that pre is of size 1."""
    m, n, k = case.m, case.n, case.k
    of_a, of_b, of_grad = LAYOUTS[case.layout]

    def normal(*shape: int) -> Array:
        return generator.standard_normal(shape, np.float32).astype(case.dtype)

    a, b, grad = (
        view.take(normal(*view.shape(*shape)))
        for view, shape in ((of_a, (m, k)), (of_b, (k, n)), (of_grad, (m, n)))
    )
    bias = normal(n)
    if case.operation in STREAMS:
        return Operands(a, b, bias, grad, normal(m, n), normal(m, n))
    b *= np.asarray(1 / math.sqrt(k), case.dtype)
    return Operands(a, b, bias, grad, a @ b + bias, grad)


# --- formulas in NumPy, in place ------------------------------------------------------------------


def numpy_activation(x: Array, activation: str, scratch: Array) -> Array:
    """x becomes activation(x), with one array of scratch; the same array is returned."""
    if activation == "relu":
        return np.maximum(x, 0, out=x)
    if activation == "silu":
        np.negative(x, out=scratch)
        np.exp(scratch, out=scratch)
        scratch += 1
        return np.divide(x, scratch, out=x)
    np.multiply(x, x, out=scratch)  # gelu, tanh form
    scratch *= 0.044715
    scratch += 1
    scratch *= x
    scratch *= math.sqrt(2 / math.pi)
    np.tanh(scratch, out=scratch)
    scratch += 1
    x *= scratch
    x *= 0.5
    return x


def numpy_times_slope(x: Array, activation: str, grad: Array, s: Array, t: Array) -> Array:
    """grad * activation'(x), written to `s`; `t` is scratch and x is kept."""
    if activation == "relu":
        np.greater(x, 0, out=s, casting="unsafe")
    elif activation == "silu":
        np.negative(x, out=s)
        np.exp(s, out=s)
        s += 1
        np.reciprocal(s, out=s)
        np.subtract(1, s, out=t)
        t *= x
        t += 1
        s *= t
    else:
        np.multiply(x, x, out=t)
        np.multiply(t, 0.044715, out=s)
        s += 1
        s *= x
        s *= math.sqrt(2 / math.pi)
        np.tanh(s, out=s)
        t *= 3 * 0.044715
        t += 1
        t *= x
        t *= math.sqrt(2 / math.pi)  # t = x u'
        np.subtract(1, s, out=s)  # e = 1 - tanh u; the slope is (2 - e)(1 + t e) / 2
        t *= s
        t += 1
        np.subtract(2, s, out=s)
        s *= t
        s *= 0.5
    s *= grad
    return s


def numpy_contestant(case: Case, o: Operands) -> Contestant:
    """NumPy as one writes it for speed: out= and in-place ufuncs, products by its BLAS."""
    activation = case.activation
    x, s, t = np.empty_like(o.pre), np.empty_like(o.pre), np.empty_like(o.pre)
    d_a, d_b, d_bias = (np.empty(y.shape, y.dtype) for y in (o.a, o.b, o.bias))

    def pre_activation() -> Array:
        np.matmul(o.a, o.b, out=x)
        return np.add(x, o.bias, out=x)

    def gradients(pre: Array) -> tuple[Array, ...]:
        grad_pre = numpy_times_slope(pre, activation, o.grad, s, t)
        np.matmul(grad_pre, o.b.T, out=d_a)
        np.matmul(o.a.T, grad_pre, out=d_b)
        np.sum(grad_pre, axis=0, out=d_bias)
        return d_a, d_b, d_bias

    def gated() -> tuple[Array, ...]:
        np.copyto(x, o.pre)
        return (np.multiply(numpy_activation(x, activation, s), o.up, out=x),)

    def gated_backward() -> tuple[Array, ...]:
        np.copyto(x, o.pre)
        numpy_activation(x, activation, s)
        np.multiply(x, o.grad, out=x)
        numpy_times_slope(o.pre, activation, o.grad, s, t)
        return np.multiply(s, o.up, out=s), x

    def gated_fresh() -> tuple[Array, ...]:
        x = o.pre.copy()
        return (np.multiply(numpy_activation(x, activation, s), o.up, out=x),)

    def gated_backward_fresh() -> tuple[Array, ...]:
        x, d_a = o.pre.copy(), np.empty_like(o.pre)
        numpy_activation(x, activation, s)
        np.multiply(x, o.grad, out=x)
        numpy_times_slope(o.pre, activation, o.grad, d_a, t)
        return np.multiply(d_a, o.up, out=d_a), x

    runs = {
        "forward": lambda: (numpy_activation(pre_activation(), activation, s),),
        "backward": lambda: gradients(pre_activation()),
        "backward_saved": lambda: gradients(o.pre),
        "gated": gated,
        "gated_backward": gated_backward,
        "gated_fresh": gated_fresh,
        "gated_backward_fresh": gated_backward_fresh,
    }
    return Contestant(runs[case.operation], tuple)


def exact(case: Case, o: Operands) -> tuple[Array, ...]:
    """The results in float64: what every contestant is checked against."""
    wide = Operands(*(x.astype(np.float64) for x in o))
    contestant = numpy_contestant(case._replace(dtype="float64"), wide)
    return tuple(x.copy() for x in contestant.arrays(contestant.run()))


# --- numfuse --------------------------------------------------------------------------------------


def numfuse_contestant(case: Case, o: Operands) -> Contestant:
    import numfuse as nf

    activation = case.activation
    out = np.empty_like(o.pre)
    gated_out = (np.empty_like(o.pre), np.empty_like(o.pre))
    gradients = (*(np.empty(x.shape, x.dtype) for x in (o.a, o.b, o.bias)),)

    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: (nf.matmul_bias_activation(o.a, o.b, o.bias, activation, out=out),),
        "backward": lambda: nf.matmul_bias_activation_bwd(
            o.grad, o.a, o.b, o.bias, activation, out=gradients
        ),
        "backward_saved": lambda: nf.matmul_bias_activation_bwd(
            o.grad, o.a, o.b, o.bias, activation, pre_activation=o.pre, out=gradients
        ),
        "gated": lambda: (nf.activation_mul(o.pre, o.up, activation, out=out),),
        "gated_backward": lambda: nf.activation_mul_bwd(
            o.grad, o.pre, o.up, activation, out=gated_out
        ),
        "gated_fresh": lambda: (nf.activation_mul(o.pre, o.up, activation),),
        "gated_backward_fresh": lambda: nf.activation_mul_bwd(o.grad, o.pre, o.up, activation),
    }
    return Contestant(runs[case.operation], tuple)


# --- PyTorch --------------------------------------------------------------------------------------


def torch_arrays(value: Any) -> tuple[Array, ...]:
    return tuple(tensor.numpy() for tensor in value)


def torch_contestant(case: Case, o: Operands) -> Contestant:
    """Eager PyTorch with out= everywhere and its own fused derivative kernels."""
    import torch

    aten, activation = torch.ops.aten, case.activation
    a, b, bias, grad, pre, up = (torch.from_numpy(x) for x in o)
    x, s, t = torch.empty_like(pre), torch.empty_like(pre), torch.empty_like(pre)
    d_a, d_b, d_bias = (torch.empty(y.shape, dtype=y.dtype) for y in (a, b, bias))

    def activate(source: Any, out: Any) -> Any:
        if activation == "gelu":
            return aten.gelu.out(source, approximate="tanh", out=out)
        if activation == "silu":
            return aten.silu.out(source, out=out)
        return torch.clamp(source, min=0, out=out)

    def times_slope(source: Any, g: Any, out: Any) -> Any:
        if activation == "gelu":
            return aten.gelu_backward.grad_input(g, source, approximate="tanh", grad_input=out)
        if activation == "silu":
            return aten.silu_backward.grad_input(g, source, grad_input=out)
        return aten.threshold_backward.grad_input(g, source, 0, grad_input=out)

    def gradients(source: Any) -> tuple[Any, ...]:
        grad_pre = times_slope(source, grad, s)
        torch.mm(grad_pre, b.t(), out=d_a)
        torch.mm(a.t(), grad_pre, out=d_b)
        torch.sum(grad_pre, 0, out=d_bias)
        return d_a, d_b, d_bias

    def gated_backward() -> tuple[Any, ...]:
        torch.mul(grad, up, out=s)
        times_slope(pre, s, t)
        return t, torch.mul(activate(pre, x), grad, out=x)

    def gated_fresh() -> tuple[Any, ...]:
        y = activate(pre, torch.empty_like(pre))
        return (torch.mul(y, up, out=y),)

    def gated_backward_fresh() -> tuple[Any, ...]:
        y = activate(pre, torch.empty_like(pre))
        d_a = times_slope(pre, torch.mul(grad, up, out=s), torch.empty_like(pre))
        return d_a, torch.mul(y, grad, out=y)

    runs = {
        "forward": lambda: (activate(torch.addmm(bias, a, b, out=x), x),),
        "backward": lambda: gradients(torch.addmm(bias, a, b, out=x)),
        "backward_saved": lambda: gradients(pre),
        "gated": lambda: (torch.mul(activate(pre, x), up, out=x),),
        "gated_backward": gated_backward,
        "gated_fresh": gated_fresh,
        "gated_backward_fresh": gated_backward_fresh,
    }
    return Contestant(runs[case.operation], torch_arrays)


def torch_compile_contestant(case: Case, o: Operands) -> Contestant:
    """torch.compile on the explicit formulas, for exactly this shape (dynamic=False)."""
    import torch

    torch._dynamo.reset()  # each case is a program of its own; the recompile limit counts them
    aten, activation = torch.ops.aten, case.activation
    a, b, bias, grad, pre, up = (torch.from_numpy(x) for x in o)

    def activate(x: Any) -> Any:
        functional = torch.nn.functional
        if activation == "gelu":
            return functional.gelu(x, approximate="tanh")
        return functional.silu(x) if activation == "silu" else functional.relu(x)

    def times_slope(x: Any, g: Any) -> Any:
        if activation == "gelu":
            return aten.gelu_backward(g, x, approximate="tanh")
        if activation == "silu":
            return aten.silu_backward(g, x)
        return aten.threshold_backward(g, x, 0)

    def gradients(a: Any, b: Any, grad: Any, x: Any) -> tuple[Any, ...]:
        grad_pre = times_slope(x, grad)
        return grad_pre @ b.t(), a.t() @ grad_pre, grad_pre.sum(0)

    def backward(grad: Any, a: Any, b: Any, bias: Any) -> tuple[Any, ...]:
        return gradients(a, b, grad, torch.addmm(bias, a, b))

    def gated_backward(grad: Any, x: Any, up: Any) -> tuple[Any, ...]:
        return times_slope(x, grad * up), activate(x) * grad

    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (lambda a, b, bias: (activate(torch.addmm(bias, a, b)),), (a, b, bias)),
        "backward": (backward, (grad, a, b, bias)),
        "backward_saved": (gradients, (a, b, grad, pre)),
        "gated": (lambda x, up: (activate(x) * up,), (pre, up)),
        "gated_backward": (gated_backward, (grad, pre, up)),
    }
    # A compiled function allocates its results in any case.
    program, arguments = programs[case.operation.removesuffix("_fresh")]
    compiled = torch.compile(program, dynamic=False, fullgraph=True)
    return Contestant(lambda: compiled(*arguments), torch_arrays)


# --- JAX ------------------------------------------------------------------------------------------


def jax_contestant(case: Case, o: Operands) -> Contestant:
    """jax.jit of the whole operation; a call returns when its results are there."""
    import jax

    jax.config.update("jax_enable_x64", True)
    # Whole arrays: a view would be copied here, where nobody counts the time.
    a, b, bias, grad, pre, up = (jax.numpy.asarray(x if x.base is None else x.base) for x in o)
    views = [view.take for view in LAYOUTS[case.layout]]

    def activate(x: Any) -> Any:
        if case.activation == "gelu":
            return jax.nn.gelu(x, approximate=True)
        return jax.nn.silu(x) if case.activation == "silu" else jax.nn.relu(x)

    def gradients(a: Any, b: Any, grad: Any, x: Any) -> tuple[Any, ...]:
        (grad_pre,) = jax.vjp(activate, x)[1](grad)
        return grad_pre @ b.T, a.T @ grad_pre, grad_pre.sum(0)

    def on_views(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(a: Any, b: Any, grad: Any, x: Any) -> Any:
            a, b, grad = (take(y) for take, y in zip(views, (a, b, grad), strict=True))
            return program(a, b, grad, x)

        return call

    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (
            on_views(lambda a, b, grad, bias: (activate(a @ b + bias),)),
            (a, b, grad, bias),
        ),
        "backward": (
            on_views(lambda a, b, grad, bias: gradients(a, b, grad, a @ b + bias)),
            (a, b, grad, bias),
        ),
        "backward_saved": (on_views(gradients), (a, b, grad, pre)),
        "gated": (lambda x, up: (activate(x) * up,), (pre, up)),
        "gated_backward": (
            lambda grad, x, up: jax.vjp(lambda x, up: activate(x) * up, x, up)[1](grad),
            (grad, pre, up),
        ),
    }
    # A compiled function allocates its results in any case.
    program, arguments = programs[case.operation.removesuffix("_fresh")]
    compiled = jax.jit(program)
    return Contestant(
        lambda: jax.block_until_ready(compiled(*arguments)),
        lambda value: tuple(np.asarray(x) for x in value),
    )


# Name in the tables: (the module that must be installed, what makes the contestant).
PEERS: dict[str, tuple[str, Callable[[Case, Operands], Contestant]]] = {
    "NumPy": ("numpy", numpy_contestant),
    "PyTorch": ("torch", torch_contestant),
    "torch.compile": ("torch", torch_compile_contestant),
    "JAX": ("jax", jax_contestant),
}


def installed(peer: str) -> bool:
    return importlib.util.find_spec(PEERS[peer][0]) is not None


def relative_error(results: tuple[Array, ...], right: tuple[Array, ...]) -> float:
    """Largest difference of any output, relative to that output's largest element."""
    return max(
        float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-30))
        for x, y in zip(results, right, strict=True)
    )


def tolerance(case: Case) -> float:
    """Bound on `relative_error`: 16 u sqrt(K) for the longest sum of this case, K terms.

    Rounding errors of a sum of K random terms grow as sqrt(K) u times the terms' own size, which
    is that of the result here; 16 covers the maximum over the elements and the activation.
    """
    longest = 1 if case.operation in STREAMS else max(case.m, case.n, case.k)
    return 16 * float(np.finfo(case.dtype).eps) * math.sqrt(longest)
