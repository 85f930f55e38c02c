"""The table of activations: value, first, second and third derivative of each, and its source.

A row is one formula and its derivatives, written by hand beside it, because stability is a choice:
every one holds its relative accuracy in the far tails, and none needs a guard. No finite or
infinite x gives NaN: a formula holds x within +-40 (gelu) or +-800 (silu) before a product that
could be inf * 0. Both limits serve every dtype: beyond them the value has long been 0 (or x, or 1)
in float64 and float32 alike, and no power of them overflows float32.

Largest errors of compiled values, in units in the last place: 2 in float32 and 2.01 in float64
(gelu_erf 3.2). `docs/numerics.md` has the table, of the derivatives too.

``relu'(0) = 0``; at NaN a value is NaN, and so is every derivative that depends on x, but a
comparison is false there: ``relu'(NaN) = relu''(NaN) = 0``.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import reprlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from numfuse import expr as ex
from numfuse.expr import Expr, constant
from numfuse.language.graph import Curve
from numfuse.runtime.dispatch import adapter_for
from numfuse.runtime.interrupts import import_module

__all__ = ["Activation", "activation", "activations", "get"]

Formula: TypeAlias = Callable[[Any], Any]
#: The module of a backend that compiles a formula.
_COMPILERS = {"cpu": "llvm.primitives", "cuda": "kernels.elementwise"}
_ORDER_NAMES = ("value", "derivative", "second_derivative", "third_derivative")


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
    """

    #: How often any formula was defined: what is kept by a name is stale after the next.
    definitions = 0
    #: Called after each definition, to forget that.
    forgetters: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, name: str, source: str, number: int | None = None) -> None:
        self.name = name
        self.source = source
        self.id = number
        self._formulas: dict[int, Formula] = {}
        self._traces: dict[int, Expr] = {}
        self._digest: str | None = None
        #: A string that stands for it in what is compiled (``name digest``), once one was needed.
        self.key: str | None = None
        self._curve: Curve | None = None
        self._made: dict[tuple[str, int], Any] = {}
        # Made once, so that a tracer that follows a call to one finds an object of the caller's.
        self._derivatives = self._derive()

    def _derive(self) -> tuple[Activation, ...]:
        return tuple(_Derived(self, order) for order in (1, 2, 3))

    # --- how it is written ------------------------------------------------------------------
    def _define(self, order: int, formula: Formula) -> None:
        made = ex.trace(formula)  # a formula that cannot be traced is refused where it stands
        self._formulas[order] = formula
        # Whatever was derived from an earlier formula of this or a lower order is stale.
        for later in range(order, 4):
            if later == order or later not in self._formulas:
                self._traces.pop(later, None)
        self._traces[order] = made
        self._digest = self.key = self._curve = None
        self._made.clear()
        for derived in self._derivatives:
            derived.key = derived._curve = None
        Activation.definitions += 1
        for forget in Activation.forgetters:
            forget()

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
        """The recorded graphs that its digest is made of."""
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
            text = ex.dumps(self.formulas())
            self._digest = hashlib.sha256(text.encode()).hexdigest()
        return self._digest

    def _order_of(self, order: int) -> Expr:
        """The graph of a derivative, or of what is zero beyond the table (else ValueError)."""
        return self.trace(order) if order < 4 else self.derived(order).trace(0)

    @property
    def curve(self) -> Curve:
        """The activation as formulas of several variables call it (`numfuse.epilogues`)."""
        if self._curve is None:
            self._curve = Curve(self.name, self._order_of)
        return self._curve

    @property
    def is_identity(self) -> bool:
        """Whether the value is the argument itself: there is no pre-activation beside it."""
        return self.trace(0) is ex.SYMBOL

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
            return ex.substitute(self.trace(order), x)
        adapter = adapter_for(x=x)
        if adapter is not None:
            return _by_adapter(adapter, x, self.derived(order))
        from numfuse.language import elementary

        return elementary.evaluate(self.trace(order), x)

    def _either(self, order: int, argument: Any) -> Any:
        # As a decorator it takes a function; as a function it takes arrays (or a symbol).
        if callable(argument) and not isinstance(argument, (Expr, Activation)):
            self._define(order, argument)
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
            module = f"numfuse.backends.{target}"
            own = f"{module}.{_COMPILERS[target]}"
            try:
                primitives: Any = import_module(own)
            except ModuleNotFoundError as error:
                from numfuse.errors import BackendUnavailable

                # Only these modules: the failed import of another package speaks for itself.
                known = error.name in (module, own)
                reason = "this version of numfuse does not contain it" if known else str(error)
                extra = None if target == "cpu" else target
                raise BackendUnavailable(target, reason, extra) from error
            made = self._made[target, order] = primitives.device_function(
                self.trace(order),
                re.sub(r"\W", "_", f"{self.name}_{_ORDER_NAMES[order]}", flags=re.A),
            )
        return made

    @property
    def njit(self) -> Any:
        """The value as a Numba function, for float32 and float64 scalars in your own kernels."""
        return self._device("cpu", 0)

    @property
    def njit_derivative(self) -> Any:
        """The first derivative as a Numba function."""
        return self._device("cpu", 1)

    @property
    def njit_second_derivative(self) -> Any:
        """The second derivative as a Numba function."""
        return self._device("cpu", 2)

    @property
    def njit_third_derivative(self) -> Any:
        """The third derivative as a Numba function."""
        return self._device("cpu", 3)

    @property
    def cuda(self) -> Any:
        """The value as a CUDA device function; BackendUnavailable without that backend."""
        return self._device("cuda", 0)

    @property
    def cuda_derivative(self) -> Any:
        """The first derivative as a CUDA device function."""
        return self._device("cuda", 1)

    @property
    def cuda_second_derivative(self) -> Any:
        """The second derivative as a CUDA device function."""
        return self._device("cuda", 2)

    @property
    def cuda_third_derivative(self) -> Any:
        """The third derivative as a CUDA device function."""
        return self._device("cuda", 3)

    # --- identity ---------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"<activation {self.name!r}: {self.source}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_text, (self.name, self.source, self.id, ex.dumps(self.formulas()))


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

    def _define(self, order: int, formula: Formula) -> None:
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
        """The base's."""
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


def _from_text(name: str, source: str, number: int | None, text: str) -> Activation:
    """Unpickle: the registered activation if it is the same one, else an unregistered copy."""
    made = Activation(name, source, number)
    made._traces = dict(enumerate(ex.loads(text)))
    known = _TABLE.get(name)
    return known if known is not None and known.digest == made.digest else made


_TABLE: dict[str, Activation] = {}


def _register(formula: Formula, name: str, source: str, number: int | None = None) -> Activation:
    made = Activation(name, source, number)
    made._define(0, formula)
    _TABLE[name] = made
    return made


#: Printable ASCII without quotes and the backslash, which have a meaning in the texts that name a
#: kernel; 100 of them are more than a message has room for.
_NAME = re.compile(r"[ !#-&(-\[\]-_a-~]{1,100}")


def _checked_name(formula: Any, name: Any) -> str:
    """The name to register a formula by: the one given, else the function's own."""
    if not callable(formula):
        raise TypeError(
            f"formula must be a function of one argument, got {type(formula).__qualname__}"
        )
    if name is None:
        name = getattr(formula, "__name__", None)
        if name is None:
            raise TypeError(
                f"name must be given for a formula without a __name__, "
                f"got a {type(formula).__qualname__}"
            )
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__qualname__}")
    # Python's own names of functions may have letters of every alphabet.
    if not _NAME.fullmatch(name) and not (name.isidentifier() and len(name) <= 100):
        raise ValueError(
            f"name must be 1 to 100 characters of printable ASCII without quotes and backslash, or "
            f"a Python identifier of that length, got {reprlib.repr(name)}"
        )
    return name


def activation(
    formula: Formula | None = None, /, *, source: str = "", name: str | None = None
) -> Any:
    """Define an activation; the decorated name becomes the :class:`Activation`.

    Parameters
    ----------
    formula : callable
        Scalar in, scalar out, written with arithmetic and the functions of `numfuse.expr`. It is
        called once, with a symbol.
    source : str, optional
        Where the formula comes from.
    name : str, optional
        Default: the function's name. A name that exists is redefined. 1 to 100 characters of
        printable ASCII without quotes and backslash, or a Python identifier of that length.

    Returns
    -------
    Activation
        Whose ``derivative``, ``second_derivative`` and ``third_derivative`` are decorators for the
        formulas of the derivatives. One that is left out is differentiated from the trace, which is
        exact but not always stable where infinities or large cancelling terms meet.

    Raises
    ------
    TypeError
        If the formula branches on its argument, or calls what a symbol cannot serve; if `formula`
        is no function, or `name` or `source` no str.
    ValueError
        For another name, and for a formula of more than 1000 operations.

    Examples
    --------
    >>> import numfuse as nf
    >>> from numfuse.expr import log1p, exp, tanh
    >>> @nf.activation(source="Misra 2019, arXiv:1908.08681")
    ... def mish(x):
    ...     return x * tanh(log1p(exp(x)))
    """

    if not isinstance(source, str):
        raise TypeError(f"source must be a str, got {type(source).__qualname__}")

    def decorate(made: Formula) -> Activation:
        return _register(made, _checked_name(made, name), source or "user-defined")

    return decorate if formula is None else decorate(formula)


def activations() -> dict[str, Activation]:
    """Every registered activation by name, in the order of definition (a copy of the table)."""
    return dict(_TABLE)


def get(which: str | Activation) -> Activation:
    """The activation of that name, or the object itself.

    Raises
    ------
    ValueError
        For a name that is not registered; the message lists those that are.
    TypeError
        For anything but a str or an Activation.
    """
    if isinstance(which, str):
        found = _TABLE.get(which)
        if found is not None:
            return found
        # (a search in a text of any length would take any time)
        close = difflib.get_close_matches(which[:200].lower(), _TABLE, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        got = repr(which) if len(which) <= 200 else reprlib.repr(which)
        raise ValueError(f"activation must be one of {', '.join(_TABLE)}, got {got}{hint}")
    if isinstance(which, Activation):
        return which
    raise TypeError(
        f"activation must be a name (str) or a numfuse.activations.Activation, "
        f"got {type(which).__name__}"
    )


# --- the table ----------------------------------------------------------------------------------
def _row(number: int | None, source: str) -> Callable[[Formula], Activation]:
    return lambda formula: _register(formula, formula.__name__, source, number)


@_row(0, "identity")
def none(x: Any) -> Any:
    return x


@none.derivative
def _(x: Any) -> Any:
    return 1.0


@_row(1, "Nair and Hinton 2010, ICML, Rectified linear units")
def relu(x: Any) -> Any:
    return ex.maximum(x, 0.0)


@relu.derivative
def _(x: Any) -> Any:
    return ex.where(x > 0.0, 1.0, 0.0)


@relu.second_derivative
def _(x: Any) -> Any:
    return 0.0


# f(x) = x s(v(x)) with an odd v is max(x, 0) - y s(-v(y)), y = |x|: one tail, of known sign, for
# both sides, and an infinite x needs nothing of its own. f' is f'(-y) below zero, else 1 - f'(-y).
def _size(x: Any, limit: float) -> Any:
    # Not abs(x), whose derivative at 0 is 0: here it is 1, as that of _positive.
    return ex.minimum(ex.copysign(x, 1.0), limit)


def _positive(x: Any) -> Any:
    """x or 0; -0 stays -0."""
    return ex.where(x < 0.0, 0.0, x)


#: The same functions in fewer operations: {id of a trace: (the trace, the short one)}.
_SHORT: dict[int, tuple[Expr, Expr]] = {}


def _short(row: Activation, order: int) -> Callable[[Formula], Formula]:
    """A formula of `row`'s derivative of this order for results that are rounded to 16 bits.

    It may lose what 16 bits do not hold: some 2^-17 of a value in the far tails. NaN goes through
    the exponential, infinities meet a factor that is clamped.
    """

    def decorate(formula: Formula) -> Formula:
        trace = row.trace(order)
        _SHORT[id(trace)] = trace, ex.trace(formula)
        return formula

    return decorate


def short_form(expr: Expr) -> Expr:
    """The graph in few operations where the table has one for 16-bit results, else itself."""
    return _SHORT.get(id(expr), (expr, expr))[1]


# gelu = x s(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3), never x (1 + tanh(v/2)) / 2, which loses the
# negative tail. There the relative error of s(v) is the absolute error of v, which reaches -100 in
# float32: rounding v alone would cost 180 units in the last place. So v is carried as hi + lo, and
# its two constants as head and tail.
_V1 = constant("1.59576912160573071175978423973752747390343")  # 2 sqrt(2/pi)
_V3 = constant("0.07135481627260024877633875227986354099559")  # 0.044715 of that
# 15 bits: V1_HEAD - q below is exact for q < 2^9 in float32 (2^38 in float64), |x| <= 40 gives 116.
_V1_HEAD, _V1_TAIL = _V1.split(15)
_V3_HEAD, _V3_TAIL = _V3.split(24)
_GELU_LIMIT = 40.0


def _gelu_argument(x: Any) -> tuple[Any, Any]:
    """v(x) as hi + lo, the low word of which is up to 2^-15 of the whole."""
    square, square_low = ex.product(x, x), ex.product_low(x, x)
    q = ex.fma(square, _V3_HEAD, _V1_HEAD)
    tails = _V1_TAIL + _V3_TAIL * square + _V3_HEAD * square_low
    rest = ex.fma(square, _V3_HEAD, _V1_HEAD - q)  # comes last: the longest chain
    return ex.product(x, q), ex.product_low(x, q) + x * tails + x * rest


@_row(2, "Hendrycks and Gimpel 2016, arXiv:1606.08415 (tanh form)")
def gelu(x: Any) -> Any:
    y = _size(x, _GELU_LIMIT)
    hi, lo = _gelu_argument(y)
    return _positive(x) - ex.scaled_sigmoid(y, -hi, -lo)


@_short(gelu, 0)
def _(x: Any) -> Any:
    return ex.scaled_sigmoid(ex.maximum(x, -_GELU_LIMIT), x * ex.fma(x * x, _V3, _V1))


@gelu.derivative
def _(x: Any) -> Any:
    y = _size(x, _GELU_LIMIT)
    hi, lo = _gelu_argument(y)
    v1 = _V1 + 3 * _V3 * (y * y)
    tail = ex.scaled_sigmoid(1.0 - y * v1 * ex.scaled_sigmoid(1.0, hi, lo), -hi, -lo)
    return ex.where(x < 0.0, tail, 1.0 - tail)


@_short(gelu, 1)
def _(x: Any) -> Any:
    s = ex.sigmoid(x * ex.fma(x * x, _V3, _V1))
    y = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return s * ex.fma(y * ex.fma(y * y, 3 * _V3, _V1), 1.0 - s, 1.0)


@gelu.second_derivative
def _(x: Any) -> Any:
    # s'' = s' t with t = 1 - 2 s;  (x s(v))'' = s' (2 v' + x (t v'^2 + v''))
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    hi, lo = _gelu_argument(x)
    v1, v2 = _V1 + 3 * _V3 * (x * x), 6 * _V3 * x
    t = 1.0 - 2.0 * ex.scaled_sigmoid(1.0, hi, lo)
    return ex.scaled_bell(2.0 * v1 + x * (t * (v1 * v1) + v2), hi, lo)


@gelu.third_derivative
def _(x: Any) -> Any:
    # s''' = s' (1 - 6 s');  3 (s(v))'' + x (s(v))''', all over s'
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    hi, lo = _gelu_argument(x)
    v1, v2, v3 = _V1 + 3 * _V3 * (x * x), 6 * _V3 * x, 6 * _V3
    t = 1.0 - 2.0 * ex.scaled_sigmoid(1.0, hi, lo)
    bell = ex.scaled_bell(1.0, hi, lo)
    third = (1.0 - 6.0 * bell) * (v1 * v1 * v1) + 3.0 * t * v1 * v2 + v3
    return ex.scaled_bell(3.0 * (t * (v1 * v1) + v2) + x * third, hi, lo)


# silu: s(-746) is below the smallest float64.
_SILU_LIMIT = 800.0


@_row(3, "Elfwing et al. 2017, arXiv:1702.03118")
def silu(x: Any) -> Any:
    y = _size(x, _SILU_LIMIT)
    return _positive(x) - ex.scaled_sigmoid(y, -y)


@_short(silu, 0)
def _(x: Any) -> Any:
    return ex.scaled_sigmoid(ex.maximum(x, -_SILU_LIMIT), x)


@silu.derivative
def _(x: Any) -> Any:
    y = _size(x, _SILU_LIMIT)
    tail = ex.scaled_sigmoid(1.0 - y * ex.sigmoid(y), -y)
    return ex.where(x < 0.0, tail, 1.0 - tail)


@_short(silu, 1)
def _(x: Any) -> Any:
    s = ex.sigmoid(x)
    return s * ex.fma(ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT), 1.0 - s, 1.0)


@silu.second_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    return ex.scaled_bell(2.0 + x * (1.0 - 2.0 * ex.sigmoid(x)), x)


@silu.third_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    t = 1.0 - 2.0 * ex.sigmoid(x)
    return ex.scaled_bell(3.0 * t + x * (1.0 - 6.0 * ex.scaled_bell(1.0, x)), x)


@_row(4, "logistic function, Verhulst 1845")
def sigmoid(x: Any) -> Any:
    return ex.sigmoid(x)


def _sigmoid_prime(x: Any) -> Any:
    return ex.scaled_bell(1.0, x)


def _sigmoid_second(x: Any) -> Any:
    # 1 - 2 s(x) = -tanh(x / 2), which does not cancel near 0
    return ex.scaled_bell(-ex.tanh(0.5 * x), x)


def _sigmoid_third(x: Any) -> Any:
    return ex.scaled_bell(1.0 - 6.0 * ex.scaled_bell(1.0, x), x)


sigmoid.derivative(_sigmoid_prime)
sigmoid.second_derivative(_sigmoid_second)
sigmoid.third_derivative(_sigmoid_third)


@_row(5, "hyperbolic tangent")
def tanh(x: Any) -> Any:
    return ex.tanh(x)


# 1 - tanh^2 = 4 s(2x) s(-2x): the bell, which does not cancel where tanh is near 1.
@tanh.derivative
def _(x: Any) -> Any:
    return ex.scaled_bell(4.0, 2.0 * x)


@tanh.second_derivative
def _(x: Any) -> Any:
    return ex.scaled_bell(-8.0 * ex.tanh(x), 2.0 * x)


@tanh.third_derivative
def _(x: Any) -> Any:
    t = ex.tanh(x)
    return ex.scaled_bell(24.0 * (t * t) - 8.0, 2.0 * x)


_DENSITY = constant("0.39894228040143267793994605993438186847585863116493")  # 1 / sqrt(2 pi)


def _normal_density(factor: Any, x: Any) -> Any:
    """factor * exp(-x^2 / 2) / sqrt(2 pi), the square as a double word."""
    return ex.scaled_exp(_DENSITY * factor, -0.5 * ex.product(x, x), -0.5 * ex.product_low(x, x))


@_row(None, "Hendrycks and Gimpel 2016, arXiv:1606.08415 (exact form, x Phi(x))")
def gelu_erf(x: Any) -> Any:
    x = ex.maximum(x, -_GELU_LIMIT)
    return ex.scaled_normal_cdf(x, x)


@gelu_erf.derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return ex.normal_cdf(x) + _normal_density(x, x)


@gelu_erf.second_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return _normal_density(2.0 - x * x, x)


@gelu_erf.third_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return _normal_density(x * (x * x - 4.0), x)


@_row(None, "Dugas et al. 2001, NIPS 13")
def softplus(x: Any) -> Any:
    return ex.maximum(x, 0.0) + ex.log1p(ex.exp(-ex.abs(x)))


@softplus.derivative
def _(x: Any) -> Any:
    return ex.sigmoid(x)


softplus.second_derivative(_sigmoid_prime)
softplus.third_derivative(_sigmoid_second)
