"""Nine primitives, each a call of a public function: all that a library has to differentiate.

The public functions that are differentiable are made of these (`numfuse.adapters.surface`), and so
are the derivatives of those that no fused function gives (`numfuse.adapters.pieces`). A kind says
whose shape an operand or a result has: a, b, c (bias), r (residual) and o (result) of a product, e
of a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from numfuse import differentials, functional
from numfuse.activations import Activation
from numfuse.adapters.signatures import NAMES, SIGNATURES
from numfuse.problem.results import GATED_NEEDS, GATED_SECOND_NEEDS, GEMM_NEEDS, GEMM_SECOND_NEEDS

__all__ = ["CORE", "PRIMITIVES", "How", "Primitive", "chosen", "made", "spread"]

#: The public functions over NumPy arrays.
CORE = SimpleNamespace(
    **{n: getattr(functional if hasattr(functional, n) else differentials, n) for n in NAMES}
)


class How(NamedTuple):
    """The arguments of a call other than its arrays."""

    activation: Activation
    needs: tuple[str, ...] = ()
    guard: bool = True
    backend: Any = None


class Primitive(NamedTuple):
    """A function of arrays that a library differentiates."""

    name: str
    #: The public function that it calls.
    function: str
    #: The kind of each operand, in the order of the public function.
    kinds: str
    #: The kind of each result.
    results: str
    #: The operands whose gradients the results are, where `How.needs` chooses among them.
    names: tuple[str, ...] | None = None
    #: The operands in which it is linear, and which may be None.
    moved: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands; a saved pre-activation is none of them."""
        arrays = SIGNATURES[self.function].arrays
        return tuple(name for name in arrays if name != "pre_activation")

    @property
    def takes_saved(self) -> bool:
        """Whether a saved pre-activation may be given."""
        return "pre_activation" in SIGNATURES[self.function].arrays

    @property
    def optional(self) -> tuple[bool, ...]:
        """Whether each operand may be None."""
        tangents = self.moved != ("grad",)
        return tuple(name == "bias" or (tangents and name in self.moved) for name in self.operands)

    @property
    def is_forward(self) -> bool:
        """Whether it is no derivative."""
        return self.names is None and not self.moved

    @property
    def order(self) -> tuple[int, ...]:
        """The places of the operands, of those in which it is linear last."""
        places = range(len(self.kinds))
        return tuple(sorted(places, key=lambda i: self.operands[i] in self.moved))

    def linear_last(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands with those in which it is linear behind the others."""
        return [operands[i] for i in self.order]

    def in_place(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands from :func:`linear_last` in the order of the public function."""
        pairs = zip(self.order, operands, strict=True)
        return [x for _, x in sorted(pairs, key=itemgetter(0))]

    def run(self, library: Any, how: How, *operands: Any, pre: Any = None) -> Any:
        """Return the result, or the tuple of the gradients `how.needs`, by a library's functions.

        Arrays go by position, as the replay of a device's calls knows them.
        """
        known = SIGNATURES[self.function].options
        options: dict[str, Any] = {n: getattr(how, n) for n in ("needs", "guard") if n in known}
        if pre is not None:
            options["pre_activation"] = pre
        if "activation" in known:
            operands = (*operands, how.activation)
        found = getattr(library, self.function)(*operands, backend=how.backend, **options)
        if self.names is not None:
            return made(found, self.names, how.needs)
        return found.out_dot if self.moved else found


PRIMITIVES = {
    primitive.name: primitive
    for primitive in (
        Primitive("product", "matmul_bias_activation", "abc", "o"),
        Primitive(
            "product_bwd", "matmul_bias_activation_bwd", "oabc", "abc", GEMM_NEEDS, ("grad",)
        ),
        Primitive(
            "product_double",
            "matmul_bias_activation_double_bwd",
            "abcoabc",
            "oabc",
            GEMM_SECOND_NEEDS,
            ("u", "v", "w"),
        ),
        Primitive(
            "product_tangent",
            "matmul_bias_activation_jvp",
            "abcabc",
            "o",
            moved=("a_dot", "b_dot", "bias_dot"),
        ),
        Primitive("residual", "matmul_bias_residual", "abcr", "o"),
        Primitive("gate", "activation_mul", "ee", "e"),
        Primitive("gate_bwd", "activation_mul_bwd", "eee", "ee", GATED_NEEDS, ("grad",)),
        Primitive(
            "gate_double",
            "activation_mul_double_bwd",
            "eeeee",
            "eee",
            GATED_SECOND_NEEDS,
            ("u", "v"),
        ),
        Primitive("gate_tangent", "activation_mul_jvp", "eeee", "e", moved=("a_dot", "b_dot")),
    )
}


def made(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> tuple[Any, ...]:
    """Return the needed ones of a tuple of gradients, as a plain tuple without None."""
    return tuple(x for name, x in zip(names, found, strict=True) if name in needs)


def spread(found: Any, names: tuple[str, ...], needs: Sequence[str]) -> list[Any]:
    """Return the gradients from :func:`made` in their places in `names`, and None elsewhere."""
    at = {name: i for i, name in enumerate(name for name in names if name in needs)}
    return [found[at[name]] if name in at else None for name in names]


def chosen(places: Iterable[int], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names at these places, in their order."""
    wanted = set(places)
    return tuple(name for i, name in enumerate(names) if i in wanted)
