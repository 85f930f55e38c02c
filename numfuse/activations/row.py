"""A row of the table: an activation's value with its three derivatives, for every target."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

from numfuse import expr as ex
from numfuse.errors import BackendUnavailable
from numfuse.expr import Expr, constant
from numfuse.language import elementary
from numfuse.language.curves import Curve, call, is_recording
from numfuse.language.text import digest
from numfuse.runtime.dispatch import adapter_for
from numfuse.runtime.interrupts import import_module

Formula: TypeAlias = Callable[[Any], Any]
_ORDER_NAMES = ("value", "derivative", "second_derivative", "third_derivative")


#: By target: the module with the ``device_function(graph, name)`` that compiles formulas for it,
#: and the extra of the package that this needs. `numfuse.registry` fills it.
COMPILERS: dict[str, tuple[str, str | None]] = {}
_SERIALS = itertools.count()


def _device_function(target: str, order: int) -> property:
    """Return the property of an activation that is its value, or a derivative, on a device."""
    kind = {
        "cpu": "a Numba function, for float32 and float64 scalars in your own kernels",
        "cuda": "a CUDA device function; BackendUnavailable without that backend",
    }
    what = _ORDER_NAMES[order].replace("_", " ")
    return property(lambda act: act._device(target, order), doc=f"The {what} as {kind[target]}.")


class Activation:
    """One row of the table: a scalar function with three derivatives, for every target.

    Called with a NumPy array it evaluates its traced formula in float64 and rounds once to the
    array's dtype: that is the reference for the kernels. A tensor or array of another library that
    an adapter serves stays one, on its device, with its derivatives: kernels compute it. Made by
    :func:`activation`.

    Attributes
    ----------
    name : str
    source : str
        Where the formula comes from.
    id : int or None
        Its number in the GPU kernels' contract (0 none, 1 relu, 2 gelu, 3 silu, 4 sigmoid, 5 tanh).
    serial : int
        A number that no other activation has, nor this one after another definition.
    """

    def __init__(self, name: str, source: str, number: int | None = None) -> None:
        self.name = name
        self.source = source
        self.id = number
        self.serial = next(_SERIALS)
        self._formulas: dict[int, Formula] = {}
        self._traces: dict[int, Expr] = {}
        self._digest: str | None = None
        #: A string that stands for it in what is compiled (``name digest``), once one was needed.
        self.key: str | None = None
        self._made: dict[tuple[str, int], Any] = {}
        # Made once, so that a tracer that follows a call to one finds an object of the caller's.
        self._derivatives = self._derive()

    def _derive(self) -> tuple[Activation, ...]:
        return tuple(_Derived(self, order) for order in (1, 2, 3))

    # --- how it is written ------------------------------------------------------------------
    def define(self, order: int, formula: Formula) -> None:
        """Let `formula` be the value (0) or a derivative (1, 2, 3)."""
        made = ex.trace(formula)  # a formula that cannot be traced is refused where it stands
        self._formulas[order] = formula
        # Whatever was derived from an earlier formula of this or a lower order is stale.
        for later in range(order, 4):
            if later == order or later not in self._formulas:
                self._traces.pop(later, None)
        self._traces[order] = made
        self._digest = None
        self._made.clear()
        for stale in (self, *self._derivatives):
            stale.key = None
            stale.__dict__.pop("curve", None)
            stale.serial = next(_SERIALS)

    def restore(self, traces: tuple[Expr, ...]) -> None:
        """Take graphs that were recorded before, as of a pickle."""
        self._traces = dict(enumerate(traces))

    def trace(self, order: int = 0) -> Expr:
        """The recorded graph of the value (0) or of a derivative (1, 2, 3).

        A derivative that was not written is differentiated from the one below it.
        """
        made = self._traces.get(order)
        if made is None:
            if order not in (1, 2, 3):
                raise ValueError(f"order must be 0, 1, 2 or 3, got {order!r}")
            made = self._traces[order] = ex.differentiate(self.trace(order - 1))
        return made

    def formulas(self) -> list[Expr]:
        """Return the recorded graphs that its digest is made of."""
        return [self.trace(order) for order in range(4)]

    def derived(self, order: int) -> Activation:
        """Its derivative of this order as an activation: ``derived(1)`` of f has the value f'.

        So that act^(k)(a) * b is the gated form of ``derived(k)``, and its gradient that of
        ``derived(k + 1)``. Beyond the third order there is only what is zero everywhere; any other
        raises ValueError when its trace is asked for.
        """
        if order == 0:
            return self
        return self._derivatives[order - 1] if 0 < order < 4 else _Derived(self, order)

    @property
    def digest(self) -> str:
        """Hash of the four graphs: equal for equal formulas, in any process."""
        if self._digest is None:
            self._digest = digest(self.formulas())
        return self._digest

    def _order_of(self, order: int) -> Expr:
        """The graph of a derivative, or of what is zero beyond the table (else ValueError)."""
        return self.trace(order) if order < 4 else self.derived(order).trace(0)

    @cached_property
    def curve(self) -> Curve:
        """The activation as formulas of several variables call it (`numfuse.epilogues`)."""
        return Curve(self.name, self._order_of)

    @property
    def is_identity(self) -> bool:
        """Whether the value is the argument itself: there is no pre-activation beside it."""
        return (self._traces[0] if 0 in self._traces else self.trace(0)) is ex.SYMBOL

    def second_derivative_is_zero(self) -> bool:
        """Whether the second derivative is 0 everywhere: what it multiplies is then left out."""
        second = self.trace(2)
        return second.op == "const" and second.payload == 0

    # --- over arrays ------------------------------------------------------------------------
    def __call__(self, x: Any) -> Any:
        """The value; of a symbol, its graph (so formulas may be made of activations)."""
        return self._at(0, x)

    def _at(self, order: int, x: Any) -> Any:
        if isinstance(x, Expr):
            if is_recording():
                return call(self.derived(order).curve, x)
            return ex.substitute(self.trace(order), x)
        adapter = adapter_for(x=x)
        if adapter is not None:
            return _by_adapter(adapter, x, self.derived(order))
        return elementary.evaluate(self.trace(order), x)

    def _either(self, order: int, argument: Any) -> Any:
        # As a decorator it takes a function; as a function it takes arrays (or a symbol).
        if callable(argument) and not isinstance(argument, (Expr, Activation)):
            self.define(order, argument)
            return argument
        return self._at(order, argument)

    def derivative(self, x: Any) -> Any:
        """The first derivative at `x`; as a decorator, the formula of it."""
        return self._either(1, x)

    def second_derivative(self, x: Any) -> Any:
        """The second derivative at `x`; as a decorator, the formula of it."""
        return self._either(2, x)

    def third_derivative(self, x: Any) -> Any:
        """The third derivative at `x`; as a decorator, the formula of it."""
        return self._either(3, x)

    # --- device functions -------------------------------------------------------------------
    def _device(self, target: str, order: int) -> Any:
        made = self._made.get((target, order))
        if made is None:
            module, extra = COMPILERS[target]
            try:
                loaded: Any = import_module(module)
            except ModuleNotFoundError as error:
                # A part of numfuse: the failed import of another package speaks for itself.
                known = module.startswith(str(error.name))
                reason = "this version of numfuse does not contain it" if known else str(error)
                raise BackendUnavailable(target, reason, extra) from error
            made = self._made[target, order] = loaded.device_function(
                self.trace(order),
                re.sub(r"\W", "_", f"{self.name}_{_ORDER_NAMES[order]}", flags=re.A),
            )
        return made

    njit = _device_function("cpu", 0)
    njit_derivative = _device_function("cpu", 1)
    njit_second_derivative = _device_function("cpu", 2)
    njit_third_derivative = _device_function("cpu", 3)
    cuda = _device_function("cuda", 0)
    cuda_derivative = _device_function("cuda", 1)
    cuda_second_derivative = _device_function("cuda", 2)
    cuda_third_derivative = _device_function("cuda", 3)

    # --- identity ---------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"<activation {self.name!r}: {self.source}>"


def _by_adapter(adapter: Any, x: Any, activation: Activation) -> Any:
    """The values at an array of another library."""
    function = getattr(adapter, "activation", None)
    if function is None:
        raise TypeError(
            f"x must be an array whose adapter evaluates activations, got "
            f"{type(x).__module__}.{type(x).__qualname__}: numfuse.activation_mul(x, ones, name) "
            f"does that on its device, numfuse.to_numpy(x) copies it"
        )
    return function(x, activation)


class _Derived(Activation):
    """The derivatives of another activation from an order on."""

    def __init__(self, base: Activation, order: int) -> None:
        super().__init__(f"{base.name}^({order})", f"derivative of {base.name}: {base.source}")
        self._base, self._order = base, order

    def _derive(self) -> tuple[Activation, ...]:
        return ()

    def define(self, order: int, formula: Formula) -> None:
        """Refuse: a derivative is defined with its base."""
        raise TypeError(f"{self.name} is derived: define the derivatives of {self._base.name!r}")

    def trace(self, order: int = 0) -> Expr:
        """The graph of the base's derivative, `order` orders higher."""
        if order < 0 or self._order + order < 4:
            return self._base.trace(self._order + order)
        if self._base.trace(3).op == "const":
            return constant(0)
        raise ValueError(
            f"the table of activations ends with third derivatives, "
            f"got order {self._order + order} of {self._base.name!r}"
        )

    def formulas(self) -> list[Expr]:
        """Return the base's."""
        return self._base.formulas()

    def derived(self, order: int) -> Activation:
        """The base's derivative of a higher order."""
        return self._base.derived(self._order + order)

    @property
    def digest(self) -> str:
        """Hash of the base's graphs and the order."""
        return hashlib.sha256(f"{self._order} {self._base.digest}".encode()).hexdigest()

    def _device(self, target: str, order: int) -> Any:
        return self._base._device(target, self._order + order)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._base.derived, (self._order,)
