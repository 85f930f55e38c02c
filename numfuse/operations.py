"""The operations behind the public functions: one table, and one way in which a call is run.

A call on NumPy arrays that comes again is replayed: its fingerprint is taken from the operands as
they are, before any check, and the program that was recorded for it runs on them. A fingerprint is
all that a program depends on but addresses. Every other call goes the long way: `problem` checks
it, and a backend runs it; one that is built on the replay records it for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

from numpy import empty, ndarray

from numfuse.activations import Activation, get, table
from numfuse.backends import ACTIVE, DEFAULT, LOADED, Backend, resolve
from numfuse.problem import gates, product, second_order
from numfuse.problem.fields import FIELD_OF
from numfuse.problem.operands import address, apart, array_of, as_plain, required
from numfuse.problem.results import check_needs, copy_late
from numfuse.runtime.dispatch import AGAIN, adapter_for
from numfuse.runtime.fingerprint import NDARRAY, NOTHING, reader
from numfuse.runtime.replay import Replay


@dataclass(slots=True, eq=False, repr=False)
class _Kept:
    """A recorded call; without a program, a call whose program depends on what `varies` returns."""

    program: Any
    #: The shape and dtype of each result; None where there is none.
    made: tuple[tuple[Any, Any] | None, ...] = ()
    #: The type of the tuple that the results make; None of a single result.
    pack: type | None = None
    varies: Callable[[], Hashable] | None = None
    #: The operands' dtypes, which the form in the fingerprint has by their addresses.
    dtypes: Any = ()


#: What makes the problem of each kind.
_PROBLEMS: dict[str, Callable[..., Any]] = {
    "forward": product.gemm,
    "backward": product.gemm_backward,
    "gated": gates.gated,
    "gated_backward": gates.gated_backward,
    "double_backward": second_order.gemm_double_backward,
    "tangent": second_order.gemm_tangent,
    "gated_double_backward": gates.gated_double_backward,
    "gated_tangent": gates.gated_tangent,
}
#: By kind, those of no gradients and no tangents.
_RESULTS = {"forward": ["out", "pre"], "gated": ["out"]}
#: By kind, those to the first order.
_SCALARS = {"backward": ["grad", "pre_activation"], "forward": [], "gated": []}
_SCALARS["gated_backward"] = []


class Operation:
    """The kind of call that a public function makes, and how it is run.

    `kind` is the method of a backend that runs its problem. Of the function's parameters `operands`
    are arrays, in their order (a `pre_activation` comes last), and `options` the others, out of
    `activation`, `needs`, `out` and what is true or false; a backward has `needs` and `guard` too.
    """

    def __init__(self, name: str, kind: str, operands: str, options: str) -> None:
        self.name, self.kind, self.problem = name, kind, _PROBLEMS[kind]
        #: What stands for it in fingerprints.
        self.mark: Hashable = name
        self.operands, self.options = operands.split(), options.split()
        if kind.endswith("backward"):
            self.options += ["needs", "guard"]
        #: The operands whose gradients may be asked for.
        self.needs: tuple[str, ...] = ()
        if "needs" in self.options:
            first = 0 if "double" in kind else 1
            every = ("grad", "a", "b", "bias", "residual")[first:]
            self.needs = tuple(name for name in every if name in self.operands)
        #: The operands that may be NumPy scalars, which arithmetic on 0-d arrays gives.
        self.scalars = _SCALARS.get(kind, self.operands)
        special = ("activation", "needs", "out")
        self.flags = [name for name in self.options if name not in special]
        #: What a call has beside operands, in that order, and which of it the problem takes.
        self.named = (*special, *self.flags)
        self.taken = [name in self.options for name in self.named]
        #: The fields of the problem that have the operands, then the results.
        results = [f"d_{x}" for x in self.needs] or _RESULTS.get(kind, ["out", "out_dot"])
        self.fields = (*(FIELD_OF.get(x, x) for x in self.operands), *results)
        #: Whether `out` is a tuple of the results.
        self.several = bool(self.needs)
        #: Whether the result may be an operand itself.
        self.in_place = kind == "gated"

    #: What makes an activation of a name.
    known: Callable[[Any], Any] = staticmethod(get)

    def __call__(
        self,
        operands: tuple[Any, ...],
        activation: Any = "none",
        flags: tuple[Any, ...] = (),
        needs: Any = (),
        out: Any = None,
        backend: str | Backend | None = None,
    ) -> Any:
        """Run a call on these operands, in the order of `operands`; flags in that of `flags`."""
        first = operands[0]
        if type(first) is not ndarray and first is not None:
            run = AGAIN.get(type(first), Operation._otherwise)
            return run(self, operands, activation, flags, needs, out, backend)
        chosen: Any = ACTIVE.get() if backend is None else backend
        if chosen is None or type(chosen) is str:
            chosen = LOADED.get(DEFAULT if chosen is None else chosen)
        replay = getattr(chosen, "replay", None)
        if type(replay) is not Replay:
            return self._otherwise(operands, activation, flags, needs, out, backend)
        outs: Any = ()
        if out is not None:
            # As many as there are results, or what the checks of `problem` will refuse.
            outs = tuple(out) if self.several and type(out) in (tuple, list) else (out,)
        form = reader()((*operands, *outs) if outs else operands, NDARRAY, NOTHING)
        if form is None:
            return self._otherwise(operands, activation, flags, needs, out, backend)
        # (what `get` does, as it is the way of nearly every call)
        act: Any = table.TABLE.get(activation) if type(activation) is str else activation
        if type(act) is not Activation:
            act = self.known(activation)
        if type(needs) is not tuple:
            needs = check_needs(needs, self.needs)
        key: tuple[Hashable, ...] = act.serial, self.mark, flags, needs, form
        if out is not None:
            key = *key, len(outs)
            if self.in_place:  # which of the operands each is
                for x in outs:
                    place = -1
                    for i, y in enumerate(operands):
                        if x is y:
                            place = i
                    key = *key, place
        try:
            found = replay.find(key)
        except TypeError:  # a name in `needs` that has no hash
            return self._first(operands, act, flags, needs, out, backend, None)
        if found is not None and found.varies is not None:
            found = replay.find((key, found.varies()))
        if found is None or (outs and not apart(outs, operands, self.in_place)):
            return self._first(operands, act, flags, needs, out, chosen, key)
        if found.pack is None:
            result = out if outs else empty(*found.made[0])
            chosen.launch(found.program, (*operands, result))
            return result
        made = []
        for spec, x in zip_longest(found.made, outs):
            made.append(x if spec is None or x is not None else empty(*spec))
        chosen.launch(found.program, (*operands, *made))
        return tuple.__new__(found.pack, made)

    def _otherwise(
        self,
        operands: tuple[Any, ...],
        activation: Any,
        flags: tuple[Any, ...],
        needs: Any,
        out: Any,
        backend: str | Backend | None,
    ) -> Any:
        """Run a call that has no form, or on a backend that has no replay."""
        for x in operands:
            if x is None or (type(x) is ndarray and x.flags.aligned):
                continue
            run = AGAIN.get(type(x), type(self).other)
            return run(self, operands, activation, flags, needs, out, backend)
        act = activation if type(activation) is Activation else self.known(activation)
        if type(needs) is not tuple:
            needs = check_needs(needs, self.needs)
        return self._first(operands, act, flags, needs, out, backend, None)

    def other(
        self,
        operands: tuple[Any, ...],
        activation: Any,
        flags: tuple[Any, ...],
        needs: Any,
        out: Any,
        backend: str | Backend | None,
    ) -> Any:
        """Run a call on arrays that an adapter serves, or that NumPy has to copy or view first."""
        given = dict(zip(self.operands, operands, strict=True))
        adapter = adapter_for(**given)
        if adapter is None:
            for name, x in given.items():
                if x is not None:
                    given[name] = as_plain(name, array_of(x) if name in self.scalars else x)
            return self(tuple(given.values()), activation, flags, needs, out, backend)
        values = compress((activation, needs, out, *flags), self.taken)
        options = dict(zip(compress(self.named, self.taken), values, strict=True))
        if "pre_activation" in given:
            options["pre_activation"] = given.pop("pre_activation")
        places = list(given.values())
        if "activation" in options:
            places.append(options.pop("activation"))
        return getattr(adapter, self.name)(*places, **options, backend=backend)

    def _first(
        self,
        operands: tuple[Any, ...],
        act: Activation,
        flags: tuple[Any, ...],
        needs: Any,
        out: Any,
        backend: str | Backend | None,
        key: tuple[Hashable, ...] | None,
    ) -> Any:
        """Check a call and run it; where it has a key, on the replay of the backend `backend`."""
        serial = act.serial
        given = dict(zip(self.operands, operands, strict=True))
        if "residual" in given:
            required(given)  # (each kind of problem asks for the others)
        values = compress((act, needs, out, *flags), self.taken)
        given.update(zip(compress(self.named, self.taken), values, strict=True))
        p = self.problem(**given)
        if key is not None:
            return self._record(p, operands, backend, key, act.serial != serial)
        chosen: Any = resolve(backend)
        run = getattr(chosen, self.kind, None)
        if run is None:
            raise ValueError(
                f"backend must have the operation {self.kind!r}, got {chosen!r} without it"
            )
        run(p)
        if getattr(p, "late", ()):
            copy_late(p)
        return p.result

    def _record(
        self, p: Any, operands: tuple[Any, ...], chosen: Any, key: Hashable, redefined: bool
    ) -> Any:
        """Record a problem, keep its program unless it is for this one call, and launch it."""
        made = chosen.record(self.kind, p, self.fields)
        result = p.result
        several = isinstance(result, tuple)
        results = result if several else (result,)
        arrays: list[Any] = []
        specs: list[Any] = []
        once = redefined or made.formulas is None
        named = getattr(p, "arrays", None)
        for name, given in zip_longest(self.fields, (*operands, *results)):
            x = getattr(p, name, None) if named is None else named.get(name)
            arrays.append(x)
            if x is not given and x is not None and given is not None and x.size:
                # (another view of it, which may begin elsewhere)
                once = once or address(x) != address(given)
        if not once:
            for x in results:
                specs.append(None if x is None else (x.shape, x.dtype))
            dtypes = {x.dtype for x in (*operands, *results) if x is not None}
            if made.varies is not None:
                chosen.replay.keep(key, _Kept(None, (), None, made.varies, dtypes), made.formulas)
                key = key, made.varies()
            kind = type(result) if several else None
            found = _Kept(made.program, tuple(specs), kind, None, dtypes)
            chosen.replay.keep(key, found, made.formulas, made.nbytes)
        chosen.launch(made.program, tuple(arrays))
        if getattr(p, "late", ()):
            copy_late(p)
        return result


_LAYER, _RESIDUAL, _GATE = "matmul_bias_activation", "matmul_bias_residual", "activation_mul"
_TABLE = (
    (_LAYER, "forward", "a b bias", "activation return_pre_activation out"),
    (_RESIDUAL, "forward", "a b bias residual", "out"),
    (_GATE, "gated", "a b", "activation out"),
    (_LAYER + "_bwd", "backward", "grad a b bias pre_activation", "activation sum_batch out"),
    (_RESIDUAL + "_bwd", "backward", "grad a b bias residual pre_activation", "sum_batch out"),
    (_GATE + "_bwd", "gated_backward", "grad a b", "activation out"),
    (_LAYER + "_double_bwd", "double_backward", "u v w grad a b bias pre_activation", "activation"),
    (_RESIDUAL + "_double_bwd", "double_backward", "u v w z grad a b bias residual", ""),
    (_GATE + "_double_bwd", "gated_double_backward", "u v grad a b", "activation"),
    (_LAYER + "_jvp", "tangent", "a b bias a_dot b_dot bias_dot", "activation guard"),
    (_RESIDUAL + "_jvp", "tangent", "a b bias residual a_dot b_dot bias_dot residual_dot", ""),
    (_GATE + "_jvp", "gated_tangent", "a b a_dot b_dot", "activation guard"),
)
#: The operations, by the names of their public functions.
OPERATIONS = {row[0]: Operation(*row) for row in _TABLE}
