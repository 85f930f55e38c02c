"""numfuse's functions on arrays that live on a CUDA device: nothing moves.

Numba device arrays, CuPy, PyTorch and JAX arrays, numfuse's own (`numfuse.to_device`), and whatever
has DLPack or ``__cuda_array_interface__``. Results are of the caller's kind (numfuse's own for the
last two), on the caller's device and current stream.

Lifetimes. PyTorch and CuPy give memory again in the order of the current stream, as their own
operations do. Of every other kind the operands are held until the work that reads them is done.

Streams. PyTorch's and CuPy's current one; the default stream for the others, with the waits that
their protocols ask for.

CUDA graphs. A call that was made before (with these shapes, dtypes and alignments) can be captured:
it launches, and takes memory from the pool of the capture. The first one compiles and loads, which
a capture may forbid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from numfuse import higher, problem, tiling
from numfuse.activations import get as get_activation
from numfuse.backends import Backend, active, latest, load
from numfuse.backends.cuda import CudaBackend
from numfuse.gradients import (
    GATED_NEEDS,
    GATED_SECOND_NEEDS,
    GEMM_NEEDS,
    GEMM_SECOND_NEEDS,
    RESIDUAL_NEEDS,
    RESIDUAL_SECOND_NEEDS,
    check_needs,
    check_outputs,
)

# numba-cuda may be missing, or have no GPU: the reason is a BackendUnavailable, not this import's.
load("cuda")

from numfuse.backends.cuda import dlpack, run  # noqa: E402
from numfuse.backends.cuda import higher as run_higher  # noqa: E402
from numfuse.backends.cuda.arrays import DeviceArray, dtype_of, ghost, pool_of  # noqa: E402
from numfuse.backends.cuda.arrays import download as download_ghost  # noqa: E402
from numfuse.backends.cuda.calls import Argument, Kept, Maker, call  # noqa: E402
from numfuse.backends.cuda.driver import Device, device, ordinal_of  # noqa: E402
from numfuse.backends.cuda.memory import Pool  # noqa: E402
from numfuse.backends.cuda.plans import Recorder  # noqa: E402

__all__ = [
    "activation_mul",
    "activation_mul_bwd",
    "activation_mul_double_bwd",
    "activation_mul_jvp",
    "matmul_bias_activation",
    "matmul_bias_activation_bwd",
    "matmul_bias_activation_double_bwd",
    "matmul_bias_activation_jvp",
    "matmul_bias_residual",
    "matmul_bias_residual_bwd",
    "matmul_bias_residual_double_bwd",
    "matmul_bias_residual_jvp",
    "synchronize",
    "to_numpy",
]


# --- kinds of array -----------------------------------------------------------------------------
class Kind:
    """How arrays of a kind are read and made."""

    #: Whether operands must be held until the work is done.
    holds = True

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        """The array, the number of its device, and what keeps it alive (None: x itself)."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """The caller's current stream."""
        return 0

    def maker(self, ordinal: int, stream: int) -> Maker:
        """What makes results."""
        owner = device(ordinal)

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            made = DeviceArray.new(owner, shape, dtype_of(dtype), stream)
            return self.wrap(made), made.address

        return make

    def wrap(self, made: DeviceArray) -> Any:
        """A result of numfuse's own as one of this kind."""
        return made

    def capture(self, ordinal: int) -> int | None:
        """0 where it is known that no graph is being captured; None: ask the driver."""
        return None

    def glance(self, operands: tuple[Any, ...]) -> tuple[Any, list[int], int] | None:
        """All that a call depends on, the addresses and the device; None: `read` each operand.

        An operand may be None; the first is not.
        """
        made: list[Any] = []
        addresses: list[int] = []
        place = -1
        for x in operands:
            if x is None:
                made.append(None)
                continue
            seen = self.look(x) if _KINDS.get(type(x)) is self else None
            if seen is None or place not in (-1, seen[2]):
                return None
            one, at, place = seen
            made.append(one)
            addresses.append(at)
        return tuple(made), addresses, place

    def look(self, x: Any) -> tuple[Any, int, int] | None:
        """Of one operand: all that a call depends on, its address and device."""
        return None


class _Own(Kind):
    """numfuse's own."""

    holds = False  # their memory knows the streams that used it

    def look(self, x: DeviceArray) -> tuple[Any, int, int] | None:
        if x.stream:  # made by another stream than these calls run on
            return None
        return (x.shape, x.strides, x.dtype, x.address & 15), x.address, x.device.ordinal

    def read(self, name: str, x: DeviceArray) -> tuple[Argument, int, Any]:
        if x.memory.block is None:
            raise ValueError(f"{name} has been given back")
        size = x.dtype.itemsize
        strides = tuple(s // size for s in x.strides)
        argument = Argument(
            x.address, x.shape, strides, x.dtype.name, bool(x.ghost.flags.writeable)
        )
        return argument, x.device.ordinal, None


class _Torch(Kind):
    holds = False

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._names = {
            torch.float64: "float64", torch.float32: "float32", torch.float16: "float16",
            torch.bfloat16: "bfloat16",
        }  # fmt: skip
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._stream = raw or (lambda i: torch.cuda.current_stream(i).cuda_stream)
        self._devices: dict[int, Any] = {}
        self._capturing = getattr(
            torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )
        self._tensors = {torch.Tensor, torch.nn.Parameter}
        self._grad = torch.is_grad_enabled

    def glance(self, operands: tuple[Any, ...]) -> tuple[Any, list[int], int] | None:
        # as `Kind.glance`, in one loop: a training step spends its time here
        tensor = self._tensors
        made: list[Any] = []
        addresses: list[int] = []
        place = operands[0].get_device()
        for x in operands:
            if x is None:
                made.append(None)
                continue
            if type(x) not in tensor or x.get_device() != place:
                return None
            if x.requires_grad and self._grad():
                return None
            at = x.data_ptr()
            made.append((x.shape, x.stride(), x.dtype, at & 15))
            addresses.append(at)
        return None if place < 0 else (tuple(made), addresses, place)

    def capture(self, ordinal: int) -> int | None:
        return None if self._capturing() else 0

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        dtype = self._names.get(x.dtype)
        if dtype is None:
            raise TypeError(
                f"{name} must have dtype float64, float32, float16 or bfloat16, got {x.dtype}"
            )
        if not x.is_cuda:
            raise TypeError(f"{name} must be on a CUDA device, got a tensor on {x.device}")
        if x.requires_grad and self._torch.is_grad_enabled():
            raise TypeError(
                f"{name} requires a gradient, which this call would lose: call it in "
                f"torch.no_grad(), or on {name}.detach()"
            )
        return Argument(x.data_ptr(), x.shape, x.stride(), dtype), x.get_device(), None

    def stream(self, ordinal: int) -> int:
        return int(self._stream(ordinal))

    def maker(self, ordinal: int, stream: int) -> Maker:
        empty, dtypes = self._torch.empty, self._dtypes
        where = self._devices.get(ordinal)
        if where is None:
            where = self._devices[ordinal] = self._torch.device("cuda", ordinal)

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            made = empty(shape, dtype=dtypes[dtype], device=where)
            return made, made.data_ptr()

        return make


class _CuPy(Kind):
    holds = False

    def __init__(self) -> None:
        cupy: Any = import_module("cupy")
        self._cupy = cupy

    def look(self, x: Any) -> tuple[Any, int, int] | None:
        at = x.data.ptr
        return (x.shape, x.strides, x.dtype, at & 15), at, x.device.id

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if not isinstance(x, self._cupy.ndarray):
            raise TypeError(f"{name} must be a cupy.ndarray, got {type(x).__qualname__}")
        size = x.itemsize
        strides = tuple(s // size for s in x.strides)
        return Argument(x.data.ptr, x.shape, strides, x.dtype.name), x.device.id, None

    def stream(self, ordinal: int) -> int:
        return int(self._cupy.cuda.get_current_stream(ordinal).ptr)

    def maker(self, ordinal: int, stream: int) -> Maker:
        cupy = self._cupy

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            with cupy.cuda.Device(ordinal):
                made = cupy.empty(shape, dtype_of(dtype))
            return made, made.data.ptr

        return make


class _Interface(Kind):
    """Whatever has ``__cuda_array_interface__`` (version 2 or 3)."""

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        made: dict[str, Any] = x.__cuda_array_interface__
        if made.get("mask") is not None:
            raise TypeError(f"{name} must be a plain array, got one with a mask")
        dtype = np.dtype(made["typestr"])
        at, read_only = made["data"]
        shape = tuple(made["shape"])
        steps = made.get("strides")
        if steps is None:
            strides, run = [], 1
            for length in reversed(shape):
                strides.append(run)
                run *= length
            strides.reverse()
        else:
            if any(s % dtype.itemsize for s in steps):
                raise ValueError(
                    f"{name} must have strides of whole elements, got {tuple(steps)} bytes"
                )
            strides = [s // dtype.itemsize for s in steps]
        ordinal = ordinal_of(at) if at else 0
        theirs = made.get("stream")
        if theirs not in (None, 0, 1):
            owner = device(ordinal)
            event = owner.event(theirs)
            owner.wait(0, event)
            owner.forget(event)
        return Argument(at, shape, tuple(strides), dtype.name, not read_only), ordinal, None


class _Numba(_Interface):
    def wrap(self, made: DeviceArray) -> Any:
        from numfuse.backends.cuda.toolchain import cuda

        if made.dtype.name == "bfloat16":
            return made
        return cuda.as_cuda_array(made, sync=False)


class _DLPack(Kind):
    """Whatever has ``__dlpack__``."""

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if x.__dlpack_device__()[0] not in (dlpack.CUDA, 13):
            raise TypeError(f"{name} must be on a CUDA device, got {type(x).__qualname__}")
        held = dlpack.take(x, 0)
        if held.dtype is None:
            raise TypeError(f"{name} must have dtype float64, float32, float16 or bfloat16")
        return Argument(held.address, held.shape, held.strides, held.dtype), held.ordinal, held


class _Jax(_DLPack):
    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if not hasattr(x, "__dlpack__") or type(x).__name__.endswith("Tracer"):
            raise TypeError(
                f"{name} must be an array with values, got {type(x).__qualname__}: call it outside "
                f"of jax.jit and its transformations"
            )
        found, ordinal, held = super().read(name, x)
        return found._replace(writable=False), ordinal, held  # JAX arrays never change

    def wrap(self, made: DeviceArray) -> Any:
        import jax

        return jax.dlpack.from_dlpack(made)


_KINDS: dict[type, Kind] = {}
_BY_ROOT = {"torch": _Torch, "cupy": _CuPy, "numba": _Numba, "jax": _Jax, "jaxlib": _Jax}
_MADE: dict[str, Kind] = {}


def _kind_of(x: Any) -> Kind | None:
    """How arrays like this one are read; None of what is no array of a device."""
    found = _KINDS.get(type(x))
    if found is not None:
        return found
    if x is None or isinstance(x, (ndarray, np.generic)):
        return None
    for base in type(x).__mro__:
        root = base.__module__.partition(".")[0]
        if isinstance(x, DeviceArray):
            root = "numfuse"
        if root in _BY_ROOT or root == "numfuse":
            if root not in _MADE:
                _MADE[root] = _Own() if root == "numfuse" else _BY_ROOT[root]()
            found = _MADE[root]
            break
    else:
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            found = _MADE.setdefault("dlpack", _DLPack())
        elif hasattr(x, "__cuda_array_interface__"):
            found = _MADE.setdefault("interface", _Interface())
        else:
            return None
    return _KINDS.setdefault(type(x), found)


# --- a call -------------------------------------------------------------------------------------
class _Place(NamedTuple):
    kind: Kind
    ordinal: int
    name: str


class _Call:
    """The operands and outputs of a call, and where they are."""

    def __init__(self, backend: str | Backend | None, **operands: Any) -> None:
        self.operands: dict[str, Argument] = {}
        self.outs: dict[str, tuple[Any, Argument]] = {}
        self._held: list[Any] = []
        self._own: list[DeviceArray] = []
        self._place: _Place | None = None
        late = []
        for name, x in operands.items():
            if self._place is None and _kind_of(x) is None:
                late.append((name, x))  # the message names the device of the others
            elif x is not None or name in ("grad", "a", "b", "residual"):
                self.operands[name] = self._read(name, x)
        for name, x in late:
            if x is not None or name in ("grad", "a", "b", "residual"):
                self._read(name, x)
        place: Any = self._place  # an array of a device brought the call here
        self.kind: Kind = place.kind
        self.ordinal: int = place.ordinal
        self.device = device(self.ordinal)
        self.precision = _precision(backend, self.ordinal)

    def _read(self, name: str, x: Any) -> Argument:
        kind = _kind_of(x)
        if kind is None:
            text = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            where = f"cuda:{self._place.ordinal}" if self._place else "a CUDA device"
            raise TypeError(
                f"{name} must be on {where} as the other operands, got {text}: "
                f"numfuse.to_device({name}, 'cuda') copies it there"
            )
        argument, ordinal, held = kind.read(name, x)
        if self._place is None:
            self._place = _Place(kind, ordinal, name)
        first = self._place
        if kind is not first.kind:
            text = f"{type(x).__module__}.{type(x).__qualname__}"
            raise TypeError(
                f"the operands must be arrays of one kind, got {text} for {name} beside "
                f"{first.name}"
            )
        if ordinal != first.ordinal:
            raise TypeError(
                f"{name} must be on cuda:{first.ordinal} as {first.name}, got an array on "
                f"cuda:{ordinal}"
            )
        if kind.holds:
            self._held.append(x if held is None else held)
        elif isinstance(x, DeviceArray):
            self._own.append(x)
        return argument

    def out(self, name: str, x: Any) -> None:
        """An output of the caller's; None is allocated."""
        if x is not None:
            self.outs[name] = x, self._read(name, x)

    def run(self, kind: str, options: tuple[Any, ...], make_problem: Any, quick: Any = None) -> Any:
        """Check, launch, and give the result back; `quick` is the key of `_quick`."""
        stream = self.kind.stream(self.ordinal)
        for x in self._own:
            self._follow(x, stream)
        result, kept = call(
            self.device, stream, self.precision, kind, self.operands, self.outs, options,
            make_problem, self.kind.maker(self.ordinal, stream), self.kind.capture(self.ordinal),
        )  # fmt: skip
        if quick is not None:
            if len(_QUICK) >= tiling.CUDA_KEPT_PLANS:
                _QUICK.clear()
            make = self.kind.maker(self.ordinal, stream)
            _QUICK[quick] = kept, make, self.device, pool_of(self.device)
        if self._held:
            _hold(self.device, stream, self._held)
        return result

    def _follow(self, x: DeviceArray, stream: int) -> None:
        """Let this stream wait for the work that makes an array of another one."""
        x.memory.streams.add(stream)
        if x.stream != stream:
            event = self.device.event(x.stream)
            self.device.wait(stream, event)
            self.device.forget(event)


#: Calls that were made before with no outputs of the caller's, by what is seen at a glance: their
#: steps, what makes their results, their device and its pool.
_QUICK: dict[Any, tuple[Kept, Maker, Device, Pool]] = {}


def _quick(options: tuple[Any, ...], backend: Any, operands: tuple[Any, ...]) -> tuple[Any, Any]:
    """(key, result) of a call that was made before; (key, None) of another; (None, None) of one
    that has to be looked at closely.
    """
    kind = _KINDS.get(type(operands[0]))
    if kind is None or kind.holds or backend is not None:
        return None, None
    chosen = active()
    precision = chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
    seen = kind.glance(operands)
    if seen is None:
        return None, None
    made, addresses, ordinal = seen
    key = options, kind, precision, made, ordinal
    entry = _QUICK.get(key)
    if entry is None:
        return key, None
    kept, make, owner, pool = entry
    results: list[Any] = []
    for spec in kept.results:
        if type(spec) is tuple:
            x, at = make(spec[1], spec[2])
            addresses.append(at)
            results.append(x)
        else:
            results.append(None)
    kept.steps.run(owner, pool, kind.stream(ordinal), addresses, kind.capture(ordinal))
    latest.call = kept.call
    return key, (results[0] if kept.pack is None else kept.pack(results))


_IN_FLIGHT: dict[int, deque[tuple[int, list[Any]]]] = {}


def _hold(owner: Device, stream: int, arrays: list[Any]) -> None:
    """Keep arrays until the work of a stream so far is done."""
    if owner.capture(stream):
        return  # the graph's arrays are the caller's to keep
    waiting = _IN_FLIGHT.setdefault(owner.ordinal, deque())
    waiting.append((owner.event(stream), arrays))
    while waiting and owner.passed(waiting[0][0]):
        owner.forget(waiting.popleft()[0])


def _precision(backend: str | Backend | None, ordinal: int) -> str:
    """Of float32 products; another backend asked for is an error, as nothing moves unasked."""
    if backend is None:
        chosen = active()
        return chosen.precision if isinstance(chosen, CudaBackend) else "ieee"
    if backend == "cuda":
        return "ieee"
    if isinstance(backend, CudaBackend) and backend.ordinal == ordinal:
        return backend.precision
    name = backend if isinstance(backend, str) else getattr(backend, "name", backend)
    raise ValueError(
        f"backend must be 'cuda' (or None) for arrays on cuda:{ordinal}, got {name!r}: "
        f"numfuse.to_numpy moves an array"
    )


# --- the functions ------------------------------------------------------------------------------
def matmul_bias_activation(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    return_pre_activation: bool = False,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation`."""
    act = get_activation(activation)
    save = bool(return_pre_activation)
    options = act.name, act.digest, save
    key = None
    if out is None:
        key, result = _quick(("forward", *options), backend, (a, b, bias))
        if result is not None:
            return result
    made = _Call(backend, a=a, b=b, bias=bias)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        p = problem.gemm(g["a"], g["b"], g.get("bias"), act, save, g.get("out"))
        return p, (("out", "pre") if save else ("out",)), None

    return made.run("forward", options, make, key)


def matmul_bias_residual(
    a: Any, b: Any, bias: Any, residual: Any, *, out: Any = None, backend: Any = None
) -> Any:
    """As :func:`numfuse.matmul_bias_residual`."""
    key = None
    if out is None:
        key, result = _quick(("residual",), backend, (a, b, bias, residual))
        if result is not None:
            return result
    made = _Call(backend, a=a, b=b, bias=bias, residual=residual)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        p = problem.gemm_residual(g["a"], g["b"], g.get("bias"), g["residual"], g.get("out"))
        return p, ("out",), None

    return made.run("forward", ("residual",), make, key)


def matmul_bias_activation_bwd(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = GEMM_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_bwd`."""
    act = get_activation(activation)
    needs = check_needs(needs, GEMM_NEEDS)
    options = act.name, act.digest, needs, bool(sum_batch), bool(guard)
    key = None
    if out is None:
        key, result = _quick(("backward", *options), backend, (grad, a, b, bias, pre_activation))
        if result is not None:
            return result
    made = _Call(backend, grad=grad, a=a, b=b, bias=bias, pre=pre_activation)
    outs = check_outputs(out, GEMM_NEEDS)
    names = tuple(f"d_{name}" for name in GEMM_NEEDS)
    for name, x in zip(names, outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p = problem.gemm_backward(
            g["grad"], g["a"], g["b"], g.get("bias"), act, g.get("pre"), needs, sum_batch, guard,
            tuple(g.get(name) for name in names),
        )  # fmt: skip
        return p, names, None

    return made.run("backward", options, make, key)


def matmul_bias_residual_bwd(
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    pre_activation: Any = None,
    needs: Iterable[str] = RESIDUAL_NEEDS,
    sum_batch: bool = False,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_bwd`."""
    made = _Call(backend, grad=grad, a=a, b=b, bias=bias, residual=residual, pre=pre_activation)
    needs, outs = check_needs(needs, RESIDUAL_NEEDS), check_outputs(out, RESIDUAL_NEEDS)
    names = tuple(f"d_{name}" for name in RESIDUAL_NEEDS)
    for name, x in zip(names, outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p, residual_grad = problem.gemm_residual_backward(
            g["grad"], g["a"], g["b"], g.get("bias"), g["residual"], g.get("pre"), needs,
            sum_batch, guard, tuple(g.get(name) for name in names),
        )  # fmt: skip
        if residual_grad is None:
            return p, names, None
        source, target = residual_grad.grad, residual_grad.d_residual

        def after(rec: Recorder, bind: Any) -> None:
            run.sum_to(rec, bind("grad", source), bind("d_residual", target), p.acc_dtype.name)

        return p, names, after

    return made.run("backward", ("residual", needs, bool(sum_batch), bool(guard)), make)


def activation_mul(a: Any, b: Any, activation: Any, *, out: Any = None, backend: Any = None) -> Any:
    """As :func:`numfuse.activation_mul`."""
    act = get_activation(activation)
    options = act.name, act.digest
    key = None
    if out is None:
        key, result = _quick(("gated", *options), backend, (a, b))
        if result is not None:
            return result
    made = _Call(backend, a=a, b=b)
    made.out("out", out)

    def make(g: dict[str, ndarray]) -> Any:
        return problem.gated(g["a"], g["b"], act, g.get("out")), ("out",), None

    return made.run("gated", options, make, key)


def activation_mul_bwd(
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    *,
    needs: Iterable[str] = GATED_NEEDS,
    guard: bool = True,
    out: Any = None,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_bwd`."""
    act = get_activation(activation)
    needs = check_needs(needs, GATED_NEEDS)
    options = act.name, act.digest, needs, bool(guard)
    key = None
    if out is None:
        key, result = _quick(("gated_backward", *options), backend, (grad, a, b))
        if result is not None:
            return result
    made = _Call(backend, grad=grad, a=a, b=b)
    outs = check_outputs(out, GATED_NEEDS)
    for name, x in zip(("d_a", "d_b"), outs, strict=True):
        made.out(name, x)

    def make(g: dict[str, ndarray]) -> Any:
        p = problem.gated_backward(
            g["grad"], g["a"], g["b"], act, needs, guard, (g.get("d_a"), g.get("d_b"))
        )
        return p, ("d_a", "d_b"), None

    return made.run("gated_backward", options, make, key)


def matmul_bias_activation_double_bwd(
    u: Any,
    v: Any,
    w: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any = None,
    activation: Any = "none",
    *,
    needs: Iterable[str] = GEMM_SECOND_NEEDS,
    pre_activation: Any = None,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_double_bwd`."""
    act, needs = get_activation(activation), check_needs(needs, GEMM_SECOND_NEEDS)
    made = _Call(backend, grad=grad, a=a, b=b, bias=bias, u=u, v=v, w=w, pre=pre_activation)

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gemm_double_backward(
            g.get("u"), g.get("v"), g.get("w"), g["grad"], g["a"], g["b"], g.get("bias"), act,
            g.get("pre"), needs, guard,
        )  # fmt: skip
        return p, ("d_grad", "d_a", "d_b", "d_bias"), None

    return made.run("double_backward", (act.name, act.digest, needs, bool(guard)), make)


def matmul_bias_residual_double_bwd(
    u: Any,
    v: Any,
    w: Any,
    z: Any,
    grad: Any,
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    *,
    needs: Iterable[str] = RESIDUAL_SECOND_NEEDS,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_double_bwd`."""
    needs = check_needs(needs, RESIDUAL_SECOND_NEEDS)
    made = _Call(backend, grad=grad, a=a, b=b, residual=residual, bias=bias, u=u, v=v, w=w, z=z)

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gemm_residual_double_backward(
            g.get("u"), g.get("v"), g.get("w"), g.get("z"), g["grad"], g["a"], g["b"],
            g.get("bias"), g["residual"], needs, guard,
        )  # fmt: skip
        d_residual = p.result.d_residual

        def after(rec: Recorder, bind: Any) -> None:
            if d_residual is not None:
                run_higher.zero(rec, bind("d_residual", d_residual))

        return p, ("d_grad", "d_a", "d_b", "d_bias", "d_residual"), after

    return made.run("double_backward", ("residual", needs, bool(guard)), make)


def matmul_bias_activation_jvp(
    a: Any,
    b: Any,
    bias: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    activation: Any = "none",
    *,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_activation_jvp`."""
    act = get_activation(activation)
    made = _Call(backend, a=a, b=b, bias=bias, u=a_dot, v=b_dot, w=bias_dot)

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gemm_tangent(
            g["a"], g["b"], g.get("bias"), g.get("u"), g.get("v"), g.get("w"), act, guard
        )
        return p, ("out", "out_dot"), None

    return made.run("tangent", (act.name, act.digest, bool(guard)), make)


def matmul_bias_residual_jvp(
    a: Any,
    b: Any,
    bias: Any,
    residual: Any,
    a_dot: Any,
    b_dot: Any,
    bias_dot: Any,
    residual_dot: Any,
    *,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.matmul_bias_residual_jvp`."""
    made = _Call(
        backend, a=a, b=b, residual=residual, bias=bias, u=a_dot, v=b_dot, w=bias_dot,
        z=residual_dot,
    )  # fmt: skip

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gemm_residual_tangent(
            g["a"], g["b"], g.get("bias"), g["residual"], g.get("u"), g.get("v"), g.get("w"),
            g.get("z"),
        )  # fmt: skip
        return p, ("out", "out_dot"), None

    return made.run("tangent", ("residual",), make)


def activation_mul_double_bwd(
    u: Any,
    v: Any,
    grad: Any,
    a: Any,
    b: Any,
    activation: Any,
    *,
    needs: Iterable[str] = GATED_SECOND_NEEDS,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_double_bwd`."""
    act, needs = get_activation(activation), check_needs(needs, GATED_SECOND_NEEDS)
    made = _Call(backend, grad=grad, a=a, b=b, u=u, v=v)

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gated_double_backward(
            g.get("u"), g.get("v"), g["grad"], g["a"], g["b"], act, needs, guard
        )
        return p, ("d_grad", "d_a", "d_b"), None

    return made.run("gated_double_backward", (act.name, act.digest, needs, bool(guard)), make)


def activation_mul_jvp(
    a: Any,
    b: Any,
    a_dot: Any,
    b_dot: Any,
    activation: Any,
    *,
    guard: bool = True,
    backend: Any = None,
) -> Any:
    """As :func:`numfuse.activation_mul_jvp`."""
    act = get_activation(activation)
    made = _Call(backend, a=a, b=b, u=a_dot, v=b_dot)

    def make(g: dict[str, ndarray]) -> Any:
        p = higher.gated_tangent(g["a"], g["b"], g.get("u"), g.get("v"), act, guard)
        return p, ("out", "out_dot"), None

    return made.run("gated_tangent", (act.name, act.digest, bool(guard)), make)


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`."""
    kind = _kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    argument, ordinal, _ = kind.read("x", x)
    dtype = dtype_of(argument.dtype)
    strides = [s * dtype.itemsize for s in argument.strides]
    out = np.empty(argument.shape, dtype)
    stream = x.stream if isinstance(x, DeviceArray) else kind.stream(ordinal)
    source = ghost(argument.address, argument.shape, strides, dtype, False)
    download_ghost(device(ordinal), source, out, stream)
    return out


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`."""
    kind = _kind_of(x)
    if kind is None:
        raise TypeError(f"x must be an array on a CUDA device, got {type(x).__qualname__}")
    device(kind.read("x", x)[1]).synchronize()
