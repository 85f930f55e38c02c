"""The activations by name: those of numfuse and those that a user defines."""

from __future__ import annotations

import copyreg
import re
import reprlib
from typing import Any

from numfuse.activations.row import Activation, Formula
from numfuse.language.text import dumps, loads

#: By name, in the order of definition.
TABLE: dict[str, Activation] = {}


def register(formula: Formula, name: str, source: str, number: int | None = None) -> Activation:
    """Define the activation of this name; `number` is that of the GPU kernels' contract."""
    made = Activation(name, source, number)
    made.define(0, formula)
    TABLE[name] = made
    return made


#: Printable ASCII without quotes and the backslash, which have a meaning in the texts that name a
#: kernel; 100 of them are more than a message has room for.
_NAME = re.compile(r"[ !#-&(-\[\]-_a-~]{1,100}")


def checked_name(formula: Any, name: Any) -> str:
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
        return register(made, checked_name(made, name), source or "user-defined")

    return decorate if formula is None else decorate(formula)


def activations() -> dict[str, Activation]:
    """Every registered activation by name, in the order of definition (a copy of the table)."""
    return dict(TABLE)


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
        found = TABLE.get(which)
        if found is not None:
            return found
        import difflib  # a fifth of the time of importing numfuse

        # (a search in a text of any length would take any time)
        close = difflib.get_close_matches(which[:200].lower(), TABLE, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        got = repr(which) if len(which) <= 200 else reprlib.repr(which)
        raise ValueError(f"activation must be one of {', '.join(TABLE)}, got {got}{hint}")
    if isinstance(which, Activation):
        return which
    raise TypeError(
        f"activation must be a name (str) or a numfuse.activations.Activation, "
        f"got {type(which).__name__}{', of which numfuse.activation makes one' * callable(which)}"
    )


# --- pickles ------------------------------------------------------------------------------------
def _from_text(name: str, source: str, number: int | None, text: str) -> Activation:
    """Unpickle: the registered activation if it is the same one, else an unregistered copy."""
    made = Activation(name, source, number)
    made.restore(loads(text))
    known = TABLE.get(name)
    return known if known is not None and known.digest == made.digest else made


def _reduced(act: Activation) -> tuple[Any, ...]:
    return _from_text, (act.name, act.source, act.id, dumps(act.formulas()))


copyreg.pickle(Activation, _reduced)
