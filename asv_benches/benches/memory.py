"""What a call takes beside its operands and results, and what a process holds in all."""

from pathlib import Path

import numba
import numpy as np

from numfuse.cli import peers

from .cases import WIDE as DTYPES
from .cases import call_of

version = "1"  # of the figures: a new one, and asv forgets the old ones

SHAPES = {
    "tall": (8192, 2048, 512),  # grad_pre of 64 MiB in float32
    "taller": (16384, 2048, 512),
    "deep": (8192, 512, 2048),
    "shallow": (4096, 4096, 64),
}
OPERATIONS = ["forward", "backward", "backward_saved", "gated", "gated_backward"]


def call(operation, dtype, shape):
    """A call of one thread with `out=`, which has run once: its kernels are there."""
    numba.set_num_threads(1)
    case = peers.Case(operation, *SHAPES[shape], dtype, "gelu")
    operands = peers.draw_operands(case, np.random.default_rng(0))
    run = call_of(peers.numfuse_contestant(case, operands))
    run()
    return run


def status(name: str) -> int:
    """Bytes of an entry of this process's status: VmRSS is what it holds, VmHWM the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise NotImplementedError(f"this system does not tell {name}")


def release() -> None:
    """What is kept for the next call goes back to the system, and the peak starts anew."""
    from numfuse.backends.cpu.launch import workspace

    del workspace.pool[:]
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise NotImplementedError("this system does not measure peaks anew") from error


class Extra:
    """Pages that the second call touches, its outputs given and its kernels compiled by the first.

    `kept` is what it leaves behind for the third.
    """

    params = (OPERATIONS, DTYPES, list(SHAPES))
    param_names = ("operation", "dtype", "shape")
    timeout = 300
    unit = "MiB"

    def setup(self, operation, dtype, shape):
        self.run = call(operation, dtype, shape)
        release()  # a system that cannot tell is skipped here
        status("VmHWM")

    def measure(self, name):
        release()
        before = status("VmRSS")
        self.run()
        return max(0, status(name) - before) / 2**20

    def track_extra(self, operation, dtype, shape):
        return self.measure("VmHWM")

    def track_kept(self, operation, dtype, shape):
        return self.measure("VmRSS")


class Process:
    """The peak of a whole process with its libraries and operands, as asv itself measures it."""

    params = (["forward", "backward", "backward_saved"], DTYPES, ["tall", "taller"])
    param_names = ("operation", "dtype", "shape")
    timeout = 300

    def setup(self, operation, dtype, shape):
        self.run = call(operation, dtype, shape)

    def peakmem_process(self, operation, dtype, shape):
        self.run()
