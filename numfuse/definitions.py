"""Epilogues of a user's own: recorded once, named, pickled.

A formula is a function of accumulators, which come first, and of operands. How many of its
parameters are accumulators, a call tells: as many as it has right factors.
"""

from __future__ import annotations

import copyreg
import inspect
import itertools
import re
import reprlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from numfuse import expr as ex
from numfuse.activations.table import checked_name
from numfuse.epilogues import Epilogue
from numfuse.language import elementary
from numfuse.language.curves import leaf, recording, replace_leaves
from numfuse.language.graph import Expr, constant, topological
from numfuse.language.operations import TRUTH
from numfuse.language.text import dumps, loads
from numfuse.runtime.dispatch import adapter_for

#: By name, in the order of definition.
TABLE: dict[str, UserEpilogue] = {}
_SERIALS = itertools.count()
#: What was recorded of plain functions, as long as they live, and of the latest texts of such.
_RECORDED: weakref.WeakKeyDictionary[Any, UserEpilogue] = weakref.WeakKeyDictionary()
_BY_TEXT: dict[Any, list[UserEpilogue]] = {}
_MOST_TEXTS = 256
#: Stands for a name that a function's module does not have.
_NOWHERE = object()


class UserEpilogue:
    """A formula over accumulators and operands, for every target; made by :func:`epilogue`.

    Attributes
    ----------
    name : str
    source : str
        Where the formula comes from.
    parameters : tuple of str
        Its accumulators, then its operands.
    serial : int
        A number that no other epilogue has.
    """

    def __init__(
        self, name: str, source: str, parameters: tuple[str, ...], graphs: tuple[Expr, ...],
        several: bool, formula: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.source, self.parameters = name, source, parameters
        #: The results, over the inputs ``p_0``, ``p_1`` ..., and whether they make a tuple.
        self.graphs, self.several = graphs, several
        self.serial = next(_SERIALS)
        #: What was decorated.
        self.formula: Callable[..., Any] | None = None
        #: The numbers, and the other objects, that the function reads from around it, by name.
        self._numbers, self._others = _outer(formula)
        #: The same as `unchanged` compares it.
        self._code: Any = getattr(formula, "__code__", None)
        self._cells: tuple[Any, ...] = ()
        self._globals: tuple[tuple[str, Any], ...] = ()
        if self._code is not None:
            around: Any = formula
            self._cells = tuple(cell.cell_contents for cell in around.__closure__ or ())
            names = self._code.co_names
            self._globals = tuple((x, around.__globals__.get(x, _NOWHERE)) for x in names)
        #: By the number of accumulators, and by what else is made of it.
        self.made: dict[Any, Any] = {}

    def over(self, accumulators: int) -> Epilogue:
        """Return it over so many accumulators ``z_0`` ... and operands ``x_0`` ..."""
        found = self.made.get(accumulators)
        if found is None:
            count = len(self.parameters)
            names = [f"z_{i}" for i in range(accumulators)]
            names += [f"x_{i}" for i in range(count - accumulators)]
            places = {leaf(f"p_{i}"): leaf(name) for i, name in enumerate(names)}
            graphs = replace_leaves(self.graphs, places)
            results = tuple((f"out_{i}", graph) for i, graph in enumerate(graphs))
            split = tuple(names[:accumulators]), tuple(names[accumulators:])
            name = re.sub(r"\W", "_", self.name, flags=re.A)
            found = self.made[accumulators] = Epilogue(name, *split, results, self.graphs)
        return found

    def check(self, formula: Any) -> None:
        """Raise ValueError where a number that the formula reads from around it has changed."""
        if self._numbers:
            for (name, before), (_, now) in zip(self._numbers, _outer(formula)[0], strict=True):
                if not _same(before, now):
                    raise ValueError(
                        f"the epilogue {self.name!r} was recorded with {name} = {before!r}, which "
                        f"is now {now!r}: make {name} an operand of the formula, whose value may "
                        f"change from call to call, or define one with numfuse.epilogue for each"
                    )

    def unchanged(self, formula: Any) -> bool:
        """Return whether a function has the same code and finds the same objects around it.

        Then `reads` is true and `check` passes. This takes a tenth of their time.
        """
        if formula.__code__ is not self._code:
            return False
        if self._cells:
            for cell, before in zip(formula.__closure__, self._cells, strict=True):
                if cell.cell_contents is not before:
                    return False
        found = formula.__globals__
        for name, before in self._globals:
            if found.get(name, _NOWHERE) is not before:
                return False
        return True

    def reads(self, formula: Any) -> bool:
        """Return whether a function of the same text reads the same objects from around it."""
        others = _outer(formula)[1]
        pairs = zip(self._others, others, strict=False)
        return len(others) == len(self._others) and all(x is y for (_, x), (_, y) in pairs)

    def formulas(self) -> list[Expr]:
        """Return the recorded graphs, with which all that is made of them goes."""
        return list(self.graphs)

    def __call__(self, *arguments: Any) -> Any:
        """Return the results at symbols (so formulas may be made of epilogues) or at arrays.

        NumPy's are evaluated in float64 and rounded once, as the reference.
        """
        if len(arguments) != len(self.parameters):
            raise TypeError(
                f"the epilogue {self.name!r} takes {len(self.parameters)} arguments "
                f"({', '.join(self.parameters)}), got {len(arguments)}"
            )
        if any(isinstance(x, Expr) for x in arguments):
            places = {leaf(f"p_{i}"): constant(x) for i, x in enumerate(arguments)}
            found: Any = replace_leaves(self.graphs, places)
            return found if self.several else found[0]
        named = dict(zip(self.parameters, arguments, strict=True))
        adapter = adapter_for(**{name: x for name, x in named.items() if hasattr(x, "dtype")})
        if adapter is not None:
            return adapter.elementwise(self, *arguments)
        leaves = {leaf(f"p_{i}"): x for i, x in enumerate(arguments)}
        made = elementary.evaluate_all(self.graphs, leaves)
        return made if self.several else made[0]

    def __repr__(self) -> str:
        return f"<epilogue {self.name!r}: {self.source}>"


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y or (x != x and y != y))


def _outer(formula: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the numbers that a function reads from its closure and its module, and what else."""
    code, found = getattr(formula, "__code__", None), []
    if code is None:
        return [], []
    for name, cell in zip(code.co_freevars, formula.__closure__ or (), strict=True):
        found.append((name, cell.cell_contents))
    found += [(x, formula.__globals__[x]) for x in code.co_names if x in formula.__globals__]
    numbers = [(name, x) for name, x in found if isinstance(x, (int, float, np.number))]
    return numbers, [(name, x) for name, x in found if not isinstance(x, (int, float, np.number))]


def recorded(formula: Callable[..., Any], name: str, source: str) -> UserEpilogue:
    """Call a formula once with symbols, and return what it does.

    Raises
    ------
    TypeError
        If it branches on a symbol, calls what a symbol cannot serve, or returns no number.
    ValueError
        If it has more than 1000 operations.
    """
    parameters = []
    try:
        signature = inspect.signature(formula)
    except ValueError:
        raise TypeError(
            f"an epilogue must be a function whose parameters are known, got {formula!r}: write it "
            f"with the functions of numfuse.expr"
        ) from None
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.default is not p.empty:
            raise TypeError(
                f"the epilogue {name!r} must have positional parameters without defaults, one for "
                f"each accumulator and operand, got {p}"
            )
        parameters.append(p.name)
    with recording():
        made = formula(*(leaf(f"p_{i}") for i in range(len(parameters))))
    several = isinstance(made, tuple)
    try:
        graphs = tuple(constant(x) for x in (made if several else (made,)))
    except TypeError as error:
        raise TypeError(
            f"the epilogue {name!r} must return a value, or a tuple of values for "
            f"numfuse.elementwise: {error}"
        ) from None
    if not graphs:
        raise TypeError(f"the epilogue {name!r} must return a value, got an empty tuple")
    for graph in graphs:
        if graph.op in TRUTH:
            raise TypeError(
                f"the epilogue {name!r} returned a condition: write "
                f"numfuse.expr.where(condition, 1, 0)"
            )
    count = sum(bool(e.args) for e in topological(graphs))
    if count > ex.MOST:
        raise ValueError(
            f"an epilogue must have at most {ex.MOST} operations, got {count}: every one of them "
            f"would be compiled into each kernel"
        )
    return UserEpilogue(name, source, tuple(parameters), graphs, several, formula)


def epilogue(
    formula: Callable[..., Any] | None = None, /, *, source: str = "", name: str | None = None
) -> Any:
    """Define an epilogue; the decorated name becomes the :class:`UserEpilogue`.

    Parameters
    ----------
    formula : callable
        Of scalars, accumulators first and then operands, written with arithmetic, the functions of
        `numfuse.expr` and activations. It is called once, with symbols, and returns one value, or
        a tuple of values for :func:`elementwise`.
    source : str, optional
        Where the formula comes from.
    name : str, optional
        Default: the function's name. A name that exists is redefined. As for :func:`activation`.

    Returns
    -------
    UserEpilogue
        For :func:`matmul_epilogue` and :func:`elementwise`. Its derivatives are derived from the
        recorded graph, with the activations' own as leaves.

    Raises
    ------
    TypeError
        If the formula branches on an argument, calls what a symbol cannot serve, or has parameters
        with defaults; if `formula` is no function, or `name` or `source` no str.
    ValueError
        For another name, and for a formula of more than 1000 operations.

    Examples
    --------
    >>> import numfuse as nf
    >>> from numfuse import expr as ex
    >>> @nf.epilogue
    ... def scaled(z, bias, scale):
    ...     return ex.tanh(z + bias) * scale
    """
    if not isinstance(source, str):
        raise TypeError(f"source must be a str, got {type(source).__qualname__}")

    def decorate(made: Callable[..., Any]) -> UserEpilogue:
        known = checked_name(made, name)
        TABLE[known] = found = recorded(made, known, source or "user-defined")
        found.formula = made
        return found

    return decorate if formula is None else decorate(formula)


def get(which: Any) -> UserEpilogue:
    """Return the epilogue of a name, of a plain function, or the object itself."""
    if isinstance(which, str):
        if which not in TABLE:
            known = ", ".join(TABLE) or "none so far"
            raise ValueError(
                f"epilogue must be a function, or the name of one that numfuse.epilogue defined "
                f"({known}), got {reprlib.repr(which)}"
            )
        which = TABLE[which]
    if type(which) is UserEpilogue:
        formula = which.formula
        if formula is not None and which._numbers and not which.unchanged(formula):
            which.check(formula)
        return which
    if not callable(which):
        raise TypeError(
            f"epilogue must be a function, a name (str) or what numfuse.epilogue returned, got "
            f"{type(which).__name__}"
        )
    code = getattr(which, "__code__", None)
    made = None if code is None else _RECORDED.get(which)
    if made is not None:
        if made.unchanged(which):
            return made
        if made.reads(which):
            made.check(which)
            return made
    # A function that is made anew for each call (a lambda) is known by its text.
    key = which if code is None else code
    for made in tuple(_BY_TEXT.get(key, ())):
        if made.reads(which):
            made.check(which)
            break
    else:
        made = recorded(which, getattr(which, "__name__", type(which).__name__), "user-defined")
        _BY_TEXT.setdefault(key, []).append(made)
        while len(_BY_TEXT) > _MOST_TEXTS:
            _BY_TEXT.pop(next(iter(_BY_TEXT)), None)
    if code is not None:
        _RECORDED[which] = made
    return made


# --- pickles ------------------------------------------------------------------------------------
def _from_text(
    name: str, source: str, parameters: tuple[str, ...], several: bool, text: str
) -> UserEpilogue:
    """Unpickle: the registered epilogue if it is the same one, else an unregistered copy."""
    known = TABLE.get(name)
    if known is not None and known.several == several and dumps(known.graphs) == text:
        return known
    return UserEpilogue(name, source, parameters, loads(text), several)


copyreg.pickle(
    UserEpilogue,
    lambda e: (_from_text, (e.name, e.source, e.parameters, e.several, dumps(e.graphs))),
)
