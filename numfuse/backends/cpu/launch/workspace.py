"""Memory for the cells of a launch, kept for the next one."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from numfuse.backends.cpu import tiling

#: Workspaces are cut on pages, so that two threads never share a line or a page.
PAGE = 4096
HUGE_PAGE = 2 << 20
#: Workspaces kept for the next call: as many as calls have run at once, up to this number and to
#: `tiling.KEPT_BYTES` in all.
KEPT_WORKSPACES = 4


class Workspace:
    """Page-aligned memory for the cells of one launch, on huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        how = {}
        if hasattr(mmap, "MAP_PRIVATE"):
            # Python's default is a map that a forked child shares: both would work in one place.
            how["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.size + HUGE_PAGE, **how)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"the workspace of a call takes {self.size + HUGE_PAGE} bytes, and the system "
                f"gives none: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        address = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE


# list.append and list.pop are atomic, so the pool needs no lock (and survives a fork).
pool: list[Workspace] = []
#: Bytes of a workspace that the pool takes if it is empty: every small call's.
usual_bytes = tiling.KEPT_BYTES // KEPT_WORKSPACES


def borrow(size: int) -> Workspace:
    """Return a new workspace of at least this size; without memory for it, the pool goes first."""
    try:
        return Workspace(size)
    except MemoryError:
        pool.clear()
    return Workspace(size)


def give_back(workspace: Workspace) -> None:
    """Put a workspace into the pool, if that has room for it."""
    kept = pool[:]  # another thread may change the list itself
    if len(kept) < KEPT_WORKSPACES:
        if workspace.size + sum(x.size for x in kept) <= tiling.KEPT_BYTES:
            pool.append(workspace)
