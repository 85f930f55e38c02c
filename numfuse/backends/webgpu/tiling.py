"""Every block size of the WebGPU backend, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Uniforms and tables of places that a device keeps, by their content, and their bytes: a training
#: step makes a dozen kinds of call with one or two each.
KEPT_CONSTANTS = 1024, 64 << 20
#: Programs of calls that a device keeps, and bytes of the process that they take.
KEPT_PROGRAMS = 256, 32 << 20
#: Sets of buffers of which a program keeps the bind groups: those that a loop takes by turns.
KEPT_SETS = 8
#: Bind groups that a device keeps, and their bindings: one for each set of buffers that a call
#: meets again.
KEPT_GROUPS = 512, 1 << 16
#: Bytes of the buffers for temporaries that a device keeps: two gradients of a pre-activation at
#: 8192 x 8192 in float32.
SPARE_BYTES = 512 << 20
#: Bytes of free buffers that a device keeps: the temporaries and results of a step of training at
#: 4096 x 4096 in float32 are six of 64 MiB.
POOL_BYTES = 512 << 20
#: Buffers to read from that a device keeps, and the bytes of the largest.
KEPT_STAGING = 4
STAGING_BYTES = 64 << 20
#: Arrays of numbers that a device keeps, and their bytes: a step of training has some.
KEPT_NUMBERS = 256, 1 << 20
#: Bytes of the arrays of calls that wait for a submit, at the most: 0.25 ms of work at the 4 TB/s
#: of an H200, twice what a submit takes.  A dispatch counts as 16 MiB more, so there are 64 at the
#: most.  A driver may end a device that works for seconds at one submit: of products of 3000 cubed
#: there are eight, which are 0.4 s at 1 TFLOP/s.
WAITING_BYTES = 1 << 30
DISPATCH_BYTES = 16 << 20
#: Seconds that a call waits for its submit, about: those of some thirty small calls, so that a
#: submit is a few us of each. The device may idle as long, where it has nothing else to do.
WAITING_SECONDS = 5e-4

#: Seconds for which a device is asked whether it is done before the process sleeps: a large call's.
ASKING_SECONDS = 2e-3

#: Values of K that an invocation adds up behind one another, as in CUDA: a multiple of every
#: tile's slices; 0: all of them.
CHAIN = 256


@dataclass(frozen=True)
class WebGpuTile:
    """A workgroup's block of a product on WebGPU, and an invocation's part of it."""

    block_m: int
    block_n: int
    block_k: int
    mr: int
    nr: int
    #: Rows of blocks that are worked on together: their Y blocks are found in the device's cache.
    group: int = 8
    #: Whether neighbouring invocations fetch along K where that is the contiguous axis.
    k_first: bool = False
    chain: int = CHAIN

    @property
    def invocations(self) -> int:
        return self.block_m // self.mr * (self.block_n // self.nr)

    def blocks(self, m: int, n: int) -> int:
        """Return the blocks of a result."""
        return -(-m // self.block_m) * -(-n // self.block_n)


#: Tiles of a GPU, the largest first.  128 x 128 x 16 with 8 x 16 sums an invocation: 6 reads of
#: four values from workgroup memory for 128 fused multiply-adds.  Measured on an H200 in float32,
#: in TFLOP/s at 4096, 2048 and 1024 cubed: this one 43.5, 42.7 and 10.9 (64 blocks for 132
#: multiprocessors), 64 x 64 with 8 x 8 40.7, 36.7 and 31.2, 32 x 64 with 8 x 8 39.4, 33.8 and
#: 31.7; less with slices of 8, 12 or 20 (31 to 35), two copies of the slices (25), 256 invocations
#: (33), 128 x 256 (39), 16 x 8 sums (35).  Fetching along K where it is contiguous: 1.04 to 1.16
#: times.  At 512 cubed the last gives 256 blocks and 10.0, 32 x 64 128 and 7.5.
TILES = (
    WebGpuTile(128, 128, 16, 8, 16, k_first=True),
    WebGpuTile(64, 64, 16, 8, 8, k_first=True),
    WebGpuTile(32, 64, 16, 8, 8, k_first=True),
    WebGpuTile(32, 32, 16, 4, 4, k_first=True),
)
#: Rows of the largest tile whose halves are those of two products over one left factor, where no
#: sums over rows or columns are made. A gated layer beside two products and a gate on an H200, by
#: halves of 128 x 128 (128 sums an invocation), of 64 x 64 (64 sums), and by 128 x 32 with 8 x 4
#: each: 4096 x 256 -> 704 1.11, 1.47, 1.49; 8192 x 64 -> 1024 1.29, 1.46, 1.48; 20000 x 96 -> 320
#: 1.52, 1.64, 1.68. (64 x 64 with 4 x 8 or 8 x 8 sums each, and slices of 8: less.) Of a longer K
#: the first two, two runs by turns at one clock: 4096 x 512 -> 1408 1.25 and 1.32, 2048 x 1024 ->
#: 2816 1.25 and 1.30; 128 x 32 had 1.13.
GROUP_ROWS = 64
#: Of a CPU behind Vulkan (lavapipe): what its compiler takes 0.2 s for, and not 1.5.
CPU_TILE = WebGpuTile(32, 32, 8, 4, 4)
#: Blocks that keep a large device busy: two on each of 132 multiprocessors.
BLOCKS = 264
#: Rows that a part of d_b adds up at the least: a block's arithmetic then outweighs its plane's way
#: through memory by 100 flops a byte.
PART = 512
#: Chains of a sum over K, at the least, of which each is a plane where blocks are few, and the
#: bytes of all planes at the most. Of M rows a plane goes through memory twice, 2 M / 256 of the
#: bytes of the right factor: half as many again for 64 rows.
CHAINS = 4
CHAIN_BYTES = 256 << 20
#: Columns of the matrix as which one long row is summed: blocks of a row would have one row of
#: their invocations at work.
LONG_ROW = 1024
#: Planes that one invocation adds up; more are joined in stages.
JOINED = 64


def tile(
    m: int, n: int, itemsize: int, storage: int, invocations: int, cpu: bool, depth: int = 0,
    factors: int = 1, bare: bool = False,
) -> WebGpuTile:  # fmt: skip
    """The largest tile that the device holds and of which the result has enough.

    Where its sums over `depth` may be cut, each part of one counts. It is that of each product of a
    group with so many right `factors`, where it is the part of the tile of one: sums over rows have
    the same order. Where there are none (`bare`), it is a smaller one.
    """
    if cpu:
        return CPU_TILE
    parts = max(1, depth // PART)
    fitting = _fitting(itemsize, storage, invocations, factors)
    if bare and factors > 1:
        fitting = [x for x in fitting if x[0].block_m <= GROUP_ROWS]
    for whole, tile in fitting:
        # (which parts a sum has that may be cut follows from its tile, and so do its bits)
        if (depth or _filled(whole, m, n)) and whole.blocks(m, n) * parts >= BLOCKS // 2:
            return tile
    return fitting[-1][1]


def _filled(tile: WebGpuTile, m: int, n: int) -> bool:
    """Return whether more than half of a tile's rows and columns are a result's.

    A block costs what a full one does, and smaller tiles are at 0.8 of the speed or more. The least
    rows and columns of all tiles are always enough.
    """
    return tile.block_m < max(2 * m, 33) and tile.block_n < max(2 * n, 33)


def _fitting(
    itemsize: int, storage: int, invocations: int, factors: int
) -> list[tuple[WebGpuTile, WebGpuTile]]:
    """Return the tiles that a device holds: that of one product, and that of one of a group."""
    fitting: list[tuple[WebGpuTile, WebGpuTile]] = []
    for whole in TILES:
        tile = divided(whole, factors)
        # an invocation's sums are registers: 128 of 4 bytes
        sums = tile.mr * tile.nr * factors
        if sums * itemsize > 512 or tile.invocations > invocations:
            continue
        block_k = tile.block_k
        while block_k >= 8 and storage < _workgroup_bytes(tile, block_k, itemsize, factors):
            block_k //= 2
        if block_k >= 4:
            fitting.append((whole, replace(tile, block_k=block_k)))
    return fitting


def chained(
    m: int, n: int, k: int, count: int, itemsize: int, storage: int, invocations: int, cpu: bool
) -> WebGpuTile | None:  # fmt: skip
    """Return the tile of `count` products of few blocks whose chains of sums are planes each.

    None: there are blocks enough, or the sums are short.
    """
    chains = -(-k // CHAIN) if CHAIN else 1
    if cpu or chains < CHAINS or count * chains * m * n * itemsize > CHAIN_BYTES:
        return None
    fitting = _fitting(itemsize, storage, invocations, 1)
    if any(w.block_m >= 64 and count * w.blocks(m, n) >= BLOCKS // 2 for w, _ in fitting):
        return None
    for whole, tile in fitting:
        if _filled(whole, m, n) and count * whole.blocks(m, n) * chains >= BLOCKS // 2:
            return tile
    return fitting[-1][1]


def divided(tile: WebGpuTile, factors: int) -> WebGpuTile:
    """Return the tile of each product of a group over one left factor, for as many invocations.

    Two blocks of 64 columns take the registers, and the reads from workgroup memory, of one of 128.
    """
    nr = max(4, tile.nr // factors // 4 * 4)
    return replace(tile, block_n=tile.block_n // tile.nr * nr, nr=nr)


def _workgroup_bytes(tile: WebGpuTile, depth: int, itemsize: int, right: int = 1) -> int:
    """All factors, each row padded by four, and the sums of columns."""
    factors = (tile.block_m + 4 + right * (tile.block_n + 4)) * depth
    return (factors + 4 * tile.invocations) * itemsize


def parts(blocks: int, k: int, room: int) -> tuple[int, int]:
    """(length, number) of the parts of a sum over `k`, for a result of so many blocks."""
    parts = max(1, min(BLOCKS // max(1, blocks), k // PART, room))
    # a part begins where a slice of any tile does
    part = -(-k // parts // 32) * 32 if parts > 1 else k
    return part, -(-k // part) if k else 1


def points(m: int, n: int) -> int:
    """Return how many points of M an invocation of a jet's pass adds up: enough of them work."""
    count = 64
    while count > 8 and m * n < 65536 * count:
        count //= 2
    return count


def groups(blocks: int, segments: int, room: int) -> int:
    """In how many groups the segments of a sum are added up."""
    return max(1, min(BLOCKS // max(1, blocks), segments, room))


# --- whole networks -------------------------------------------------------------------------------
#: Columns to which the layers of a network are padded: what a 64 x 64 slice of weights in float32
#: takes, 16 KiB, is the least workgroup memory that a device has.
NETWORK_WIDTHS = 32, 64
#: Workgroups of a backward, at the most: six for each of 132 multiprocessors. Each has a plane of
#: the gradients of all weights, and its points' inputs and sums of every layer, in device memory.
#: For 4 x 64 in float32 and tiles of 64 rows these are 51 and 160 KiB a workgroup, where workgroup
#: memory has 16 to 48: a tile's rows in one layer, and its inputs there or a layer's weights, take
#: 32. Sums and inputs are written and read once each: 1 KiB for a row and a layer of 64 columns,
#: where three products take 24,576 flops. To make the inputs again from the sums would take a
#: quarter less, and each activation once more.
NETWORK_GROUPS = 792
#: Workgroups of a forward, at the most: each has one tile.
NETWORK_FORWARD_GROUPS = 1 << 30
#: Invocations that all tiles of a network have together, where there is a tile for it: eight warps
#: for each of 132 multiprocessors. With fewer, an invocation has less to do in a smaller tile.
NETWORK_INVOCATIONS = 132 * 256
#: By width, the rows (points times members) up to which a GPU takes a network at once; None: any.
#: A jet and its gradients of 80,000 rows and 4 x 64, each with a wait, take 1.3 ms on an H200; the
#: layers took 7.0 on an H100.
NETWORK_ROWS: dict[int, int | None] = {32: None, 64: None}


@dataclass(frozen=True)
class NetworkTile:
    """A workgroup's rows of points on their way through a network, and an invocation's parts."""

    #: Columns of a row.
    width: int
    rows: int
    #: Rows of weights, or of a layer's inputs, that are in workgroup memory at a time.
    slice: int
    #: An invocation's rows and columns of a product, and of a gradient of weights.
    mr: int
    nr: int
    dm: int
    dn: int
    #: Whether 32 neighbours have eight rows and four runs of columns; else all of a row's first.
    lanes: bool = False
    #: Whether weights have workgroup memory of their own, beside that of inputs: two barriers less
    #: for a layer of a backward.
    apart: bool = False

    @property
    def invocations(self) -> int:
        return self.rows // self.mr * (self.width // self.nr)

    @property
    def team(self) -> int:
        """Invocations that make a whole gradient of weights."""
        return self.width // self.dm * (self.width // self.dn)

    @property
    def teams(self) -> int:
        """Teams, each of which adds up some of the rows."""
        return self.invocations // self.team

    @property
    def nbytes(self) -> int:
        """Workgroup memory of a backward: a tile, its inputs in one layer, or and some weights."""
        apart = min(self.slice, self.width) if self.apart else 0
        return 4 * self.width * (self.rows + self.slice + apart)


def network_width(widest: int, rows: int, cpu: bool) -> int:
    """Return the columns to which a network's layers are padded; 0: it goes layer by layer."""
    width = next((x for x in NETWORK_WIDTHS if widest <= x), 0)
    most = None if cpu or not width else NETWORK_ROWS[width]
    return 0 if most is not None and rows > most else width


def network_tile(
    widest: int, storage: int, invocations: int, cpu: bool, rows: int, members: int = 1
) -> NetworkTile | None:
    """Return the tile of a network whose layers have up to so many columns; None: there is none.

    It is the first that the device holds, and of which so many `rows` keep a large device busy;
    else the last. It has two points at the least, so that a third of its rows are idle at the most.
    Of a CPU tiles are small: its compiler takes the longer.
    """
    width = network_width(widest, rows, cpu)
    if not width:
        return None
    found = None
    for sizes in (NETWORK_CPU_TILES if cpu else NETWORK_TILES)[width]:
        tile = NetworkTile(width, *sizes)
        there = tile.nbytes <= storage and tile.invocations <= invocations
        if tile.slice < width and found is not None:
            break  # weights in slices are for devices that hold no others
        if there and 2 * members <= tile.rows:
            found = tile
            if cpu or -(-rows // tile.rows) * tile.invocations >= NETWORK_INVOCATIONS:
                break
    return found


#: By width, the rows of tiles and of slices, and an invocation's rows and columns of a product, and
#: of a gradient of weights; from the most sums an invocation to the fewest. 8 x 8 sums are 16 reads
#: of four values for 256 multiply-adds, as those of `TILES`; slices of 32 rows of 64 columns are
#: for 16 KiB. On an H200 8 x 4 sums in tiles of 128 rows take 0.36 ms for the gradients of a jet of
#: 20,000 points and 4 x 64, 8 x 8 in tiles of 64 rows 0.82. An invocation's rows are apart by a
#: multiple of eight, there are one or two teams, and two need a slice of whole weights.
#: (`asv_benches/webgpu_networks.py --tiles` times others.)
NETWORK_TILES = {
    64: (
        (128, 64, 8, 4, 8, 4),
        (64, 64, 4, 4, 8, 4),
        (32, 64, 4, 4, 8, 4),
        (32, 64, 2, 8, 8, 8),
        (32, 32, 4, 8, 8, 8),
    ),
    32: ((64, 64, 8, 4, 4, 4), (64, 64, 4, 4, 4, 4), (32, 32, 2, 4, 4, 4)),
}
NETWORK_CPU_TILES = {
    64: ((64, 64, 4, 4, 4, 4), (32, 32, 4, 4, 8, 4)),
    32: ((64, 64, 4, 4, 4, 4), (32, 32, 4, 4, 4, 4)),
}
