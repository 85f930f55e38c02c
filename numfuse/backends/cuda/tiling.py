"""Sizes of the CUDA backend that several kernels share, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from numfuse.tiling import RUN as RUN
from numfuse.tiling import round_up as round_up


@dataclass(frozen=True)
class CudaTile:
    """A thread block's block of a product, and a thread's part of it."""

    block_m: int
    block_n: int
    block_k: int
    mr: int
    nr: int
    #: Rows of blocks that are worked on together: their Y blocks are found in the L2 cache.
    group: int = 8

    @property
    def threads(self) -> int:
        return self.block_m // self.mr * (self.block_n // self.nr)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}, {self.mr}x{self.nr} a thread"


#: Of the tier that runs everywhere: 256 threads with 16 sums each fit every GPU since Maxwell, in
#: float64 too, with 16 KiB of shared memory.
MIRROR_TILE = CudaTile(64, 64, 16, 4, 4)
#: In Numba's simulator, where every thread is one of Python's and costs 20 ms: few, with much.
SIMULATED_TILE = CudaTile(16, 16, 8, 8, 8, group=2)
#: Those that `numfuse.tune` may choose in place of the first: a quarter for results of few blocks.
MIRROR_TILES = MIRROR_TILE, CudaTile(32, 32, 16, 4, 4)
SIMULATED_TILES = SIMULATED_TILE, CudaTile(8, 16, 8, 8, 8, group=2)
#: Values of K that a thread adds up behind one another before that is added to the sum of those
#: before, as on the CPU (`CHAIN`): errors grow with the root of a chain's length. With 512 those
#: of positive operands were up to 2.1 times the CPU's, with 1024 they would be four times. The ends
#: of chains take 1 to 2% of a float32 product (docs/cuda.md, "Blocks that were measured").
CHAIN = 256
#: Sums of so many values are one chain in these tiles: in float64, where the ends of two chains
#: cost 6%, one of 768 (expected errors 1.7 times the CPU's, of positive operands three times; those
#: of cuBLAS, whose sums are one chain, are the same). Layers of 768 of a network with 50 directions
#: took an H200 6.03 ms and not 6.35.
ONE_CHAIN = {"float32": 256, "float64": 768}
#: Blocks of 64 x 64 of a result up to which that length is a shorter one, in float64 for a d_b
#: alone: the ends of chains are no matter where most multiprocessors have no block. (A d_b of
#: 60 x 223 over 353 rows in float64 and a d_a of 12 x 216 over 247 columns in float32 had 2.2 and
#: 2.3 times cuBLAS's error, which cuts such sums into parts.)
SHORT_CHAINS = 32
SHORT_CHAIN = {"float32": 128, "float64": 256}
#: Blocks that keep the device busy, to a multiprocessor: where a product of sums over M has fewer,
#: these are cut into parts.
BLOCKS_PER_MULTIPROCESSOR = 2
#: Rows that a part of d_b adds up at the least: a block's arithmetic then outweighs its plane's way
#: through memory by 100 flops a byte.
PART = 512
#: Planes that one thread adds up; more are joined in stages.
JOINED = 64
#: Bytes of the planes of one product of segments; more segments are added in turns.
PLANES_BYTES = 256 << 20
#: Rows that one thread of a pass adds up: enough blocks for a tall array, few planes to join.
PASS_ROWS = 64
#: Elements of a pass to a row of its chunks below which a chunk has fewer rows: 8 neighbours in a
#: thread are then 2^16 threads.
PASS_BUSY = 1 << 19
#: Threads of a block of the passes over memory, and rows that each has in flight.
PASS_THREADS = 256
#: Values of a row that a thread of a copy has in flight.
COPY_SPAN = 8
PASS_AHEAD = 4
#: Blocks of a slope's pass that shall fit on a multiprocessor, of single values and of 16 bytes:
#: with the 80 and 128 registers that a compiler takes it is three and two, which took an H200 39 us
#: for 78 MB and 24 us for 65 MB.
PASS_BLOCKS = 6, 3
#: Rows of a thread of such a pass that adds nothing up. (No GPU has timed two yet.)
PASS_PAIR = 2
#: Columns of chunks below which such a pass has one of them a thread.
PASS_FEW = 1 << 16
#: Planes of which a thread of a join has 16 bytes in flight, first and for what is left: with 4
#: alone the 264 planes of a 64 x 64 d_b took an H200 12.7 us, half as long as their product.
JOIN_AHEAD = 16
JOIN_THEN = 4
#: The same where planes are finished by an epilogue: from so many on as in a join, and where there
#: are fewer, which is mostly so.
FINISH_DEEP = 16
FINISH_FEW = 8, 2
#: Threads that share a column, and columns of a block, in a join of few long columns (sums of rows
#: of blocks: d_bias), and the same of the longest ones: 6628 planes of 3 columns took an H100 9 us
#: by 16 threads each.
JOIN_LANES = (16, 32), (64, 8)
#: Planes from which on they do, and from which on these are the longest.
JOIN_DEEP, JOIN_DEEPEST = 16, 512
#: Columns from which on the deepest joins, too, have blocks enough of the first kind: 528 planes of
#: 12,928 columns took an H200 24 us by the second, 8.5 by the first.
JOIN_WIDE = 4096
#: Loads of 16 bytes of each array that a thread of a gate has in flight, by bytes of an element:
#: (forward, backward). On an H200 a second one made a gate in float64 6% faster, and no other.
GATE_VECTORS = {2: (1, 1), 4: (1, 1), 8: (2, 1)}
#: Plans of calls, and of products, that a device keeps: words, no memory of the device.
KEPT_PLANS = 512
#: A call of several launches that comes so many times with the same addresses becomes a CUDA graph
#: (one launch of 6 us in place of four of 4.5 each; making it takes 100 us), and the graphs that it
#: keeps: a loop's results go round among a few sets of addresses.
GRAPH_AFTER = 4
KEPT_GRAPHS = 8
#: Bytes of free memory that a device's pool keeps for later calls: the workspace of a step of
#: training with 8192 x 8192 in float32 is six of 256 MiB.
POOL_BYTES = 2 << 30
#: Of a large device it is this part of its memory: a product of 8192 cubed by integers has 3 GiB of
#: residues, which the driver would allocate anew for every call.
POOL_SHARE = 16
#: Copies of factors that a call keeps for its later products (grad_pre's and the operands' parts
#: are wanted by two each of a backward); beyond that each product makes its own.
COPIES_BYTES = 4 << 30


def one_chain(dtype: str, m: int, n: int, free: bool) -> int:
    """The most values that are one chain in the blocks of a product; `free`: of a d_b."""
    few = -(-m // 64) * -(-n // 64) <= SHORT_CHAINS
    short = few and (free or dtype == "float32")
    return (SHORT_CHAIN if short else ONE_CHAIN)[dtype]


def chain(k: int, one: int) -> int:
    """The length of the chains of a sum over `k`: equal ones, of whole slices of 32.

    Up to `one` values are a single one.
    """
    chains = 1 if k <= one else -(-k // min(CHAIN, one))
    return round_up(-(-k // chains), 32)


#: Where K is cut though its order is no matter of M (forwards): the share of the time that is left
#: then, at most. Its launch and planes are in that; the rest is for what a model of times does not
#: know.
SPLIT_GAIN = 0.9


def parts(blocks: int, k: int, multiprocessors: int, block_k: int) -> tuple[int, int]:
    """(length, number) of the parts of a sum over `k`, for so many blocks of the mirror's."""
    wanted = BLOCKS_PER_MULTIPROCESSOR * multiprocessors // max(1, blocks)
    parts = max(1, min(wanted, k // PART))
    part = round_up(-(-k // parts), block_k) if parts > 1 else k
    return part, -(-k // part) if k else 1


#: Bytes at whose multiples the rows of a copy begin, where they have so many times that: a run of
#: 128 bytes is then one line of the second-level cache and not two.
LINE = 128
LINES = 8


def pitch(length: int, itemsize: int) -> int:
    """Elements from a row to the next of a copy with rows of so many: whole 16 bytes at least."""
    long = length * itemsize >= LINES * LINE
    return round_up(length, (LINE if long else 16) // itemsize)


#: Jets of so many directions, and stacks of so many bytes, whose pass goes into their product
#: (`plan.members`). That saves a backward or a forward a way of the stack through memory or two,
#: and takes about 12 more of one row of each point, and three launches, which are 64 MiB in the
#: time of a pass. (On an H100 the Laplacian net's gradient took 18.3 ms for 20.6 by passes.)
MEMBERS_LEAST = 16
MEMBERS_BYTES = 64 << 20
