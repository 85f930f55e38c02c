"""Hop 3: which backend runs a problem.

A backend is any object with the methods of :class:`Backend`. Those that have names, which
`numfuse.registry` gives them, are loaded at their first use, so that importing numfuse imports
neither a compiler nor a device library.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from numfuse.errors import BackendUnavailable
from numfuse.runtime.interrupts import import_module
from numfuse.runtime.replay import Recording, Replay

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.problem import fused, product, second_order


@dataclass(frozen=True)
class Traits:
    """The promises that a backend's device and kernels leave open; by default none.

    A property that holds for every backend asks these, and never a backend's name.

    Parameters
    ----------
    memory : {"host", "device"}
        Where its own arrays live. With "device" it moves NumPy operands there, and has
        ``to_device``.
    dtypes : tuple of str
        What it computes.
    subnormals : tuple of str
        The dtypes whose subnormal numbers may count as zero.
    division : float
        The largest error of a division, in units in the last place.
    grad_pre : tuple of str
        The dtypes in which grad_pre is rounded before the products for d_a and d_b take it; others
        keep it in the accumulator's.
    intermediate : str, optional
        The dtype of a pre-activation that a backward computes again; None: the accumulator's.
    order : tuple of {"tier", "axes", "saved"}
        What decides on the order of a sum beside dtype and shape: the tier of a call, which follows
        from strides and alignment; whether the axes of a batch merge to one, in sums over its rows;
        whether a pre-activation was saved, in d_bias.
    libraries : tuple of str
        Libraries whose arrays of a device are operands as they are.
    reassociates : bool
        Whether a compiler of the device may order the sums within a formula by what else is
        computed beside it.
    simulator : bool
        Whether kernels run in an interpreter, where only small shapes are affordable.
    """

    memory: Literal["host", "device"] = "host"
    dtypes: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
    subnormals: tuple[str, ...] = ()
    division: float = 0.5
    grad_pre: tuple[str, ...] = ()
    intermediate: str | None = None
    order: tuple[Literal["tier", "axes", "saved"], ...] = ()
    libraries: tuple[str, ...] = ()
    reassociates: bool = False
    simulator: bool = False


class Backend(Protocol):
    """The interface of a backend.

    A run writes the problem's outputs and trusts what `numfuse.problem` promises. A backend that
    has several devices or precisions also has ``configure(device, precision)``, which checks both
    and returns a backend object; one whose arrays live elsewhere has ``to_device(x)``, one that
    computes jets ``jet(p)``.
    """

    name: str

    @property
    def traits(self) -> Traits: ...
    def forward(self, p: product.GemmProblem) -> None: ...
    def backward(self, p: product.GemmBackwardProblem) -> None: ...
    def gated(self, p: fused.FusedProblem) -> None: ...
    def gated_backward(self, p: fused.FusedProblem) -> None: ...
    def double_backward(self, p: second_order.GemmDoubleBackwardProblem) -> None: ...
    def tangent(self, p: second_order.GemmTangentProblem) -> None: ...
    def gated_double_backward(self, p: fused.FusedProblem) -> None: ...
    def gated_tangent(self, p: fused.FusedProblem) -> None: ...
    def fused(self, p: fused.FusedProblem) -> None: ...
    def describe(self) -> dict[str, Any]: ...
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any: ...
    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None: ...


class OneRun:
    """A base of backends on the host's arrays, which run problems of all kinds by one method."""

    run: Callable[[str, Any], None]

    def _run(self, kind: str, p: Any) -> None:
        self.run(kind, p)

    forward = partialmethod(_run, "forward")
    backward = partialmethod(_run, "backward")
    gated = partialmethod(_run, "gated")
    gated_backward = partialmethod(_run, "gated_backward")
    double_backward = partialmethod(_run, "double_backward")
    tangent = partialmethod(_run, "tangent")
    gated_double_backward = partialmethod(_run, "gated_double_backward")
    gated_tangent = partialmethod(_run, "gated_tangent")
    fused = partialmethod(_run, "fused")

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """A new array for results."""
        return np.empty(shape, dtype)


@runtime_checkable
class Replaying(Protocol):
    """The interface of a backend that is built on the replay, beside that of :class:`Backend`.

    `numfuse.operations` asks the table before it makes a problem: a call whose operands look like
    those of an earlier one is launched on them as they are. For that the arrays of a program are
    numbered in the order of the call, and nothing of them is used but their addresses.
    """

    #: The recorded calls of this object alone: its device and its precision are in no fingerprint.
    replay: Replay[Any]

    def record(self, kind: str, p: Any, names: Sequence[str]) -> Recording:
        """Return the program of a problem, without running it.

        `kind` is the name of its method. `names` are the fields of the problem that have the arrays
        of a launch, in their order; a field that the problem lacks is never used.
        """
        ...

    def launch(self, program: Any, arrays: tuple[np.ndarray | None, ...]) -> None:
        """Run a program on arrays, each at its number; set ``latest.call``.

        They begin where the problem's fields of these names would, and may have other axes.
        """
        ...


#: By the backend's name: the module that has the object ``BACKEND``, and the extra of the package
#: that it needs. `numfuse.registry` fills it.
SOURCES: dict[str, tuple[str, str | None]] = {}
#: The backend of calls that name none.
DEFAULT = "cpu"
#: The backends that were imported so far, by name.
LOADED: dict[str, Backend] = {}
#: Why a backend that was loaded can run no more.
_ended: dict[str, str] = {}
#: The backend of the `use_backend` block that runs.
ACTIVE: ContextVar[Backend | None] = ContextVar("numfuse_backend", default=None)


def load(name: str) -> Backend:
    """The backend of a name, imported at its first use.

    Raises
    ------
    ValueError
        No backend has this name.
    BackendUnavailable
        It cannot run here; the message names the extra and the reason.
    """
    backend = LOADED.get(name)
    if backend is not None:
        return backend
    if name in _ended:
        raise BackendUnavailable(name, _ended[name])
    if name not in SOURCES:
        known = ", ".join(map(repr, SOURCES))
        raise ValueError(f"backend must be one of {known} or a backend object, got {name!r}")
    module, extra = SOURCES[name]
    try:
        backend = cast(Backend, import_module(module).BACKEND)
    except BackendUnavailable:
        raise
    except Exception as error:
        reason = f"its import failed with {error!r}"
        if isinstance(error, ModuleNotFoundError):
            reason = f"the module {error.name} is not installed"
            if error.name == module:
                reason = "this version of numfuse does not contain it"
        elif not isinstance(error, ImportError):
            # A package that it needs refuses to be imported: as a rule over a variable of its own.
            told = ", ".join(f"{k}={v!r}" for k, v in os.environ.items() if k.startswith("NUMBA_"))
            reason += f" ({told})" if told else ""
        raise BackendUnavailable(name, reason, extra) from error
    return LOADED.setdefault(name, backend)


def end(name: str, reason: str) -> None:
    """Let a backend be unavailable from now on, as in a process that was forked after its use."""
    _ended[name] = reason
    LOADED.pop(name, None)


def resolve(backend: str | Backend | None = None) -> Backend:
    """The backend for NumPy operands: the one asked for, else that of `use_backend`, else the CPU.

    A backend that was asked for by name never falls back to another.
    """
    if backend is None:
        active = ACTIVE.get()
        if active is not None:
            return active
        backend = DEFAULT
    if isinstance(backend, str):
        return LOADED.get(backend) or load(backend)
    if not callable(getattr(backend, "forward", None)) or not hasattr(backend, "name"):
        raise TypeError(
            f"backend must be a name or a backend object, got {type(backend).__qualname__}"
        )
    return backend


#: Return the backend of the `use_backend` block that runs; None outside of one.
active: Callable[[], Backend | None] = ACTIVE.get


class use_backend(ContextDecorator):
    """Run NumPy operands on another backend inside a ``with`` block, or in a decorated function.

    The choice belongs to the current context (:mod:`contextvars`): other threads and other asyncio
    tasks keep theirs, and a thread that starts inside the block starts from the default. A
    ``backend=`` argument goes before it; arrays that live on a device stay on their own device.

    Parameters
    ----------
    backend : str or backend object
        "cpu", "cuda", "webgpu", "reference", or an object.
    device, precision : optional
        Passed to the backend, which checks them. The CPU has one device, the reference one
        precision too: they accept only None.
    shaders : str, optional
        For "webgpu" alone: "reference" takes numfuse's plain shaders of the shader contract
        (:func:`numfuse.webgpu.reference_shaders`) in place of its fast ones.

    Raises
    ------
    ValueError
        Unknown name, device, precision or shaders.
    TypeError
        Neither a name nor a backend object.
    BackendUnavailable
        The backend, or the precision on this processor, cannot run here.

    Examples
    --------
    >>> import numpy as np
    >>> import numfuse as nf
    >>> with nf.use_backend("reference"):
    ...     nf.silu_mul(np.zeros(2), np.ones(2))
    array([0., 0.])
    """

    def __init__(
        self,
        backend: str | Backend,
        device: Any = None,
        precision: str | None = None,
        *,
        shaders: str | None = None,
    ) -> None:
        if backend is None:
            raise TypeError("backend must be a name or a backend object, got NoneType")
        chosen = resolve(backend)
        if shaders is not None and not hasattr(chosen, "reference_shaders"):
            raise ValueError(
                f"shaders must be None for the backend {chosen.name!r}, got {shaders!r}"
            )
        if device is not None or precision is not None or shaders is not None:
            configure = getattr(chosen, "configure", None)
            if configure is None:
                raise ValueError(
                    f"device and precision must be None for the backend {chosen.name!r}, "
                    f"got device={device!r}, precision={precision!r}"
                )
            special = {} if shaders is None else {"shaders": shaders}
            chosen = configure(device=device, precision=precision, **special)
        self.backend = chosen
        # One object may be entered again inside itself, and by several threads at once.
        self._tokens: ContextVar[tuple[Token[Backend | None], ...]] = ContextVar(
            "numfuse_use_backend", default=()
        )

    def __enter__(self) -> Backend:
        self._tokens.set((*self._tokens.get(), ACTIVE.set(self.backend)))
        return self.backend

    def __exit__(self, *exc: object) -> None:
        *rest, token = self._tokens.get()
        self._tokens.set(tuple(rest))
        ACTIVE.reset(token)


class BackendStatus(NamedTuple):
    """Whether a backend can run here; true where it can, and its text is the reason where not."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return "available" if self.available else self.reason

    def __repr__(self) -> str:
        return str(self)


def backends() -> dict[str, BackendStatus]:
    """Every named backend, and whether it can run here.

    Returns
    -------
    dict
        {name: status}. A status is true where the backend is available; ``str(status)`` is
        "available", or the reason why not, with the extra that may be missing.

    Notes
    -----
    To find out, each backend is imported. That takes the time of importing Numba.
    """
    found = {}
    for name in SOURCES:
        try:
            load(name)
        except BackendUnavailable as error:
            found[name] = BackendStatus(False, str(error))
        else:
            found[name] = BackendStatus(True, "")
    return found


class Choice(NamedTuple):
    """The fastest way of one product of a call, as `numfuse.tune` found it."""

    #: Its sizes and dtype, and what is made of its sum.
    product: str
    #: The fastest way; "": that of a call that is not tuned.
    way: str
    #: Seconds of the device for the whole call, by the untuned way and by the fastest one.
    before: float
    seconds: float
    #: The number of ways that were timed.
    tried: int
    #: Where the choice is kept.
    file: str


class Call(NamedTuple):
    """A record of what the latest call of a thread ran."""

    backend: str
    device: str
    tier: str
    kernel: str
    tiling: Any


class _Latest(threading.local):
    call: Call | None = None


#: A backend sets ``latest.call`` (one attribute: a Call is built once per plan, not once per run).
latest = _Latest()


def last_call() -> Call | None:
    """Return what this thread's latest numfuse call ran; None before the first call.

    Returns
    -------
    Call or None
        A named tuple: backend, device, tier, kernel, tiling.
    """
    return latest.call
