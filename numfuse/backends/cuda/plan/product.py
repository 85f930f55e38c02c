"""Products, launches and plans: what a tier is given, and what it gives back.

`run` makes a problem into products; a tier makes a product into launches in which everything is
fixed but the addresses; a plan that is kept launches again with other addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from numfuse.epilogues import Epilogue, sum_of_terms
from numfuse.expr import Keyed
from numfuse.language.graph import topological

if TYPE_CHECKING:
    from numfuse.backends.cuda.compile.toolchain import Kernel


@dataclass(frozen=True)
class DeviceInfo:
    """The properties that a tier may ask of a device."""

    name: str
    #: Compute capability, (9, 0) on Hopper.
    capability: tuple[int, int]
    multiprocessors: int
    #: Shared memory of one block (opt-in) and of one multiprocessor, bytes.
    shared_per_block: int
    shared_per_multiprocessor: int
    l2_bytes: int


@dataclass(frozen=True)
class Operand:
    """An array of a product: nothing of it that changes with its address, but its alignment."""

    #: "float64", "float32", "float16" or "bfloat16"
    dtype: str
    #: In elements, of (place, row, column); 0 where it is broadcast.
    strides: tuple[int, int, int]
    #: The largest power of two, at most 16, that divides the address: a promise.
    alignment: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def steps(self) -> tuple[int, int, int]:
        """The strides in bytes."""
        place, row, column = self.strides
        return place * self.itemsize, row * self.itemsize, column * self.itemsize

    def runs_wide(self, axis: int, values: int) -> bool:
        """Whether so many neighbours along `axis` (1: rows, 2: columns) may be accessed at once."""
        others = (self.strides[0], self.strides[3 - axis])
        return (
            self.strides[axis] == 1
            and self.alignment >= values * self.itemsize
            and all(step % values == 0 for step in others)
        )

    def comes_by(self, values: int) -> bool:
        """Whether so many neighbours may be accessed at once, along whichever axis they lie."""
        return self.runs_wide(1, values) or self.runs_wide(2, values)

    def fits_copies(self) -> bool:
        """Whether the copy engine takes it as a factor as it lies: rows of whole 16 bytes."""
        return self.comes_by(16 // self.itemsize)

    def in_wholes(self, n: int, values: int) -> bool:
        """Whether rows of `n` are made of aligned accesses of so many values."""
        return n % values == 0 and self.runs_wide(2, values)


#: What takes the place of a dtype where the word that a launch is given as an address is a number.
NUMBER = "number"
#: The capability from which on arrays of a dtype are read and written by 16 bytes. The simulator
#: has no such accesses; before 8.0 no instruction rounds to bfloat16, which `elements` does by the
#: bits, value by value.
WIDE_SINCE = {"float64": (1, 0), "float32": (1, 0), "float16": (1, 0), "bfloat16": (8, 0)}
#: {storage dtype: bytes}
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


#: What a point of a jet has alone and its directions need, at most: the slopes of a curve.
MOST_SLOPES = 3


@dataclass(frozen=True)
class Members:
    """The end of a product of the rows of all members of points: see `kernels.members`.

    Strides of `out`, and of the directions' sums (`pre` of a forward, `extra` of a backward), are
    those of (point, member, column), those of `bias`, which has what a point has alone, of (plane,
    point, column). The epilogue has what becomes of a direction and, with `sums`, what it adds to
    its point's sum.
    """

    #: Rows of a point, and directions among them.
    count: int
    directions: int
    backward: bool
    #: The epilogue's names of a direction's sum, of the sum in the forward, and of what its bend is
    #: weighted with.
    names: tuple[str, str, str]
    #: Planes of slopes; with `bent` there is another one behind them.
    slopes: int
    bent: bool


@dataclass(frozen=True, eq=False)
class Product(Keyed):
    """out[p] = epilogue(X[p] @ Y[p]) for every place p; the key of a kept plan."""

    m: int
    n: int
    k: int
    places: int
    #: (places, M, K) and (places, K, N), any strides
    x: Operand
    y: Operand
    #: (places, M, N)
    out: Operand
    #: "float32" or "float64"
    accumulator: str
    #: Of float32 operands "ieee", "bf16x6", "bf16x3" or "tf32", of float64 ones "ieee",
    #: "int8" or "int8:T".
    precision: str = "ieee"
    #: What is done with a sum: its first result is stored in `out`, "pre" in `pre`.
    epilogue: Epilogue = field(default_factory=lambda: sum_of_terms(0))
    #: Strides (place, 0, column).
    bias: Operand | None = None
    #: The epilogue's other operand: the residual or grad, (places, M, N).
    extra: Operand | None = None
    #: The pre-activation, in the accumulator's dtype or that of 16-bit operands.
    pre: Operand | None = None
    #: With `x1` the sum has a second term, X1 Y1; with `y1` alone there is a second sum, X Y1, the
    #: epilogue's "z1". `bias1` is another operand like `bias`, "pre1" a third result.
    x1: Operand | None = None
    y1: Operand | None = None
    bias1: Operand | None = None
    pre1: Operand | None = None
    #: Of two sums "y" where Y has the even columns of an array and Y1 the odd ones, and "y out"
    #: where `out` and `pre` have those of another array, too.
    alternate: str = ""
    #: The unrounded results are summed by column in every row of blocks, in a fixed order, to
    #: sums[place, ceil(M / block_m), N] in the accumulator's dtype (`Plan.block_m`).
    sums: bool = False
    #: K is the problem's M, of which the order of a sum may depend (d_b): it is cut into parts by
    #: the sizes of one place, whatever the others are. Any other product is cut where blocks are
    #: fewer than multiprocessors (`kernels.planes`).
    free: bool = False
    #: K may not be cut, whatever that saves: another product makes the same sum in one piece.
    whole: bool = False
    #: Of two sums: values of K of a part, as each is cut where it is made alone; 0: neither is.
    part: int = 0
    #: Rows are members of points.
    members: Members | None = None

    @property
    def extra_name(self) -> str:
        """Return the name by which the epilogue knows its operand beside the bias."""
        biases = "bias", "bias1"
        return next((name for name in self.epilogue.operands if name not in biases), "")

    @property
    def has_two_sums(self) -> bool:
        """Return whether the epilogue is one of two sums."""
        return self.y1 is not None and self.x1 is None

    def wide(self, name: str) -> Operand:
        """Return the array of which `name` ("y", "out") has every other column."""
        found: Operand = getattr(self, name)
        place, row, _ = found.strides
        return replace(found, strides=(place, row, 1))

    @property
    def rights(self) -> list[Operand]:
        """Return Y, and Y1 where there is one; of woven sums the one array that has both."""
        if self.woven:
            return [self.wide("y")]
        return [self.y] if self.y1 is None else [self.y, self.y1]

    @property
    def woven(self) -> bool:
        """Return whether both factors Y are every other column of one array."""
        return self.alternate != ""

    @property
    def woven_out(self) -> bool:
        """Return whether two results are every other column of one array, as the factors are."""
        return self.alternate == "y out"

    @property
    def is_rich(self) -> bool:
        """Return whether it has more than one sum of one term, a bias and two results."""
        return any(x is not None for x in (self.y1, self.bias1, self.pre1))

    @property
    def is_curved(self) -> bool:
        """Whether the epilogue has an activation to compute."""
        return any(e.op == "call" for e in topological(self.epilogue.graphs))


@dataclass(frozen=True)
class Slot:
    """An argument that is an address: that of x, y, bias, extra, pre, out, sums or work."""

    name: str
    #: Bytes to add.
    offset: int = 0


@dataclass(frozen=True)
class Derived:
    """An argument that is made of an address: a tensor map.

    `make` is called once; where the address changes, the driver replaces it within the map.
    """

    slot: Slot
    make: Callable[[int], bytes]


@dataclass(frozen=True)
class Launch:
    """A kernel, and how to start it."""

    kernel: Kernel
    grid: tuple[int, int, int]
    #: In the order of the kernel's signature; floats for f32 and f64, Derived for map.
    arguments: tuple[int | float | Slot | Derived, ...]
    #: Dynamic shared memory, bytes.
    shared_bytes: int = 0
    #: Blocks of a cluster along x.
    cluster: int = 1
    #: Whether it may start while the launch before it ends (programmatic dependent launch: the
    #: kernel itself waits with griddepcontrol.wait).
    overlaps: bool = False
    #: The slot that it fills ("x copy" or "y copy") with what depends on x or y alone, and its
    #: bytes: another product of the same factor may find it there.
    makes: tuple[str, int] | None = None
    #: What makes the kernel that does the same beside another such launch, which is right before
    #: it: two copies, neither of which reads what the other one writes.
    beside: Callable[[], Kernel] | None = None

    @property
    def table(self) -> tuple[str, ...]:
        """Return the names of the addresses that a start needs, each once."""
        slots = (a.slot if isinstance(a, Derived) else a for a in self.arguments)
        return tuple(dict.fromkeys(slot.name for slot in slots if isinstance(slot, Slot)))


@dataclass(frozen=True)
class Plan:
    """How a tier runs a product."""

    launches: tuple[Launch, ...]
    #: What `last_call` shows: any object with a short text.
    tiling: Any
    #: Bytes of workspace, aligned to 256; the slot "work". Its content is undefined at first.
    workspace: int = 0
    #: Rows of one row of blocks of the column sums.
    block_m: int = 0
    #: Parts of K that are planes in memory.
    parts: int = 1
    #: The length of a part, in the tier's own units; 0: K is one part.
    part: int = 0
    #: (first row, length of a part) of the last rows, where K of these alone is cut.
    tail: tuple[int, int] | None = None
    #: Rows of the column sums; 0: one for each `block_m` rows.
    sum_rows: int = 0

    @property
    def order(self) -> tuple[Any, ...]:
        """Return what tells the order of its sums: that of two plans with the same is the same."""
        return self.parts, self.part, self.tail


@dataclass(frozen=True)
class Way:
    """One of the ways in which a tier can run a product."""

    #: The tile, the parts of K and what is copied before, in words.
    name: str
    #: What the tier's model of times expects, in the tier's own units.
    cost: float
    #: What plans it; None where the tier cannot run it so after all.
    make: Callable[[], Plan | None]


def _no_ways(product: Product, info: DeviceInfo) -> Iterable[Way]:
    return ()


@dataclass(frozen=True)
class Tier:
    """One kind of kernels that run products."""

    name: str
    #: How to run one; None where this tier cannot, or should not.
    take: Callable[[Product, DeviceInfo], Plan | None]
    #: All ways to run one, of which `take` chooses by a model; none of a tier that has no choice.
    ways: Callable[[Product, DeviceInfo], Iterable[Way]] = _no_ways
