"""The form of a call of an epilogue, and the formulas and products that it takes.

All are derived from the forward, an :class:`Epilogue` over the sums ``z_0``, ``z_1`` ... of
a @ b_0, a @ b_1 ..., or over none, and operands ``x_0`` ...:

=============== =============================================== ================================
operation       sums                                            products
=============== =============================================== ================================
forward         z_i = a b_i
backward        z_i, or as saved                                d_a = sum_i d_z_i b_i'
                                                                d_b_i = a' d_z_i
forward mode    z_i; z_i_dot = a_dot b_i + a b_i_dot
double backward z_i; t_i = u b_i + a v_i                        d_a = sum_i q_i b_i' + s_i v_i'
                                                                d_b_i = a' q_i + u' s_i
=============== =============================================== ================================

Where a layer has biases, ``x_i`` is that of z_i, and a saved z_i has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from numpy import ndarray

from numfuse.epilogues import Epilogue
from numfuse.language.curves import inputs as leaves_of
from numfuse.language.curves import leaf, replace_leaves
from numfuse.language.graph import Expr


class Factor(NamedTuple):
    """A factor of a product: an array of the problem or a result of its epilogue."""

    name: str
    turned: bool = False


class Form(NamedTuple):
    """The form of a call of an epilogue: all that it asks for but its arrays.

    `kind` is "forward", "backward", "double_backward" or "tangent". With `several` the right
    factors came as a tuple. `labels` are the operands' names in messages, and `numbers` says which
    of them came as Python numbers; `results` counts those of the forward. With `biases` the
    operands are terms of the sums, one each.
    """

    kind: str
    factors: int
    several: bool
    labels: tuple[str, ...]
    numbers: tuple[bool, ...]
    results: int = 1
    biases: bool = False

    @property
    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return tuple([f"z_{i}" for i in range(self.factors)])

    @property
    def right(self) -> tuple[str, ...]:
        """Return the names of the right factors."""
        return tuple([f"b_{i}" for i in range(self.factors)])

    @property
    def factor_names(self) -> tuple[str, ...]:
        """Return the names of all factors."""
        return ("a", *self.right) if self.factors else ()

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names of the operands."""
        return tuple([f"x_{i}" for i in range(len(self.labels))])

    def label(self, name: str) -> str:
        """Return what a message calls an array."""
        before, core, after = "", name, ""
        if name.startswith(("c_", "d_")):
            before, core = ("cotangent of d_" if name[0] == "c" else "d_"), name[2:]
        elif name.endswith("_dot"):
            core, after = name[:-4], "_dot"
        if core in self.others:
            core = self.labels[int(core[2:])]
        elif core in self.right and self.biases:
            core = ("b_gate", "b_up")[int(core[2:])]
        elif core in self.right:
            core = f"b[{core[2:]}]" if self.several else "b"
        elif core.startswith("g_"):
            core = "grad" if self.results == 1 else f"grads[{core[2:]}]"
        elif core.startswith("z_"):
            core = "pre_activation"
        elif core.startswith("out_"):
            core = "out" if self.results == 1 else f"out[{core[4:]}]"
        return before + core + after


def derived(form: Form, whole: Epilogue, there: frozenset[str], guard: bool) -> Epilogue:
    """Return all results that a kind of call may have, where these arrays are `there`."""
    z, inputs = form.sums, (*form.sums, *whole.operands)
    #: By the leaf of a sum, what is added to it; a sum without a product is that alone.
    added = [(name, f"x_{i}", name not in there) for i, name in enumerate(z)]
    sums = [name for name in z if name not in there]
    made = whole
    results: tuple[tuple[str, Expr], ...]
    if form.kind == "forward":
        results = *whole.results, *((f"pre_{i}", leaf(name)) for i, name in enumerate(z))
    elif form.kind == "tangent":
        moving = [name for name in whole.operands if f"{name}_dot" in there]
        for i, name in enumerate(z):
            product = bool({"a_dot", f"b_{i}_dot"} & there)
            if product or (form.biases and f"x_{i}_dot" in there):
                moving.append(name)
                added.append((f"{name}_dot", f"x_{i}_dot", product))
                sums += [f"{name}_dot"] * product
        results = whole.tangent(tuple(moving)).results
    else:
        grads = {name: f"g_{i}" for i, (name, _) in enumerate(whole.results)}
        grads = {name: g for name, g in grads.items() if g in there}
        made = whole.pulled_back(grads, {name: f"d_{name}" for name in inputs})
        results, slopes = made.results, "d_z_"
        if form.kind == "double_backward":
            moved = {}
            for name, _ in made.results:
                at, of_sum = name.rpartition("_")[2], name.startswith("d_z_")
                product = of_sum and bool({"c_a", f"c_b_{at}"} & there)
                if product or (f"c_x_{at}" in there and of_sum <= form.biases):
                    moved[name] = f"t_{at}" if of_sum else f"c_x_{at}"
                if of_sum:
                    added.append((f"t_{at}", f"c_x_{at}", product))
                    sums += [f"t_{at}"] * product
            to = {g: f"d_{g}" for g in grads.values()}
            to |= {x: f"d_{x}" if x.startswith("x_") else f"q_{x[2:]}" for x in inputs}
            slope = [(name, e) for name, e in made.results if name.startswith("d_z_")]
            results, slopes = (*made.pulled_back(moved, to).results, *slope), "q_"
        if form.biases:
            known = dict(results)
            for i in range(form.factors):
                e = known.get(f"{slopes}{i}")
                results += () if e is None else ((f"d_x_{i}", e),)
    found = Epilogue(whole.name, (), (), results, whole.ties)
    if guard and form.kind != "forward":
        found = found.guarded()
    places: dict[Expr, Expr] = {}
    for name, bias, product in added if form.biases else ():
        if bias in there and (product or name not in there):
            places[leaf(name)] = leaf(name) + leaf(bias) if product else leaf(bias)
    graphs = replace_leaves(found.graphs, places)
    operands = tuple(name for name in leaves_of(graphs) if name not in sums)
    pairs = zip([name for name, _ in results], graphs, strict=True)
    return Epilogue(whole.name, tuple(sums), operands, tuple(pairs), whole.ties)


def sums_of(form: Form, arrays: Mapping[str, ndarray]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the products of each sum that is there."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for i, b in enumerate(form.right):
        found[f"z_{i}"] = (("a", b),)
        moved = (("a_dot", b), ("a", f"{b}_dot")), (("c_a", b), ("a", f"c_{b}"))
        for name, pairs in zip((f"z_{i}_dot", f"t_{i}"), moved, strict=True):
            found[name] = tuple(pair for pair in pairs if set(pair) <= arrays.keys())
    return found


def products_of(form: Form) -> dict[str, tuple[tuple[Factor, Factor], ...]]:
    """Return the products of the gradients of the factors."""
    d_a: list[tuple[Factor, Factor]] = []
    found: dict[str, tuple[tuple[Factor, Factor], ...]] = {}
    slope = "d_z_" if form.kind == "backward" else "q_"
    for i, b in enumerate(form.right):
        bent, s = Factor(f"{slope}{i}"), Factor(f"d_z_{i}")
        d_a.append((bent, Factor(b, True)))
        d_b = [(Factor("a", True), bent)]
        if form.kind == "double_backward":
            d_a.append((s, Factor(f"c_{b}", True)))
            d_b.append((Factor("c_a", True), s))
        found[f"d_{b}"] = tuple(d_b)
    return {"d_a": tuple(d_a), **found}
