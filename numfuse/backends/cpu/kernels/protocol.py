"""The words through which the driver, the cells and the row functions speak.

A launch is described by int64 words (`DESCRIPTOR`, the slots, the axes).  A cell keeps a *context*
at the start of its thread's workspace: the slots of its batch element, what it knows of the next
block of B, and its streams of requests to the caches.
"""

from __future__ import annotations

#: Word numbers of the descriptor.  Strides are bytes.
DESCRIPTOR = {
    name: index
    for index, name in enumerate(
        [
            "D_M",
            "D_N",
            "D_K",
            "D_KC",
            "D_NC",
            "D_CELL_M",
            "D_CELL_N",
            "D_CELLS_M",
            "D_CELLS_N",
            "D_PACK_A",
            "D_PACK_B",
            "D_ROW",
            "D_BATCH_AXES",
            "D_SUM_AXES",
            "D_SUM_SIZE",
            "D_A",
            "D_A_ROW",
            "D_A_K",
            "D_B",
            "D_B_K",
            "D_B_COLUMN",
            "D_NAMED",
            "D_B_DIRECT",
            "D_PANEL",
            "D_PANEL_STRIDE",
            "D_PANELS",
            "D_GROUP",
            "D_BLOCK",
            "D_BLOCK_STRIDE",
            "D_B_BY_ROWS",
            "D_PLANE",
            "D_STRIP",
            "D_STRIP_STRIDE",
            "D_ASK",
            "D_ASK_2",
            "D_ASK_3",
            "D_SCRATCH",
            "D_SCRATCH_STRIDE",
            # Row function that stores past the caches, bytes of its elements and how many of them
            # it writes at a time; 0 where there is none (elementwise cells only).
            "D_STREAM",
            "D_STREAM_ITEM",
            "D_STREAM_STEP",
        ]
    )
}
#: Operands of a row function: three words each (address, row stride, column stride).
SLOTS = {
    name: index
    for index, name in enumerate(
        ["S_BIAS", "S_EXTRA", "S_GRAD", "S_OUT", "S_PRE", "S_SUMS", "S_A", "S_B"]
    )
}
SLOT_COUNT = len(SLOTS)
D_SLOTS = len(DESCRIPTOR)
#: After the slots: per batch axis its size and the strides of A, B and every slot, then per
#: summed axis its size and the strides of A and B.
D_AXES = D_SLOTS + 3 * SLOT_COUNT
AXIS_WORDS = 3 + SLOT_COUNT
#: Context words: the slots, then the address and stride of the scratch rows.
C_SCRATCH = 3 * SLOT_COUNT
C_SCRATCH_STRIDE = C_SCRATCH + 1
#: Then the block of B that is packed between the tiles of the one before it.
AHEAD = {
    name: C_SCRATCH_STRIDE + 1 + index
    for index, name in enumerate(
        [
            "N_SOURCE",
            "N_TARGET",
            "N_COLUMNS",
            "N_DEPTH",
            "N_PANEL",  # bytes of a packed panel
            "N_SLICES",  # rows, or panels of columns, to be packed
            "N_PACKED",  # slices that are
            "N_TILES",  # tiles between which that is done
            "N_CREDIT",
            "N_LINES",  # rows or columns of the source to be asked for
            "N_LINE_STEP",
            "N_ASKED",  # lines that have been
            "N_AHEAD",  # lines to ask for ahead of a slice
            "N_SHARE",  # bytes from request to request
            # The same of the next group of panels of A, where its columns are contiguous.
            "G_SOURCE",
            "G_TARGET",
            "G_ROWS",
            "G_DEPTH",
            "G_PACKED",  # columns
            "G_TILES",
            "G_CREDIT",
            "G_RUNS",  # requested: one line of as many columns as a stream asks for in a tile
        ]
    )
}
#: Then an address and a step for each stream of requests.
STREAM_TABLE = C_SCRATCH_STRIDE + 1 + len(AHEAD)
#: What the streams are for, by number: the next panel of A (or its source) by halves, the source of
#: the next block of B, the plane by halves, operands of the next row of the epilogue, where the
#: next panels of A will be packed.
STREAMS = {
    "FOR_A": 0,
    "FOR_B": 2,
    "FOR_PLANE": 3,
    "FOR_ROWS": 5,
    "FOR_PANELS": 8,
}
STREAM_COUNT = 9
ROW_STREAMS = STREAMS["FOR_PANELS"] - STREAMS["FOR_ROWS"]
CONTEXT_BYTES = 640

#: How a step names an operand: the number of its array, above these bits an offset in bytes.  The
#: last number is the launch's own memory.
NUMBER_BITS = 5
NUMBERS = (1 << NUMBER_BITS) - 1
#: The table of an open sequence: the next cell to be taken and how many are finished (a line each),
#: all cells, how many threads came when none was left, and from T_ENTRIES on an entry a step.
TABLE = {"T_NEXT": 0, "T_FINISHED": 8, "T_CELLS": 16, "T_LATE": 17, "T_ENTRIES": 24}
#: Of an entry: the cell function, the numbers of cells up to the step's end and before its phase,
#: the descriptor's address.
ENTRY_WORDS = 4
