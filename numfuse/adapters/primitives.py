"""Nine primitives, each a call of a public function: all that a library has to differentiate.

The public functions that are differentiable are made of these (`numfuse.adapters.surface`), and so
are the derivatives of those that no fused function gives (`numfuse.adapters.pieces`). A kind says
whose shape an operand or a result has: a, b, c (bias), r (residual) and o (result) of a product, e
of a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from numfuse.activations import Activation
from numfuse.adapters.signatures import CORE as CORE
from numfuse.operations import OPERATIONS


class How(NamedTuple):
    """The arguments of a call other than its arrays."""

    activation: Activation
    needs: tuple[str, ...] = ()
    guard: bool = True
    backend: Any = None
    #: An adapter's own: where the forward of these operands left its pre-activation.
    saved: Any = None


class Primitive:
    """A function of arrays that a library differentiates.

    It calls the public `function`; `kinds` are those of the operands, in its order, and `results`
    those of the results. `derivative` is the primitive that gives its gradients, weighted with a
    cotangent for each result in front of the operands, and `tangent` its forward mode, the tangents
    being behind them.
    """

    def __init__(
        self,
        name: str,
        function: str,
        kinds: str,
        results: str,
        derivative: str | None = None,
        tangent: str | None = None,
    ) -> None:
        self.name, self.function, self.kinds, self.results = name, function, kinds, results
        self.derivative, self.tangent = derivative, tangent
        public = OPERATIONS[function]
        self._options = [x for x in ("needs", "guard") if x in public.options]
        self._is_bent = "activation" in public.options
        #: The operands whose gradients the results are, where `How.needs` chooses among them.
        self.names = public.needs or None
        #: Without a saved pre-activation, which may be given where it `takes_saved`.
        self.operands = tuple(x for x in public.operands if x != "pre_activation")
        self.takes_saved = "pre_activation" in public.operands
        along = tuple(x for x in self.operands if x in ("u", "v", "w") or x.endswith("_dot"))
        #: The operands in which it is linear.
        self.moved = along or tuple(x for x in self.operands if x == "grad")
        self.optional = tuple(x == "bias" or x in along for x in self.operands)
        self.is_forward = not self.moved
        #: Whether its derivatives are other primitives, not what it is made of.
        self.is_fused = derivative is not None or name == "residual"
        places = range(len(kinds))
        self._order = sorted(places, key=lambda i: self.operands[i] in self.moved)
        #: The kinds of the operands, those in which it is linear last, and how many are before.
        self.ordered_kinds = "".join(self.linear_last(kinds))
        self.kept = len(kinds) - len(self.moved)

    def cotangents(self, found: Sequence[Any], how: How) -> Sequence[Any]:
        """Return a cotangent for each result, None where the result is not needed."""
        return found if self.names is None else spread(found, self.names, how.needs)

    def wanted(self, needs: Sequence[str]) -> str:
        """Return the kinds of the results that are made."""
        if self.names is None:
            return self.results
        pairs = zip(self.results, self.names, strict=True)
        return "".join(kind for kind, name in pairs if name in needs)

    def linear_last(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands with those in which it is linear behind the others."""
        return [operands[i] for i in self._order]

    def in_place(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands from :func:`linear_last` in the order of the public function."""
        pairs = zip(self._order, operands, strict=True)
        return [x for _, x in sorted(pairs, key=itemgetter(0))]

    def run(self, library: Any, how: How, *operands: Any, pre: Any = None) -> Any:
        """Return the result, or the tuple of the gradients `how.needs`, by a library's functions.

        Arrays go by position, as the replay of a device's calls knows them.
        """
        options: dict[str, Any] = {name: getattr(how, name) for name in self._options}
        if pre is not None:
            options["pre_activation"] = pre
        if self._is_bent:
            operands = (*operands, how.activation)
        options["backend"] = how.backend
        found = getattr(library, self.function)(*operands, **options)
        if self.names is not None:
            return made(found, self.names, how.needs)
        return found.out_dot if self.moved else found


PRIMITIVES = {
    row[0]: Primitive(*row)
    for row in (
        ("product", "matmul_bias_activation", "abc", "o", "product_bwd", "product_tangent"),
        ("product_bwd", "matmul_bias_activation_bwd", "oabc", "abc", "product_double"),
        ("product_double", "matmul_bias_activation_double_bwd", "abcoabc", "oabc"),
        ("product_tangent", "matmul_bias_activation_jvp", "abcabc", "o"),
        ("residual", "matmul_bias_residual", "abcr", "o"),
        ("gate", "activation_mul", "ee", "e", "gate_bwd", "gate_tangent"),
        ("gate_bwd", "activation_mul_bwd", "eee", "ee", "gate_double"),
        ("gate_double", "activation_mul_double_bwd", "eeeee", "eee"),
        ("gate_tangent", "activation_mul_jvp", "eeee", "e"),
    )
}


def backward_tangents(
    name: str, x: Sequence[Any], dots: Sequence[Any]
) -> list[tuple[Primitive, list[Any]]]:
    """Return the primitives, with their operands, whose sum is the forward mode of a backward.

    A backward is linear in grad; by all else it has a product of a Hessian, which is symmetric, and
    so the double backward's. `dots` are the tangents of grad and the operands `x`, None for zero.
    """
    primitive, found = PRIMITIVES[name], []
    if dots[0] is not None:
        found.append((primitive, [dots[0], *x[1:]]))
    if any(dot is not None for dot in dots[1:]):
        found.append((PRIMITIVES[str(primitive.derivative)], [*dots[1:], *x]))
    return found


def matrices(
    kind: str, shape: tuple[int, ...], rank: int, row: bool, column: bool
) -> tuple[int, ...]:
    """Return the shape of a product's operand as matrices, with `rank` axes, from its own shape.

    `row` and `column` say whether a is 1-D, and whether b is: what they leave out is put in.
    """
    if kind in "or":
        shape = (1,) * (rank - row - column - len(shape)) + shape
        shape = (*shape, 1) if column else shape
    if row if kind in "aor" else kind == "c" and len(shape) == 1:
        shape = (*shape[:-1], 1, shape[-1])
    elif kind == "b" and column:
        shape = (*shape, 1)
    return (1,) * (rank - len(shape)) + shape


def made(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> tuple[Any, ...]:
    """Return the needed ones of a tuple of gradients, as a plain tuple without None."""
    return tuple(x for name, x in zip(names, found, strict=True) if name in needs)


def spread(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> list[Any]:
    """Return the gradients from :func:`made` in their places in `names`, and None elsewhere."""
    rest = iter(found)
    return [next(rest) if name in needs else None for name in names]
