"""The benchmark's work by numfuse and by each peer, every one in its best form.

A peer writes into arrays that were allocated before where its interface can (NumPy, PyTorch), and
uses explicit derivative formulas, not a tape. ``backward`` recomputes the pre-activation,
``backward_saved`` is given it: two products instead of three. Operands that are views are the same
views for everyone; JAX, which has none, takes them inside its compiled function.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import numfuse as nf
from numfuse.cli.timing import Contestant, arrays
from numfuse.cli.ufuncs import Array, numpy_activation, numpy_times_slope

OPERATIONS = (
    *("forward", "backward", "backward_saved"),
    *("gated", "gated_backward", "gated_fresh", "gated_backward_fresh"),
)
PRODUCTS = {"forward": 1, "backward": 3, "backward_saved": 2}  # GEMMs of 2 m n k flop each
# Arrays of m n elements, read or written. "fresh": the results are new arrays, and the memory that
# the system has to find and clear for them is part of the time.
STREAMS = {"gated": 3, "gated_backward": 5}
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
    def work(self) -> str:
        """The operation, whether its results are new arrays or not."""
        return self.operation.removesuffix("_fresh")

    @property
    def fresh(self) -> bool:
        return self.work != self.operation

    @property
    def flop(self) -> int:
        return 2 * PRODUCTS.get(self.operation, 0) * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that have to cross the memory bus: every operand and every result once."""
        m, n, k = self.m, self.n, self.k
        elements = STREAMS.get(self.work, 0) * m * n
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
    if case.work in STREAMS:
        return Operands(a, b, bias, grad, normal(m, n), normal(m, n))
    b *= np.asarray(1 / math.sqrt(k), case.dtype)
    return Operands(a, b, bias, grad, a @ b + bias, grad)


# --- the work, for any library --------------------------------------------------------------------


def program(
    case: Case,
    o: Operands,
    library: Any,
    layer: Callable[[Any, Any, Any, Any], Any],
    activate: Callable[[Any, Any], Any],
    times_slope: Callable[[Any, Any, Any], Any],
) -> tuple[Callable[..., Any], list[str]]:
    """Return the work as a function of arrays, and its operands' names.

    `library` is NumPy, or what has its functions with ``out=``. The others are functions of
    (a, b, bias, out), (x, out) and (x, grad, out) for a @ b + bias, activation(x) and grad *
    activation'(x), written to `out` where that is not None.
    """

    def empty(like: Any) -> Any:
        return library.empty(like.shape, dtype=like.dtype)

    d_a, d_b, d_bias, x, slope, *gates = map(empty, (o.a, o.b, o.bias, *[o.pre] * 4))
    fresh = case.fresh and x is not None  # (a compiled program makes its results in any case)

    def new(place: int) -> Any:
        """Return the memory of a gated result: the same, or new where that is timed."""
        return empty(o.pre) if fresh else gates[place]

    def gradients(grad: Any, a: Any, b: Any, pre: Any) -> Any:
        grad_pre = times_slope(pre, grad, slope)
        return (
            library.matmul(grad_pre, b.T, out=d_a),
            library.matmul(a.T, grad_pre, out=d_b),
            library.sum(grad_pre, 0, out=d_bias),
        )

    def gated(pre: Any, up: Any) -> Any:
        y = activate(pre, new(0))
        return library.multiply(y, up, out=y)

    def gated_backward(grad: Any, pre: Any, up: Any) -> Any:
        y = activate(pre, new(0))
        d_up = library.multiply(y, grad, out=y)
        d_gate = times_slope(pre, grad, new(1))
        return library.multiply(d_gate, up, out=d_gate), d_up

    programs: dict[str, Callable[..., Any]] = {
        "forward": lambda a, b, bias: activate(layer(a, b, bias, x), x),
        "backward": lambda grad, a, b, bias: gradients(grad, a, b, layer(a, b, bias, x)),
        "backward_saved": gradients,
        "gated": gated,
        "gated_backward": gated_backward,
    }
    found = programs[case.work]
    return found, list(inspect.signature(found).parameters)


def in_place(case: Case, o: Operands, *library: Any) -> Contestant:
    """Return the work by a library that writes where it is told: see `program`."""
    run, names = program(case, o, *library)
    return functools.partial(run, *(getattr(o, name) for name in names))


# --- NumPy ---------------------------------------------------------------------------------------


def numpy_contestant(case: Case, o: Operands) -> Contestant:
    """NumPy as one writes it for speed: out= and in-place ufuncs, products by its BLAS."""
    scratch = np.empty_like(o.pre)

    def layer(a: Array, b: Array, bias: Array, out: Array) -> Array:
        np.matmul(a, b, out=out)
        return np.add(out, bias, out=out)

    def activate(x: Array, out: Array) -> Array:
        if out is not x:
            np.copyto(out, x)
        return numpy_activation(out, case.activation, scratch)

    def times_slope(x: Array, grad: Array, out: Array) -> Array:
        return numpy_times_slope(x, case.activation, grad, out, scratch)

    return in_place(case, o, np, layer, activate, times_slope)


def exact(case: Case, o: Operands) -> tuple[Array, ...]:
    """The results in float64: what every contestant is checked against."""
    wide = Operands(*(x.astype(np.float64) for x in o))
    return arrays(numpy_contestant(case._replace(dtype="float64"), wide)())


# --- numfuse --------------------------------------------------------------------------------------


def numfuse_contestant(case: Case, o: Operands) -> Contestant:
    out, d_gate, d_up = (None if case.fresh else np.empty_like(o.pre) for _ in range(3))
    gradients = tuple(np.empty(x.shape, x.dtype) for x in (o.a, o.b, o.bias))
    layer = (o.a, o.b, o.bias, case.activation)
    gate = (o.pre, o.up, case.activation)
    backward = functools.partial(nf.matmul_bias_activation_bwd, o.grad, *layer, out=gradients)
    gates_out = None if case.fresh else (d_gate, d_up)
    return {
        "forward": functools.partial(nf.matmul_bias_activation, *layer, out=out),
        "backward": backward,
        "backward_saved": functools.partial(backward, pre_activation=o.pre),
        "gated": functools.partial(nf.activation_mul, *gate, out=out),
        "gated_backward": functools.partial(nf.activation_mul_bwd, o.grad, *gate, out=gates_out),
    }[case.work]


# --- PyTorch --------------------------------------------------------------------------------------


def torch_curves(activation: str) -> tuple[Any, Any, Any, tuple[int, ...], dict[str, str]]:
    """Return PyTorch's activation, alone and with ``out=``, its derivative, and their options."""
    import torch

    aten = torch.ops.aten
    curves: dict[str, Any] = {
        "gelu": (aten.gelu, aten.gelu.out, aten.gelu_backward, (), {"approximate": "tanh"}),
        "silu": (aten.silu, aten.silu.out, aten.silu_backward, (), {}),
        "relu": (torch.clamp_min, torch.clamp_min, aten.threshold_backward, (0,), {}),
    }
    return curves[activation]


def torch_contestant(case: Case, o: Operands) -> Contestant:
    """Eager PyTorch with out= everywhere and its own fused derivative kernels."""
    import torch

    _, forward, backward, rest, options = torch_curves(case.activation)
    return in_place(
        case,
        Operands._make(map(torch.from_numpy, o)),
        torch,
        lambda a, b, bias, out: torch.addmm(bias, a, b, out=out),
        lambda x, out: forward(x, *rest, **options, out=out),
        lambda x, grad, out: backward.grad_input(grad, x, *rest, **options, grad_input=out),
    )


# --- compilers ------------------------------------------------------------------------------------

#: The library of a compiled program, which makes its results in any case.
COMPILED = SimpleNamespace(
    empty=lambda shape, dtype: None,
    matmul=lambda x, y, out: x @ y,
    multiply=lambda x, y, out: x * y,
    sum=lambda x, axis, out: x.sum(axis),
)


def torch_compile_contestant(case: Case, o: Operands) -> Contestant:
    """torch.compile on the explicit formulas, for exactly this shape (dynamic=False)."""
    import torch

    torch._dynamo.reset()  # each case is a program of its own; the recompile limit counts them
    forward, _, backward, rest, options = torch_curves(case.activation)
    run, names = program(
        case,
        o,
        COMPILED,
        lambda a, b, bias, out: torch.addmm(bias, a, b),
        lambda x, out: forward(x, *rest, **options),
        lambda x, grad, out: backward(grad, x, *rest, **options),
    )
    compiled = torch.compile(run, dynamic=False, fullgraph=True)
    return functools.partial(compiled, *(torch.from_numpy(getattr(o, name)) for name in names))


def jax_contestant(case: Case, o: Operands) -> Contestant:
    """jax.jit of the whole operation; a call returns when its results are there."""
    import jax

    jax.config.update("jax_enable_x64", True)

    # (its gelu is the tanh form by default)
    activation = getattr(jax.nn, case.activation)
    run, names = program(
        case,
        o,
        COMPILED,
        lambda a, b, bias, out: a @ b + bias,
        lambda x, out: activation(x),
        lambda x, g, out: jax.vjp(activation, x)[1](g)[0],
    )
    views = dict(zip(("a", "b", "grad"), LAYOUTS[case.layout], strict=True))

    def on_views(*whole: Any) -> Any:
        return run(*(views.get(name, WHOLE).take(x) for name, x in zip(names, whole, strict=True)))

    compiled = jax.jit(on_views)
    # Whole arrays: a view would be copied here, where nobody counts the time.
    operands = [getattr(o, name) for name in names]
    arguments = [jax.numpy.asarray(x if x.base is None else x.base) for x in operands]
    return lambda: jax.block_until_ready(compiled(*arguments))


# Name in the tables: (the module that must be installed, what makes the contestant).
PEERS: dict[str, tuple[str, Callable[[Case, Operands], Contestant]]] = {
    "NumPy": ("numpy", numpy_contestant),
    "PyTorch": ("torch", torch_contestant),
    "torch.compile": ("torch", torch_compile_contestant),
    "JAX": ("jax", jax_contestant),
}


def installed(peer: str) -> bool:
    return importlib.util.find_spec(PEERS[peer][0]) is not None


def contestant(name: str, case: Case, o: Operands) -> Contestant:
    """Return the call of numfuse or of a peer, which returns its results."""
    make = numfuse_contestant if name == "numfuse" else PEERS[name][1]
    return make(case, o)


def tolerance(case: Case) -> float:
    """Bound on the relative error: 16 u sqrt(K) for the longest sum of this case, K terms.

    Rounding errors of a sum of K random terms grow as sqrt(K) u times the terms' own size, which
    is that of the result here; 16 covers the maximum over the elements and the activation.
    """
    longest = 1 if case.work in STREAMS else max(case.m, case.n, case.k)
    return 16 * float(np.finfo(case.dtype).eps) * math.sqrt(longest)
