"""The words through which a launch, the cells and the row functions speak.

Everything is int64. A step of a launch is described by a *descriptor*: the words of `DESCRIPTOR`,
three for each of `SLOTS`, then the batch axes. A cell keeps a *context* at the start of its
thread's workspace: the slots of its batch element, what it knows of the next block of B, and its
streams of requests to the caches.

A `Schema` is the one place that knows the order of words: kernels bind its names to their numbers,
and the host makes a table from values by name.
"""

from __future__ import annotations

from collections.abc import Mapping


class Schema(dict[str, int]):
    """{name: number of its word}, in the order of the words, the first of which is `first`."""

    def __init__(self, text: str, first: int = 0) -> None:
        lines = (line.partition("#")[0] for line in text.splitlines())
        names = " ".join(lines).split()
        super().__init__((name, first + i) for i, name in enumerate(names))
        if len(self) < len(names):
            raise ValueError(f"a schema's names must be different, got {names}")
        #: The number of the word behind the last.
        self.end = first + len(names)

    def words(self, values: Mapping[str, int]) -> list[int]:
        """Return the words of these values, 0 where there is none."""
        words = [0] * len(self)
        first = self.end - len(words)
        for name, value in values.items():
            if name not in self:
                raise KeyError(f"words must be of the schema, got {name!r}")
            words[self[name] - first] = value
        return words


#: Strides are in bytes, D_ functions by their addresses.
DESCRIPTOR = Schema("""
    D_M D_N D_K D_KC D_NC D_CELL_M D_CELL_N D_CELLS_M D_CELLS_N
    D_PACK_A D_PACK_B D_ROW
    D_BATCH_AXES D_SUM_AXES D_SUM_SIZE
    D_A D_A_ROW D_A_K D_B D_B_K D_B_COLUMN
    D_NAMED  # bit i: operand i (A, B, then the slots) is there
    D_B_DIRECT D_PANEL D_PANEL_STRIDE D_PANELS D_GROUP D_BLOCK D_BLOCK_STRIDE D_B_BY_ROWS
    D_PLANE D_STRIP D_STRIP_STRIDE
    D_ASK D_ASK_2 D_ASK_3  # slots whose rows are asked for ahead of time, or -1
    D_SCRATCH D_SCRATCH_STRIDE
    D_STREAM D_STREAM_ITEM  # row function that stores past the caches (elementwise cells only), or
    D_STREAM_STEP           # 0; bytes of its elements and how many of them it writes at a time
    D_SLOT_COUNT
    D_SPREAD  # of a factor that becomes residues: `Residues.spread` of its lines
""")
#: Operands of a row function: three words each (address, row stride, column stride).
#: A descriptor has the first SLOT_COUNT of them, or up to MOST_SLOTS where an epilogue asks for
#: more. Behind them, a product of residues has RESIDUE_SLOTS: those of A and of B, their exponents.
MOST_SLOTS, SLOT_COUNT, RESIDUE_SLOTS = 40, 8, 4
SLOTS = Schema(
    "S_BIAS S_EXTRA S_GRAD S_OUT S_PRE S_SUMS S_A S_B "
    + " ".join(f"S_{i}" for i in range(SLOT_COUNT, MOST_SLOTS + RESIDUE_SLOTS))
)
#: After the slots: per batch axis its size and the strides of A, B and every slot, then per
#: summed axis its size and the strides of A and B.
D_SLOTS = DESCRIPTOR.end
#: A network's operands have these slots; behind them are words of its own, then those of each
#: layer.  Members, of stacks and of results, are the value, directions and second derivatives.
NETWORK_SLOTS = Schema("""
    PACKED X UNITS TABLE  # weights and biases, points, directions, weights of second derivatives
    VALUE DIRECTION SECOND  # results, or their cotangents
    PARTIAL D_X W BIAS TURNED D_W D_BIAS
    STACKS SLOPES  # memory of all blocks, where they have their stacks or their slopes in it
    X_DOT GRAD  # tangents of points, and a cotangent of the tangents of results
""")
NETWORK = Schema(
    """
    N_POINTS N_BLOCK N_CELL  # all points, and those of a block and of a cell
    N_DIRECTIONS N_SECONDS
    N_DIRECTION_STEP N_SECOND_STEP  # from member to member of the results
    N_LAYERS
    N_MADE  # layers that a backward makes again
    N_GRAD N_Q N_SCRATCH N_ONE  # places in the workspace
    N_PARTIAL  # bytes of a cell's sums
    N_STACKS N_SLOPES  # bytes of a block's in there; 0: they are in the workspace
    N_KEPT  # whether a forward has left them there
    P_TABLE  # where a layer's addresses go: of its operands and of its gradients (`pack_cell`)
    P_W P_STEP P_TURNED P_TURNED_STEP P_BIAS  # of a layer: places of copies, bytes of their rows
    N_CELLS  # of a network, where there is a batch of them
    N_WORDS N_OWN  # words of the descriptor, and where in the workspace a network has its own
    N_BATCH  # from here on, of each slot the bytes from network to network
    """,
    D_SLOTS + 3 * len(NETWORK_SLOTS),
)
#: Behind them, the words of each layer.
N_LAYER = NETWORK["N_BATCH"] + len(NETWORK_SLOTS)
#: Of a layer: its sizes, members of its inputs, bytes of a row of its inputs and of its sums;
#: where its addresses are (`P_TABLE`), bytes of a row of its weights and of their transpose (0: not
#: needed), whether it has a bias; places of its stacks and of its gradients in a cell's sums
#: (-1: none); the addresses of its products and of its row functions (0: none).  Where
#: tangents pass too: places of those of its weights and bias, whether its sums move, and whether
#: the sums of its values are made.
LAYER = Schema("""
    L_K L_N L_MEMBERS L_IN_STEP L_STEP
    L_TABLE L_W_STEP L_TURNED_STEP L_BIAS
    L_INPUT L_Z L_OUT L_SLOPES
    L_D_W L_D_BIAS
    L_ALONG L_DOWN L_ROW L_BACK
    L_W_DOT L_TURNED_DOT L_BIAS_DOT L_MOVED L_SUMS
""")
#: Context words: the slots, then the address and stride of the scratch rows.
SCRATCH = Schema("C_SCRATCH C_SCRATCH_STRIDE", 3 * len(SLOTS))
#: Then the block of B that is packed between the tiles of the one before it, and the same of the
#: next group of panels of A, where its columns are contiguous.
AHEAD = Schema(
    """
    N_SOURCE N_TARGET N_COLUMNS N_DEPTH
    N_PANEL  # bytes of a packed panel
    N_SLICES  # rows, or panels of columns, to be packed
    N_PACKED  # slices that are
    N_TILES  # tiles between which that is done
    N_CREDIT
    N_LINES  # rows or columns of the source to be asked for
    N_LINE_STEP
    N_ASKED  # lines that have been
    N_AHEAD  # lines to ask for ahead of a slice
    N_SHARE  # bytes from request to request
    G_SOURCE G_TARGET G_ROWS G_DEPTH
    G_PACKED  # columns
    G_TILES G_CREDIT
    G_RUNS  # requested: one line of as many columns as a stream asks for in a tile
    """,
    SCRATCH.end,
)
#: Then an address and a step for each stream of requests.
STREAM_TABLE = AHEAD.end
#: What the streams are for, by number: the next panel of A (or its source) by halves, the source of
#: the next block of B, the plane by halves, operands of the next row of the epilogue, where the
#: next panels of A will be packed.
STREAMS = {"FOR_A": 0, "FOR_B": 2, "FOR_PLANE": 3, "FOR_ROWS": 5, "FOR_PANELS": 8}
STREAM_COUNT = 9
ROW_STREAMS = STREAMS["FOR_PANELS"] - STREAMS["FOR_ROWS"]
CONTEXT_BYTES = 1408

#: How a step names an operand: the number of its array, above these bits an offset in bytes.  The
#: last number is the launch's own memory.
NUMBER_BITS = 8
NUMBERS = (1 << NUMBER_BITS) - 1
#: Before the steps of a sequence: the number of the array that a temporary is to lie beside (-1:
#: none), and where that temporary is planned.
HEAD = Schema("H_BESIDE H_PLACE")
#: Of a step, before its descriptor: the cell function, the numbers of cells up to the step's end
#: and before its phase, and the words of the descriptor.
STEP = Schema("P_CELL P_END P_BEFORE P_LENGTH")
#: The table of an open sequence: the next cell to be taken and how many are finished (a line each),
#: all cells, what a team's threads need to know, and from T_ENTRIES on an entry a step.
TABLE = {"T_NEXT": 0, "T_FINISHED": 8, "T_CELLS": 16, "T_SEATS": 17, "T_CAME": 18, "T_PAUSE": 19}
TABLE |= {"T_COUNT": 20, "T_WORKSPACE": 21, "T_STRIDE": 22, "T_WAITED": 23, "T_ENTRIES": 24}
#: Of an entry: as of a step, but the descriptor's address in place of its length.
ENTRY = Schema("E_CELL E_END E_BEFORE E_DESCRIPTOR")
#: The board on which launches offer seats to helpers: how many of these sleep, the processor of the
#: latest thread that launched (-1: unknown), its looks at what others did, the helper that started
#: last, the addresses of functions (wait for a lock, release one, tell and set on which processors
#: a thread may run), then places for launches at the same time, two lines each: whether one is
#: taken, the seats that are left, how many helpers have left it again, and what they need to know.
BOARD = {"B_ASLEEP": 0} | Schema(
    "B_PROCESSOR B_WAITED B_HELPERS B_ACQUIRE B_RELEASE B_PROCESSORS B_SET_PROCESSORS", 8
)
BOARD_WORDS, PLACES, PLACE_WORDS = 16, 8, 16
PLACE = Schema("L_TAKEN L_TABLE L_WORKSPACE L_STRIDE") | {"L_SEATS": 8, "L_LEFT": 9}
#: Of a helper: whether it sleeps, the lock that it then waits for, the processor that it keeps off
#: (-1: none yet), its number in the system, the process's, the helper that started before it, and
#: from H_SET on room for a set of processors.
HELPER = Schema("H_ASLEEP H_LOCK H_OFF H_THREAD H_PROCESS H_NEXT H_SET")
SET_BYTES = 1024
