"""numfuse's functions on arrays in the host's memory that speak DLPack: computed as NumPy's.

An operand is seen as the NumPy array over its own memory. The results are arrays of the operands'
library where that has the array API standard's ``__array_namespace__``, by the `from_dlpack` there,
and NumPy's where all that an operand has is DLPack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy import generic, ndarray

from numfuse import multilayer, networks
from numfuse.adapters.signatures import NAMES, PublicFunctions, Signature
from numfuse.fused_operations import NUMBERS
from numfuse.fusion import elementwise
from numfuse.operations import OPERATIONS
from numfuse.runtime import dlpack

__all__ = [
    *NAMES,
    "activation",
    "elementwise",
    "epilogue_jet",
    "fused",
    "jet",
    "network",
    "perceptron_at_once",
    "synchronize",
    "to_numpy",
]


class Exchange:
    """A call's operands as NumPy's arrays, and its results as arrays of the operands' library.

    Raises
    ------
    TypeError
        Operands of two libraries; NumPy's stand beside those that have DLPack alone.
    """

    def __init__(self, operands: Mapping[str, Any]) -> None:
        self.space: Any = np
        #: The first operand, whose device the results are on.
        self.like: Any = None
        #: The caller's outputs, by the NumPy arrays over them.
        self._own: dict[int, tuple[ndarray, Any]] = {}
        spaces: dict[Any, str] = {}
        for name, x in operands.items():
            if x is not None and type(x) not in NUMBERS:
                spaces.setdefault(_namespace(x), f"{name} {_kind(x)}")
                if self.like is None:
                    self.like = x
        if len(spaces) > 1 and not spaces.keys() <= {np, None}:
            kinds = ", ".join(spaces.values())
            raise TypeError(f"the operands must be arrays of one kind, got {kinds}")
        self.space = next(iter(spaces), None) or np

    def taken(self, name: str, x: Any) -> Any:
        """Return an operand as NumPy's; None, numbers and what is NumPy's as they are."""
        if x is None or type(x) in NUMBERS or isinstance(x, (ndarray, generic)):
            return x
        if not hasattr(type(x), "__dlpack__"):
            raise TypeError(f"{name} must be an array that has DLPack, got {_kind(x)}")
        return dlpack.host_array(name, x)

    def each(self, name: str, given: Any) -> Any:
        """Return the operands in a sequence as NumPy's."""
        if isinstance(given, ndarray) or not isinstance(given, Sequence):
            return given
        return [self.taken(f"{name}[{i}]", x) for i, x in enumerate(given)]

    def target(self, out: Any, name: str = "out") -> Any:
        """Return where to write as NumPy's, in tuples as they come."""
        if isinstance(out, (tuple, list)):
            return tuple(self.target(x, f"{name}[{i}]") for i, x in enumerate(out))
        if out is None:
            return None
        if _namespace(out) not in (self.space, None):
            own = self.space.__name__
            raise TypeError(f"{name} must be an array of {own} as the operands, got {_kind(out)}")
        there = out if isinstance(out, ndarray) else dlpack.host_array(name, out, shared=True)
        self._own[id(there)] = there, out
        return there

    def given(self, found: Any) -> Any:
        """Return results as arrays of the operands' library, in tuples as they come."""
        if isinstance(found, tuple):
            return tuple.__new__(type(found), map(self.given, found))
        if not isinstance(found, ndarray):
            return found
        own = self._own.get(id(found))
        if own is not None:
            return own[1]
        if self.space is np:
            return found
        made = self.space.from_dlpack(found if found.dtype.kind == "f" else _Exported(found))
        device = getattr(self.like, "device", None)
        return made if device is None or made.device == device else made.to_device(device)


class _Exported:
    """A NumPy array of bfloat16, which NumPy's own DLPack does not have."""

    def __init__(self, x: ndarray) -> None:
        self._x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        return dlpack.export(self._x, max_version=max_version)


def _namespace(x: Any) -> Any:
    """Return the library of an array by the array API standard; None where it does not say."""
    if isinstance(x, (ndarray, generic)):
        return np
    return x.__array_namespace__() if hasattr(type(x), "__array_namespace__") else None


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def fused(operation: Any, operands: tuple[Any, ...], *options: Any) -> Any:
    """Return the results of an operation; see :class:`numfuse.operations.Operation`."""
    *how, out, backend = options
    form = getattr(operation, "form", None)
    label = getattr(operation, "label", None) or (str if form is None else form.label)
    # (the weights of a jet are constants, and NumPy's by now)
    named = [(x, label(x), y) for x, y in zip(operation.operands, operands, strict=True)]
    call = Exchange({name: y for x, name, y in named if x != "weights"})
    given = tuple([call.taken(name, y) for _, name, y in named])
    return call.given(operation(given, *how, call.target(out), backend))


#: The jets of a layer and of a formula are operations too.
jet = epilogue_jet = fused


class _Standard(PublicFunctions):
    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        operation = OPERATIONS[signature.name]
        operands = [x[name] for name in operation.operands]
        how = x["activation"], tuple([x[name] for name in operation.flags]), x.get("needs", ())
        return fused(operation, tuple(operands), *how, x.get("out"), x["backend"])


globals().update(_Standard().functions())


# --- networks -------------------------------------------------------------------------------------
def _network(
    grads: Mapping[str, Any], x: Any, weights: Any, biases: Any, out: Any
) -> tuple[Exchange, list[Any], tuple[Any, Any, Any], Any]:
    """Return the call of a network, and its cotangents, operands and outputs as NumPy's."""

    def listed(name: str, given: Any) -> Iterator[tuple[str, Any]]:
        return ((f"{name}[{i}]", y) for i, y in enumerate(() if given is None else given))

    every = {"x": x, **dict(listed("weights", weights)), **dict(listed("biases", biases)), **grads}
    call = Exchange(every)
    own = call.taken("x", x), call.each("weights", weights), call.each("biases", biases)
    return call, [call.taken(*pair) for pair in grads.items()], own, call.target(out)


def network(
    grads: Sequence[Any] | None, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
    form: tuple[Any, Any], keep: Any, needs: Sequence[str], out: Any = None,
) -> Any:  # fmt: skip
    """Return a jet's results or, with `grads`, the gradients; `keep`: what the forward kept."""
    names = "grad", "grad_dot", "grad_ddot"
    named = {} if grads is None else dict(zip(names, grads, strict=True))
    call, cotangents, own, outs = _network(named, x, weights, biases, out)
    activation, final, guard, backend = how
    given: Any = {"directions": form[0], "second": form[1], "final": final, "guard": guard}
    given |= {"out": outs, "backend": backend}
    if grads is None:
        return call.given(networks.mlp_jet(*own, activation, keep=keep, **given))
    given |= {"needs": needs, "kept": keep}
    return call.given(networks.mlp_jet_bwd(*(*cotangents, *own, activation), **given))


def perceptron_at_once(
    grad: Any, x: Any, weights: Any, biases: Any, how: tuple[Any, ...], needs: Sequence[str],
    out: Any,
) -> Any:  # fmt: skip
    """Return a network's value or, with a cotangent, the gradients that are needed."""
    named = {} if grad is None else {"grad": grad}
    call, cotangents, own, outs = _network(named, x, weights, biases, out)
    activation, final, guard, backend = how
    given: Any = {"final": final, "out": outs, "backend": backend}
    if grad is None:
        return call.given(multilayer.mlp(*own, activation, **given))
    given |= {"needs": needs, "guard": guard}
    return call.given(multilayer.mlp_bwd(*(*cotangents, *own, activation), **given))


# --- arrays ---------------------------------------------------------------------------------------
def activation(x: Any, function: Any) -> Any:
    """Return the values of an activation at an array."""
    call = Exchange({"x": x})
    return call.given(np.asarray(function(call.taken("x", x))))


def to_numpy(x: Any) -> ndarray:
    """As :func:`numfuse.to_numpy`: the same memory."""
    return dlpack.host_array("x", x)


def synchronize(x: Any) -> None:
    """As :func:`numfuse.synchronize`: an array in the host's memory is ready."""
