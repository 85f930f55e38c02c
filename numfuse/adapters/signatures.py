"""The public functions as one table, from which every adapter gets its own.

A public function is written once, in `numfuse.functional` or `numfuse.differentials`: its
parameters, their defaults, its documentation. An adapter is a subclass of :class:`PublicFunctions`
that says in `call` how it runs any of them; the functions themselves, with the same signatures, are
made here. A new public function is a row of this table and what its call does.
"""

from __future__ import annotations

import inspect
import linecache
from typing import TYPE_CHECKING, Any

from numfuse import differentials, functional
from numfuse.activations import get
from numfuse.operations import OPERATIONS, Operation
from numfuse.problem import results
from numfuse.problem.operands import required
from numfuse.problem.product import STORED

__all__ = ["GATES", "NAMES", "SIGNATURES", "PublicFunctions", "Signature", "of_module"]

#: Activations whose gates have names of their own: silu_mul is activation_mul with "silu".
GATES = functional.GATES
#: Parameters that a problem takes and that are no arrays.
_OPTIONS = ("activation", "return_pre_activation", "needs", "sum_batch", "guard")
_FLAGS = ("return_pre_activation", "sum_batch", "guard")


class Signature:
    """The parameters of a public function, and the problem that they make.

    Parameters
    ----------
    function : callable
        The public function.
    operation : Operation
        Its row of the core's table.

    Attributes
    ----------
    kind : str
        The method of a backend that runs its problem.
    arrays : tuple of str
        The parameters that are operands, in their order.
    needs : tuple of str
        The operands whose gradients may be asked for; empty where the results are no gradients.
    result : type
        The named tuple of the results, or `tuple`.
    """

    def __init__(self, function: Any, operation: Operation) -> None:
        self.function, self.kind, self._problem = function, operation.kind, operation.problem
        self.name: str = function.__name__
        parameters = inspect.signature(function).parameters
        self.arrays = tuple(x for x in parameters if x not in (*_OPTIONS, "out", "backend"))
        self.options = tuple(x for x in parameters if x in _OPTIONS)
        self.needs: tuple[str, ...] = parameters["needs"].default if "needs" in parameters else ()
        self.has_out = "out" in parameters
        returned = function.__annotations__["return"]
        self.result: Any = tuple if returned in ("Any", "Array") else getattr(results, returned)

    def checked(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, in one form, after the checks that need no arrays.

        The activation becomes an object ("none" where there is no such parameter), flags become
        bools, and the names in `needs` come in the order of the signature.
        """
        required(x)
        x["activation"] = get(x.get("activation", "none"))
        for flag in _FLAGS:
            if flag in x:
                x[flag] = x[flag] if x[flag] is STORED else bool(x[flag])
        if self.needs:
            wanted = results.check_needs(x["needs"], self.needs)
            if wanted is not self.needs:
                x["needs"] = tuple(name for name in self.needs if name in wanted)
        return x

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the results of a call, in their order."""
        if self.needs:
            return tuple(f"d_{name}" for name in self.needs)
        if self.name.endswith("_jvp"):
            return "out", "out_dot"
        return ("out", "pre") if x.get("return_pre_activation") else ("out",)

    def outs(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of a call's `out` by the names of its results, and None elsewhere."""
        if not self.has_out:
            return {}
        if not self.needs:
            return {"out": x["out"]}
        return dict(
            zip(self.result_names(x), results.check_outputs(x["out"], self.needs), strict=True)
        )

    def problem(self, x: dict[str, Any], **arrays: Any) -> Any:
        """Return the problem of a call, with these arrays and None for all others.

        `arrays` are operands by their names and outputs by those of the results.
        """
        taken = dict(zip(self.arrays, map(arrays.get, self.arrays), strict=True))
        taken |= zip(self.options, map(x.__getitem__, self.options), strict=True)
        if self.has_out:
            outs = tuple(map(arrays.get, self.result_names(x)))
            taken["out"] = outs if self.needs else outs[0]
        return self._problem(**taken)


SIGNATURES = {
    name: Signature(
        getattr(functional if hasattr(functional, name) else differentials, name), operation
    )
    for name, operation in OPERATIONS.items()
}
#: The functions that an adapter's module offers.
NAMES = (
    *SIGNATURES,
    *(f"{gate}_mul" for gate in GATES),
    *(f"{gate}_mul_bwd" for gate in GATES),
)


class PublicFunctions:
    """The public functions over arrays of another kind: methods of the names in `NAMES`."""

    def call(self, signature: Signature, x: dict[str, Any]) -> Any:
        """Run one call; `x` has the value of each parameter by its name (`Signature.checked`)."""
        raise NotImplementedError

    def functions(self) -> dict[str, Any]:
        """Return the public functions by their names, as an adapter's module has them."""
        return {name: getattr(self, name) for name in NAMES}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def of_module(function: Any, module: str) -> Any:
    """Return a function that wraps a public one, under its name in a module: so it is pickled."""
    function.__module__, function.__qualname__ = module, function.__name__
    return function


def _method(function: Any) -> Any:
    """Return a method with the parameters of a public function, which hands them to `call`.

    It is compiled from text, as a signature cannot be set on a function otherwise: no argument is
    bound by hand, a wrong one is Python's own error, and torch.compile follows it.
    """
    name = function.__name__
    gate, _, rest = name.partition("_mul")
    given = list(inspect.signature(function).parameters.values())
    places = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    words = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
    passed = [f"'{p.name}': {p.name}" for p in given]
    if gate in GATES:
        name = f"activation_mul{rest}"
        passed.append(f"'activation': '{gate}'")
    text = (
        f"def {function.__name__}(self, {', '.join(places)}, *, {', '.join(words)}):\n"
        f"    return self.call(signature, signature.checked({{{', '.join(passed)}}}))\n"
    )
    file = f"<{function.__name__} of an adapter>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # for tracebacks
    space = {"signature": SIGNATURES[name]}
    exec(compile(text, file, "exec"), space)
    made: Any = space[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__module__, made.__qualname__ = __name__, f"PublicFunctions.{function.__name__}"
    summary = inspect.getdoc(function).partition("\n\n")[0]  # type: ignore[union-attr]
    made.__doc__ = f"{summary}\n\nAs :func:`numfuse.{function.__name__}`, on the adapter's arrays."
    return made


for _name in NAMES:
    _library = functional if hasattr(functional, _name) else differentials
    setattr(PublicFunctions, _name, _method(getattr(_library, _name)))
