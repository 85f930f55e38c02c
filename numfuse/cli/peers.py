"""The benchmark's work by numfuse and by each peer, every one in its best form.

A peer writes into arrays that were allocated before where its interface can (NumPy, PyTorch), and
uses explicit derivative formulas, not a tape. ``backward`` recomputes the pre-activation,
``backward_saved`` is given it: two products instead of three. Operands that are views are the same
views for everyone; JAX, which has none, takes them inside its compiled function.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numfuse.cli.ufuncs import Array, numpy_activation, numpy_times_slope

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
    def work(self) -> str:
        """The operation, whether its results are new arrays or not."""
        return self.operation.removesuffix("_fresh")

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
    """A callable without arguments that does the work."""

    run: Callable[[], Any]

    def arrays(self, results: Any) -> tuple[Array, ...]:
        """Return what a run made as arrays of NumPy."""
        return tuple(np.asarray(x) for x in results)


def results_memory(case: Case, empty: Callable[[], Any]) -> Callable[[], Any]:
    """Return what gives a result its memory: always the same, or a new array where it is timed."""
    if case.work != case.operation:
        return empty
    kept = empty()
    return lambda: kept


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


# --- NumPy ---------------------------------------------------------------------------------------


def in_place(
    case: Case,
    o: Operands,
    library: Any,
    layer: Callable[[Any], Any],
    activate: Callable[[Any, Any], Any],
    times_slope: Callable[[Any, Any, Any], Any],
) -> Contestant:
    """Return the work of a library that writes where it is told.

    Parameters
    ----------
    library : module
        NumPy, or what has its functions with ``out=``.
    layer : callable
        From an array to a @ b + bias in it.
    activate, times_slope : callable
        From (x, out) and (x, grad, out) to activation(x) and grad * activation'(x) in `out`.
    """
    a, b, bias, grad, pre, up = o
    x, s = library.empty_like(pre), library.empty_like(pre)
    new_gate, new_up = (results_memory(case, lambda: library.empty_like(pre)) for _ in range(2))
    d_a, d_b, d_bias = (library.empty(y.shape, dtype=y.dtype) for y in (a, b, bias))

    def gradients(source: Any) -> tuple[Any, ...]:
        grad_pre = times_slope(source, grad, s)
        library.matmul(grad_pre, b.T, out=d_a)
        library.matmul(a.T, grad_pre, out=d_b)
        library.sum(grad_pre, 0, out=d_bias)
        return d_a, d_b, d_bias

    def gated() -> tuple[Any, ...]:
        y = activate(pre, new_up())
        return (library.multiply(y, up, out=y),)

    def gated_backward() -> tuple[Any, ...]:
        y = activate(pre, new_up())
        library.multiply(y, grad, out=y)
        d_gate = times_slope(pre, grad, new_gate())
        return library.multiply(d_gate, up, out=d_gate), y

    runs = {
        "forward": lambda: (activate(layer(x), x),),
        "backward": lambda: gradients(layer(x)),
        "backward_saved": lambda: gradients(pre),
        "gated": gated,
        "gated_backward": gated_backward,
    }
    return Contestant(runs[case.work])


def numpy_contestant(case: Case, o: Operands) -> Contestant:
    """NumPy as one writes it for speed: out= and in-place ufuncs, products by its BLAS."""
    scratch = np.empty_like(o.pre)

    def layer(out: Array) -> Array:
        np.matmul(o.a, o.b, out=out)
        return np.add(out, o.bias, out=out)

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
    contestant = numpy_contestant(case._replace(dtype="float64"), wide)
    return tuple(x.copy() for x in contestant.arrays(contestant.run()))


# --- numfuse --------------------------------------------------------------------------------------


def numfuse_contestant(case: Case, o: Operands) -> Contestant:
    import numfuse as nf

    activation = case.activation
    out, d_gate, d_up = (np.empty_like(o.pre) for _ in range(3))
    gradients = tuple(np.empty(x.shape, x.dtype) for x in (o.a, o.b, o.bias))
    fresh = case.work != case.operation
    gate_out, gates_out = (None, None) if fresh else (out, (d_gate, d_up))

    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: (nf.matmul_bias_activation(o.a, o.b, o.bias, activation, out=out),),
        "backward": lambda: nf.matmul_bias_activation_bwd(
            o.grad, o.a, o.b, o.bias, activation, out=gradients
        ),
        "backward_saved": lambda: nf.matmul_bias_activation_bwd(
            o.grad, o.a, o.b, o.bias, activation, pre_activation=o.pre, out=gradients
        ),
        "gated": lambda: (nf.activation_mul(o.pre, o.up, activation, out=gate_out),),
        "gated_backward": lambda: nf.activation_mul_bwd(
            o.grad, o.pre, o.up, activation, out=gates_out
        ),
    }
    return Contestant(runs[case.work])


# --- PyTorch --------------------------------------------------------------------------------------


def torch_contestant(case: Case, o: Operands) -> Contestant:
    """Eager PyTorch with out= everywhere and its own fused derivative kernels."""
    import torch

    aten = torch.ops.aten
    tensors: Any = Operands._make(map(torch.from_numpy, o))
    activate: Callable[[Any, Any], Any] = {
        "gelu": lambda x, out: aten.gelu.out(x, approximate="tanh", out=out),
        "silu": lambda x, out: aten.silu.out(x, out=out),
        "relu": lambda x, out: torch.clamp(x, min=0, out=out),
    }[case.activation]
    times_slope: Callable[[Any, Any, Any], Any] = {
        "gelu": lambda x, g, out: aten.gelu_backward.grad_input(
            g, x, approximate="tanh", grad_input=out
        ),
        "silu": lambda x, g, out: aten.silu_backward.grad_input(g, x, grad_input=out),
        "relu": lambda x, g, out: aten.threshold_backward.grad_input(g, x, 0, grad_input=out),
    }[case.activation]

    def layer(out: Any) -> Any:
        return torch.addmm(tensors.bias, tensors.a, tensors.b, out=out)

    return in_place(case, tensors, torch, layer, activate, times_slope)


# --- compilers ------------------------------------------------------------------------------------


def program_of(
    case: Case,
    activate: Callable[[Any], Any],
    times_slope: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any], Any],
) -> tuple[Callable[..., tuple[Any, ...]], list[str]]:
    """Return the work as a function of arrays, for a compiler, and its operands' names.

    A compiled function allocates its results in any case.
    """

    def gradients(grad: Any, a: Any, b: Any, pre: Any) -> tuple[Any, ...]:
        grad_pre = times_slope(pre, grad)
        return grad_pre @ b.T, a.T @ grad_pre, grad_pre.sum(0)

    programs: dict[str, Callable[..., tuple[Any, ...]]] = {
        "forward": lambda a, b, bias: (activate(layer(a, b, bias)),),
        "backward": lambda grad, a, b, bias: gradients(grad, a, b, layer(a, b, bias)),
        "backward_saved": gradients,
        "gated": lambda pre, up: (activate(pre) * up,),
        "gated_backward": lambda grad, pre, up: (
            times_slope(pre, grad * up),
            activate(pre) * grad,
        ),
    }
    program = programs[case.work]
    return program, list(inspect.signature(program).parameters)


def torch_compile_contestant(case: Case, o: Operands) -> Contestant:
    """torch.compile on the explicit formulas, for exactly this shape (dynamic=False)."""
    import torch

    torch._dynamo.reset()  # each case is a program of its own; the recompile limit counts them
    aten, functional = torch.ops.aten, torch.nn.functional
    activate, times_slope = {
        "gelu": (
            lambda x: functional.gelu(x, approximate="tanh"),
            lambda x, g: aten.gelu_backward(g, x, approximate="tanh"),
        ),
        "silu": (functional.silu, lambda x, g: aten.silu_backward(g, x)),
        "relu": (functional.relu, lambda x, g: aten.threshold_backward(g, x, 0)),
    }[case.activation]
    program, names = program_of(
        case, activate, times_slope, lambda a, b, bias: torch.addmm(bias, a, b)
    )
    compiled = torch.compile(program, dynamic=False, fullgraph=True)
    arguments = [torch.from_numpy(getattr(o, name)) for name in names]
    return Contestant(lambda: compiled(*arguments))


def jax_contestant(case: Case, o: Operands) -> Contestant:
    """jax.jit of the whole operation; a call returns when its results are there."""
    import jax

    jax.config.update("jax_enable_x64", True)

    # (its gelu is the tanh form by default)
    activate = getattr(jax.nn, case.activation)

    def times_slope(x: Any, g: Any) -> Any:
        return jax.vjp(activate, x)[1](g)[0]

    program, names = program_of(case, activate, times_slope, lambda a, b, bias: a @ b + bias)
    views = dict(zip(("a", "b", "grad"), LAYOUTS[case.layout], strict=True))

    def on_views(*whole: Any) -> Any:
        return program(
            *(views.get(name, WHOLE).take(x) for name, x in zip(names, whole, strict=True))
        )

    compiled = jax.jit(on_views)
    # Whole arrays: a view would be copied here, where nobody counts the time.
    operands = [getattr(o, name) for name in names]
    arguments = [jax.numpy.asarray(x if x.base is None else x.base) for x in operands]
    return Contestant(lambda: jax.block_until_ready(compiled(*arguments)))


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
