"""Jets of many directions: the pass over points goes into the tall product's epilogue.

A tall product of all members writes its sums, a pass reads and writes them again: with 50
directions that is most of what a layer moves, and a third of its time. Here the product ends in it
(`kernels.members`). What a point has alone comes first, by a product of one row of each point: in a
forward the value, with its slopes, in a backward the cotangent of its second derivative. A pass
over points ends it, with the sums over the directions: (M, N) elements each, not (M, members, N).

    forward: z; out and slopes; all members; their sums; out_ddot
    backward: grad_ddot and slopes; all members; their sums; d_z, d_z_ddot and d_bias

A backward ends a product of gradients by the sums of the layer behind (`Stack.behind`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.kernels import jet_lines, members
from numfuse.backends.cuda.plan import batches, places
from numfuse.backends.cuda.plan.jet_stacks import (
    all_members,
    members_of,
    record_pass,
    tall,
)
from numfuse.backends.cuda.plan.lower import Bind
from numfuse.backends.cuda.plan.product import (
    MOST_SLOPES,
    Launch,
    Members,
    Operand,
    Plan,
    Product,
    Slot,
)
from numfuse.backends.cuda.plan.program import Recorder, View
from numfuse.epilogues import Epilogue, Jet
from numfuse.language.curves import inputs, leaf
from numfuse.language.graph import Expr
from numfuse.moduli import count_of
from numfuse.problem.jets import LEFT, OUTS, SUMS
from numfuse.problem.operands import format_of

if TYPE_CHECKING:
    from numfuse.problem.jets import JetProblem


def forward(rec: Recorder, p: JetProblem, bind: Bind) -> bool:
    """Record a layer's jet, if it goes this way."""
    parts = _parts(p, ("out", "pre", "out_dot", "out_ddot"))
    if parts is None:
        return False
    acc, kept = format_of(p.acc_dtype), "pre" in p.arrays
    mark = rec.mark()
    out = members_of(p, bind("out"), OUTS, p.n, all_members(p))
    sums = members_of(p, bind("pre"), SUMS, p.n, p.members) if kept else {}
    z = sums.get("z") or _first(_planes(rec, p, 1, acc))
    slopes = _slopes(parts["value"])
    whole = _planes(rec, p, len(slopes), acc)
    direction = [parts["direction"], *([parts["bend"]] if "bend" in parts else [])]
    way = _Way(rec, p, tall(bind("a"), p.members, p.k), bind("b"), out["out_dot"], direction)
    if not way.chosen(whole, slopes, ("z_dot", "kept", "bent"), sums.get("z_dot"), False):
        rec.undo(mark)
        return False
    x = members_of(p, bind("a"), LEFT, p.k, p.members)["a"]
    batches.product(rec, x, bind("b"), p.batch, z, acc)
    written = {"out": out["out"], **_each(whole, slopes)}
    moved = kept and "bias" in p.arrays
    written |= {"pre": z} if moved else {}
    _alone(rec, p, bind, parts["value"], {"z": z}, written)
    total = way.record()
    if p.seconds:
        # z has the bias now
        jet = p.jet.each(lambda part: part.without("bias")) if moved else p.jet
        second, bent = dict(jet.second.results), leaf("bent_ddot")
        terms = [second[x] for x in ("straight",) if x in second]
        terms += [bent] if total is not None else []
        ended = _with_results(jet.second, {"straight": sum(terms[1:], terms[0])} if terms else {})
        arrays = {"z": z, "z_ddot": sums.get("z_ddot") or out["out_ddot"]}
        if total is not None:
            arrays["bent_ddot"] = total[0]
        jet = Jet(jet.value, jet.direction.select(), ended)
        _end(rec, p, bind, jet, arrays, {"out_ddot": out["out_ddot"]}, total)
    return True


def backward(
    rec: Recorder, p: JetProblem, bind: Bind, sums: Mapping[str, View], q: Mapping[str, View]
) -> bool:
    """Record the gradients `q` by a layer's sums, and d_bias, if they go this way."""
    parts = _parts(p, ("d_z", "d_z_dot", "d_z_ddot"))
    if parts is None or not p.behind or "d_z_dot" not in q:
        return False
    acc = format_of(p.acc_dtype)
    mark = rec.mark()
    grad, w, slopes = bind("grad"), bind("grad_dot").turned, _slopes(parts["value"])
    whole = _planes(rec, p, len(slopes) + p.seconds, acc)
    way = _Way(rec, p, tall(grad, all_members(p), p.behind), w, q["d_z_dot"], [parts["direction"]])
    names = "grad_dot", "z_dot", "grad_bent"
    if not way.chosen(whole, slopes, names, sums.get("z_dot"), True):
        rec.undo(mark)
        return False
    arrays = dict(sums)
    if p.seconds:
        rows = members_of(p, grad, OUTS, p.behind, all_members(p))["out_ddot"]
        turned = whole.part(0, len(slopes), len(slopes) + 1)
        batches.product(rec, _first(rows), w, p.batch, _first(turned), acc)
        arrays["grad_ddot"] = turned
    _alone(rec, p, bind, parts["value"], sums, _each(whole, slopes))
    total = way.record()
    value = dict(p.jet.value.results)
    if total is not None:
        arrays["total"] = _first(total[0])
        value["d_z"] = value["d_z"] + leaf("total") if "d_z" in value else leaf("total")
    arrays["grad"] = q["d_z"]
    jet = Jet(_with_results(p.jet.value, value), p.jet.direction.select(), p.jet.second)
    written = {name: x for name, x in q.items() if name != "d_z_dot"}
    _end(rec, p, bind, jet, arrays, written, total, bind("d_bias"))
    return True


# --- what goes this way ---------------------------------------------------------------------------
def _parts(p: JetProblem, written: tuple[str, ...]) -> dict[str, Epilogue] | None:
    """Return the formulas of a jet that goes this way, None of any other."""
    if not p.stacked or p.batch or p.operands or p.dtype != p.acc_dtype:
        return None
    if p.shared and not p.backward:  # it has no tall product
        return None
    if p.directions < tiling.MEMBERS_LEAST or p.seconds > 1:
        return None
    if p.seconds and "weights" not in p.arrays:
        return None
    if p.m * all_members(p) * p.n * p.dtype.itemsize < tiling.MEMBERS_BYTES:
        return None
    parts = p.jet.parts(written, p.backward, p.directions, p.seconds)
    direction = parts.get("direction")
    stored = "d_z_dot" if p.backward else "out_dot"
    if direction is None or stored not in dict(direction.results):
        return None
    slopes = _slopes(parts["value"])
    # (a plane is known by its number alone)
    known = slopes == [f"shared_{i}" for i in range(len(slopes))]
    return parts if known and len(slopes) <= MOST_SLOPES else None


def _slopes(value: Epilogue) -> list[str]:
    """Return the names of what the directions of a point need of its value."""
    return [name for name, _ in value.results if name.startswith("shared_")]


class _Way:
    """A tall product that ends in what becomes of its directions.

    `to` is the stack of results that are directions', (D, M, N), `directions` are their formulas.
    """

    def __init__(
        self, rec: Recorder, p: JetProblem, x: View, y: View, to: View, directions: list[Epilogue]
    ) -> None:
        self.rec, self.p, self.x, self.y, self.to = rec, p, x, y, to
        self.directions = directions
        self.count = x.shape[-2] // p.m
        self.plan: Plan | None = None
        self.sums = False
        self.at: dict[str, tuple[int, int]] = {}

    def chosen(
        self,
        planes: View,
        slopes: list[str],
        names: tuple[str, str, str],
        kept: View | None,
        backward: bool,
    ) -> bool:
        """Choose what runs it; return whether anything does."""
        p, acc = self.p, format_of(self.p.acc_dtype)
        made = {name: e for part in self.directions for name, e in part.results}
        stored, added = ("d_z_dot", "d_z") if backward else ("out_dot", "bent")
        self.sums = added in made
        wanted = [stored, added] if self.sums else [stored]
        head = self.directions[0]
        epilogue = _with_results(head, {name: made[name] for name in wanted})
        known = epilogue.inputs
        read = kept is not None and (not backward or "z_dot" in known)
        operand = _members(kept)[1] if kept is not None and read else None
        to, out = _members(self.to)
        bent = "grad_bent" in known
        alone, precision = _operand(planes), self.rec.precision_of(acc)
        product = Product(
            self.x.shape[-2],
            p.n,
            self.x.shape[-1],
            1,
            _factor(self.x),
            _factor(self.y),
            out,
            acc,
            precision,
            epilogue,
            bias=alone if slopes or bent else None,
            extra=operand if backward else None,
            pre=None if backward else operand,
            sums=self.sums,
            whole=True,
            members=Members(self.count, p.directions, backward, names, len(slopes), bent),
        )
        # (of integers no product ends in a formula of a point: they are made apart)
        self.plan = None if count_of(precision) else self.rec.choose(product)
        self.at = {"x": self.x.at(), "y": self.y.at(), "out": to.at(), "bias": planes.at()}
        if operand is not None and kept is not None:
            self.at["extra" if backward else "pre"] = _members(kept)[0].at()
        return self.plan is not None

    def record(self) -> tuple[View, Any] | None:
        """Record it; return the sums over each point's directions, if it has any.

        They are a table, as an array of (1, M, N) of which the address is right, and the device
        function that adds it up.
        """
        rec, p, plan = self.rec, self.p, self.plan
        assert plan is not None
        acc = format_of(p.acc_dtype)
        if "weights" in p.arrays:
            weights = rec.constant(p.arrays["weights"].astype(p.acc_dtype))
            plan = replace(plan, launches=tuple(_with(x, weights) for x in plan.launches))
        if not self.sums:
            rec.plan(plan, self.at)
            return None
        blocks = -(-self.x.shape[-2] // plan.block_m)
        table = rec.fresh((blocks, members.slots_of(plan.block_m, self.count), p.n), acc)
        rec.plan(plan, self.at | {"sums": table.at()})
        seen = replace(table, shape=(1, p.m, p.n), strides=(0, 0, 1))
        return seen, members.point_sums(acc, self.count, plan.block_m)


# --- passes ---------------------------------------------------------------------------------------
def _alone(
    rec: Recorder,
    p: JetProblem,
    bind: Bind,
    value: Epilogue,
    arrays: Mapping[str, View],
    written: Mapping[str, View],
) -> None:
    """Record the pass over what a point has alone."""
    if not written:
        return
    value = value.select(*written)
    made = jet_lines.Pass({"value": value}, frozenset(written), False, 0, 0, False, False)
    record_pass(rec, p, bind, made, arrays, written)


def _end(
    rec: Recorder,
    p: JetProblem,
    bind: Bind,
    jet: Jet,
    arrays: Mapping[str, View],
    written: Mapping[str, View],
    total: tuple[View, Any] | None,
    d_bias: View | None = None,
) -> None:
    """Record the pass that ends the points: of their values and second derivatives."""
    counts, names = (0, p.seconds), frozenset(written)
    made = jet_lines.of(jet, names, p.backward, counts, False, d_bias is not None)
    if total is not None:
        made = made._replace(table="total" if p.backward else "bent_ddot")
    record_pass(rec, p, bind, made, arrays, written, d_bias, point_sums=total and total[1])


def _with_results(of: Epilogue, results: Mapping[str, Expr]) -> Epilogue:
    """Return an epilogue with other results."""
    names = list(inputs(results.values()))
    summed = tuple(name for name in of.accumulators if name in names)
    others = tuple(name for name in names if name not in summed)
    return Epilogue(of.name, summed, others, tuple(results.items()), of.ties)


# --- views ----------------------------------------------------------------------------------------
def _planes(rec: Recorder, p: JetProblem, count: int, dtype: str) -> View:
    """Return new planes (count, M, N), with rows as the fast loads want them."""
    itemsize = rec.fresh((0,), dtype).itemsize
    whole = rec.fresh((count, p.m, tiling.pitch(p.n, itemsize)), dtype)
    return replace(whole, shape=(count, p.m, p.n))


def _first(x: View) -> View:
    """Return the first of some planes."""
    return replace(x, shape=x.shape[1:], strides=x.strides[1:])


def _each(whole: View, names: list[str]) -> dict[str, View]:
    """Return planes by their names."""
    return {name: _first(whole.part(0, i, i + 1)) for i, name in enumerate(names)}


def _factor(x: View) -> Operand:
    return Operand(x.dtype, (0, *places.matrix(x)), x.aligned(()))


def _members(x: View) -> tuple[View, Operand]:
    """Return the stack whose directions are (D, M, N): from its first member, by its steps."""
    member, point, column = x.strides
    point = 0 if x.shape[-2] == 1 else point  # a row for all points
    base = replace(x, offset=x.offset - member, strides=(point, member, column))
    return base, _operand(base)


def _operand(x: View) -> Operand:
    """Return an array as a product has it, by its own three steps."""
    first, second, third = x.strides
    return Operand(x.dtype, (first, second, third), x.aligned(()))


def _with(launch: Launch, weights: int) -> Launch:
    """Return a launch that reads weights at this address."""
    slot = Slot("weights")
    return replace(launch, arguments=tuple(weights if x == slot else x for x in launch.arguments))
