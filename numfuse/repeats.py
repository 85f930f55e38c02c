"""Repeated calls of whole networks: each is one look-up and one launch.

The first call of a form goes the long way: it is checked, and a backend that has whole networks
keeps the program that it made of the call. The next call of this form on NumPy's arrays launches
that program. Where the call goes by calls of its own, of its layers or of wider arrays, it is kept
that a call of this form has passed its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy import empty, ndarray

from numfuse.activations import table
from numfuse.backends import ACTIVE, DEFAULT, LOADED
from numfuse.kept import KeptStacks
from numfuse.packs import Packed
from numfuse.problem.operands import address, apart
from numfuse.runtime.fingerprint import NDARRAY, NOTHING, reader
from numfuse.runtime.replay import Replay

_SEQUENCES = {list, tuple, Packed}


@dataclass(slots=True, eq=False, repr=False)
class KeptProgram:
    """A program, and what it takes beside the arrays of a call."""

    program: Any
    constants: tuple[Any, ...]
    #: The shape and dtype of each result; None where there is none.
    made: list[tuple[Any, Any] | None]
    #: What else the program depends on, and what that was.
    varies: Callable[[], Hashable] | None
    variant: Hashable
    #: The dtypes that the form has by their addresses.
    dtypes: Any
    #: How many elements, of which dtype, are kept for a backward; None: nothing is.
    stacks: tuple[int, Any] | None


@dataclass(slots=True, eq=False, repr=False)
class Checked:
    """A form of call that has passed its checks, and goes by calls of its own."""

    #: Whether that is one call of the same arrays in the dtype of the computation.
    widened: bool
    #: The dtypes that the form has by their addresses.
    dtypes: Any


class Repeat:
    """A call that its form would find again, going the long way, and who may keep its program."""

    __slots__ = ("chosen", "key", "operands", "outs")

    def __init__(
        self, chosen: Any, key: Hashable, operands: tuple[Any, ...], outs: tuple[Any, ...]
    ) -> None:
        self.chosen, self.key, self.operands, self.outs = chosen, key, operands, outs

    def keep(
        self,
        program: Any,
        constants: tuple[Any, ...],
        arrays: Sequence[Any],
        results: Sequence[Any],
        formulas: Iterable[Any],
        varies: Callable[[], Hashable] | None = None,
        stacks: ndarray | None = None,
    ) -> None:
        """Keep a program of such arrays, those of the operands and of these results.

        It may see them with other axes, if they begin where the call's own do. Behind them it takes
        `stacks`, if these are kept for a backward.
        """
        given = *self.operands, *results
        outs = self.outs or results
        if len(given) != len(arrays) or any(
            x is not None and x is not y for x, y in zip(outs, results, strict=True)
        ):
            return
        for x, y in zip(given, arrays, strict=True):
            if x is not y and (x is None or y is None or (x.size and address(x) != address(y))):
                return
        made = [None if y is None else (y.shape, y.dtype) for y in results]
        dtypes = {x.dtype for x in given if x is not None}
        variant = None if varies is None else varies()
        held = None if stacks is None else (stacks.size, stacks.dtype)
        found = KeptProgram(program, constants, made, varies, variant, dtypes, held)
        self.chosen.replay.keep(self.key, found, formulas, program.nbytes)

    def keep_checked(self, widened: bool) -> None:
        """Keep that a call of this form has passed its checks."""
        dtypes = {x.dtype for x in self.operands if x is not None}
        self.chosen.replay.keep(self.key, Checked(widened, dtypes))


def again(
    name: str,
    x: Any,
    weights: Any,
    biases: Any,
    others: tuple[Any, ...],
    outs: tuple[Any, ...],
    activation: Any,
    final: Any,
    options: tuple[Hashable, ...],
    backend: Any,
) -> tuple[Any, ...] | Checked | Repeat | None:
    """Run a call on NumPy's arrays that came before, and return its results, None where none is.

    Behind them is what was kept for a backward, if anything was.

    One that goes by calls of its own is returned as the :class:`Checked` of its form. Another is
    returned as a :class:`Repeat`; what has no form as None. `others` are the arrays
    beside x, weights and biases, `outs` those to write to, and `options` what the program depends
    on beside arrays and activations.
    """
    if type(x) is not ndarray:  # (torch.compile follows this call, but no look-up of a context)
        return None
    chosen: Any = ACTIVE.get() if backend is None else backend
    if chosen is None or type(chosen) is str:
        chosen = LOADED.get(DEFAULT if chosen is None else chosen)
    replay = getattr(chosen, "replay", None)
    kind = type(weights)
    if type(replay) is not Replay or kind not in _SEQUENCES:
        return None
    if biases is None:
        biases = (None,) * len(weights)
    elif type(biases) not in _SEQUENCES:
        return None
    operands = (x, *weights, *biases, *others)
    form = reader()((*operands, *outs) if outs else operands, NDARRAY, NOTHING)
    if form is None:
        return None
    try:
        hidden = table.TABLE[activation].serial if type(activation) is str else _serial(activation)
        last = table.TABLE[final].serial if type(final) is str else _serial(final)
        key = name, len(weights), kind, len(outs), hidden, last, options, form
        found = replay.find(key)
    except (AttributeError, KeyError, TypeError):  # no activation, or no hash
        return None
    if type(found) is Checked:
        return Repeat(chosen, key, operands, outs) if outs else found
    if found is None or (found.varies is not None and found.varies() != found.variant):
        return Repeat(chosen, key, operands, outs)
    made = found.made
    if outs:
        if not apart(outs, operands):
            return Repeat(chosen, key, operands, outs)
        pairs = zip(made, outs, strict=True)
        results = tuple(x if y is None or x is not None else empty(*y) for y, x in pairs)
    elif len(made) == 1:
        results = (empty(*made[0]),)
    else:
        results = tuple([None if y is None else empty(*y) for y in made])
    if found.stacks is None:
        chosen.launch(found.program, found.constants + operands + results)
        return results
    kept = KeptStacks(*found.stacks)
    chosen.launch(found.program, (*found.constants, *operands, *results, kept.stacks))
    return (*results, kept)


def _serial(activation: Any) -> Hashable:
    """Return the serial number of an activation, or those of a sequence."""
    if type(activation) is str:
        activation = table.TABLE[activation]
    if type(activation) in (list, tuple):
        return tuple(map(_serial, activation))
    serial: int = activation.serial
    return serial


def content(x: Any) -> Any:
    """Return what tells a constant from others; what has no hash for one that is not NumPy's."""
    if x is None:
        return None
    if type(x) is not ndarray:
        return []
    return x.shape, x.dtype, x.tobytes()
