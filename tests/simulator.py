"""Numba's simulator with one thread at a time: from barrier to barrier, in an order drawn anew.

Its own threads run beside each other while a loop asks each of them whether it waits, which costs
several times what they compute. Here a thread has the turn until it comes to a barrier or its end.
The order changes at each barrier (the same in every run), so that a barrier that is missing shows.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel


class Turns(kernel.BlockThread):
    """A thread of a block, which waits for its turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # (a lock is released by the other thread: a semaphore's code would be Python's)
        self.turn, self.back = threading.Lock(), threading.Lock()
        self.turn.acquire()
        self.back.acquire()
        self.ended = False

    def run(self) -> None:
        self.turn.acquire()
        if not self.abort:
            super().run()
        self.ended = True
        self.back.release()

    def syncthreads(self) -> None:
        self.back.release()
        self.turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block has failed")

    def go_on(self) -> None:
        """Give it the turn, and wait until it comes to a barrier or its end."""
        self.turn.release()
        self.back.acquire()


class Blocks(kernel.BlockManager):
    """The threads of a block."""

    def run(self, grid_point: tuple[int, ...], *arguments: Any) -> None:
        threads = [
            Turns(lambda: self._f(*arguments), self, grid_point, point, self._debug)
            for point in np.ndindex(*self._block_dim)
        ]
        order = random.Random(0)
        for thread in threads:
            thread.start()
        live = list(threads)
        while live:
            order.shuffle(live)
            for thread in live:
                thread.go_on()
                if thread.exception:
                    self._end(live)
                    raise thread.exception[0].with_traceback(thread.exception[1])
            live = [thread for thread in live if not thread.ended]

    @staticmethod
    def _end(threads: list[Turns]) -> None:
        for thread in threads:
            thread.abort = True
            thread.turn.release()


def install() -> None:
    """Let kernels run so, and let sums over K be cut where shapes are small enough to run.

    The device counts as one with several multiprocessors, and a part of K has few values: so every
    property of the suite is also one of sums in parts (`kernels.planes`).
    """
    from numfuse.backends.cuda import tiling
    from numfuse.backends.cuda.driver.devices import device

    kernel.BlockManager = Blocks
    tiling.PART = 16
    device().info = replace(device().info, multiprocessors=4)
