"""The public functions as one table, from which every adapter gets its own.

A public function is written once, in `numfuse.functional` or `numfuse.differentials`: its
parameters, their defaults, its documentation. An adapter is a subclass of :class:`PublicFunctions`
that says in `call` how it runs any of them; the functions themselves, with the same signatures, are
made here. A new public function is a row of `OPERATIONS` and what its call does.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from numfuse import differentials, functional
from numfuse.activations import get
from numfuse.functional import GATES
from numfuse.operations import OPERATIONS, Operation
from numfuse.problem import results
from numfuse.problem.jets import outputs
from numfuse.problem.operands import required
from numfuse.problem.product import STORED

if TYPE_CHECKING:
    from numfuse.fused_operations import FusedOperation

#: The functions that an adapter's module offers; silu_mul is activation_mul with "silu".
NAMES = (
    *OPERATIONS,
    *(f"{gate}_mul" for gate in GATES),
    *(f"{gate}_mul_bwd" for gate in GATES),
)
#: The public functions over NumPy arrays.
CORE = SimpleNamespace(
    **{n: getattr(functional if hasattr(functional, n) else differentials, n) for n in NAMES}
)


class Signature:
    """The arguments of a public function, and the problem that they make.

    `arrays` are the parameters that are operands, `needs` those whose gradients may be asked for,
    and `result` is the named tuple of the results, or `tuple`.
    """

    def __init__(self, operation: Operation) -> None:
        self.name, self.kind, self._operation = operation.name, operation.kind, operation
        self.arrays, self.needs = operation.operands, operation.needs
        self.options = [x for x in operation.options if x != "out"]
        #: The names of the operands in the problem.
        self.fields = dict(zip(self.arrays, operation.fields, strict=False))
        named = {field: name for name, field in self.fields.items()}
        #: What a message calls an array, by its name in the problem.
        self.label: Callable[[str], str] = lambda field: named.get(field, field)
        known = getattr(CORE, self.name, None)
        returned = "Any" if known is None else known.__annotations__["return"]
        self.result: Any = tuple if returned in ("Any", "Array") else getattr(results, returned)

    def checked(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, in one form, after the checks that need no arrays.

        The activation becomes an object ("none" where there is no such parameter), flags become
        bools, and the names in `needs` come in the order of the signature.
        """
        required(x)
        x["activation"] = get(x.get("activation", "none"))
        for flag in self._operation.flags:
            x[flag] = x[flag] if x[flag] is STORED else bool(x[flag])
        if self.needs:
            wanted = results.check_needs(x["needs"], self.needs)
            if wanted is not self.needs:
                x["needs"] = tuple(name for name in self.needs if name in wanted)
        return x

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the results of a call, in their order."""
        names = self._operation.fields[len(self.arrays) :]
        one = self.kind == "forward" and not x.get("return_pre_activation")
        return names[:1] if one else names

    def outs(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that a call's `out` gives, by the names of its results."""
        out = x.get("out")
        if out is None or not self.needs:
            return {} if out is None else {"out": out}
        pairs = zip(self.result_names(x), results.check_outputs(out, self.needs), strict=True)
        return {name: one for name, one in pairs if one is not None}

    def problem(self, x: dict[str, Any], **arrays: Any) -> Any:
        """Return the problem of a call, with these arrays and None for all others.

        `arrays` are operands by their names and outputs by those of the results.
        """
        taken = {name: arrays.get(name) for name in self.arrays}
        taken |= {name: x[name] for name in self.options}
        if "out" in x:
            outs = tuple(map(arrays.get, self.result_names(x)))
            taken["out"] = outs if self._operation.several else outs[0]
        return self._operation.problem(**taken)


def arguments_of(made: Callable[[Any], Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return what makes a call's signature, by `made`, and its arguments, of an operation's call.

    It is called as :meth:`numfuse.operations.Operation.other` is, with more behind.
    """

    def arguments(operation: Any, *call: Any) -> tuple[Any, dict[str, Any]]:
        signature = made(operation)
        return signature, signature.arguments(*call[:-1])

    return arguments


class FusedSignature(Signature):
    """The arguments of a fused operation, whose problem is made of ghosts: no array is copied."""

    def __init__(self, operation: FusedOperation) -> None:
        super().__init__(operation)
        self.options.append("ghosts")
        self.results, self.label = operation.results, operation.form.label

    def arguments(self, operands: Sequence[Any], *call: Any) -> dict[str, Any]:
        """Return the arguments by name, in one form, of a call as `Operation.other` gets it."""
        activation, flags, needs, out, backend = call
        x = dict(zip(self.arrays, operands, strict=True))
        x |= zip(self._operation.flags, map(bool, flags), strict=True)
        x |= {"activation": self._operation.known(activation), "out": out, "backend": backend}
        return x | {"needs": results.check_needs(needs, self.needs), "ghosts": True}

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of all results."""
        return self.results

    def outs(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that a call's `out` gives, by the names of its results."""
        out = x["out"]
        if out is None:
            return {}
        outs = out if self._operation.several else (out,)
        if not isinstance(outs, tuple | list) or len(outs) != len(self.results):
            wanted, got = ", ".join(map(self.label, self.results)), type(out).__name__
            got = f"{len(out)} entries" if isinstance(out, tuple | list) else got
            raise ValueError(f"out must be ({wanted}) with None where to allocate, got {got}")
        return {name: y for name, y in zip(self.results, outs, strict=True) if y is not None}


class JetSignature(Signature):
    """The arguments of a layer's jet with weights of its own (`JetOperation.bound`)."""

    def __init__(self, operation: Any) -> None:
        super().__init__(operation)
        self.label = operation.label

    def arguments(self, operands: Sequence[Any], *call: Any) -> dict[str, Any]:
        """Return the arguments by name, in one form, of a call as `Operation.other` gets it."""
        activation, flags, needs, out, backend = call
        x = dict(zip(self.arrays, operands, strict=True))
        x |= zip(self._operation.flags, flags, strict=True)
        x |= {"activation": self._operation.known(activation), "out": out, "backend": backend}
        return x | {"needs": results.check_needs(needs, self.needs)}

    def result_names(self, x: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the results of a call, in their order."""
        names = self._operation.fields[len(self.arrays) :]
        return names if self.needs or x["keep"] else names[:3]

    def outs(self, x: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs that a call's `out` gives, by the names of its results."""
        names = self.result_names(x)
        given = outputs(x["out"], self.needs, len(names))
        return {name: y for name, y in zip(names, given, strict=True) if y is not None}


SIGNATURES = {name: Signature(operation) for name, operation in OPERATIONS.items()}


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


def _method(name: str, function: Any) -> Any:
    """Return a method with the parameters of a public function, which hands them to `call`.

    It is compiled from text, as a signature cannot be set on a function otherwise: no argument is
    bound by hand, a wrong one is Python's own error, and torch.compile follows it.
    """
    given = inspect.signature(function).parameters.values()
    places = ", ".join(p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD)
    words = ", ".join(p.name for p in given if p.kind is p.KEYWORD_ONLY)
    passed = [f"'{p.name}': {p.name}" for p in given]
    gate, _, rest = name.partition("_mul")
    if gate in GATES:
        passed.append(f"'activation': '{gate}'")
    text = (
        f"def {name}(self, {places}, *, {words}):\n"
        f"    return self.call(signature, signature.checked({{{', '.join(passed)}}}))\n"
    )
    file = f"<{name} of an adapter>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # for tracebacks
    space = {"signature": SIGNATURES[f"activation_mul{rest}" if gate in GATES else name]}
    exec(compile(text, file, "exec"), space)
    made: Any = space[name]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    made.__module__, made.__qualname__ = __name__, f"PublicFunctions.{name}"
    summary = inspect.getdoc(function).partition("\n\n")[0]  # type: ignore[union-attr]
    made.__doc__ = f"{summary}\n\nAs :func:`numfuse.{name}`, on the adapter's arrays."
    return made


for _name, _function in vars(CORE).items():
    setattr(PublicFunctions, _name, _method(_name, _function))
