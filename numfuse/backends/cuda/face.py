"""The CUDA backend: kernels in numba-cuda for NVIDIA GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends import OneRun, Traits
from numfuse.errors import BackendUnavailable
from numfuse.moduli import FEWEST, MOST, precisions

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.backends.cuda.call.arrays import DeviceArray
    from numfuse.backends.cuda.driver.device import Device

#: How products are made: as IEEE 754 says; of float32, of three or two bfloat16 parts each (six or
#: three products), or rounded to the 10 bits of tf32; of float64, by integers of 8 bits, with T
#: moduli ("int8:T").
PRECISIONS = ("ieee", "bf16x6", "bf16x3", "tf32", *precisions())


class CudaBackend(OneRun):
    """A CUDA device; see :class:`numfuse.backends.Backend` for what each method is.

    Parameters
    ----------
    ordinal : int
        The number of the device, as CUDA counts them.
    precision : {"ieee", "bf16x6", "bf16x3", "tf32", "int8", "int8:8" to "int8:20"}
        Of float32 products; "int8" is one of float64 products.
    """

    name = "cuda"
    jet = partialmethod(OneRun._run, "jet")

    def __init__(self, ordinal: int = 0, precision: str = "ieee") -> None:
        self.ordinal, self.precision = ordinal, precision

    def __repr__(self) -> str:
        return f"CudaBackend({self.ordinal}, {self.precision!r})"

    @property
    def traits(self) -> Traits:
        """Return what the kernels leave open."""
        from numfuse.backends.cuda.compile import toolchain

        return Traits(
            memory="device",
            grad_pre=("float16", "bfloat16"),
            order=("tier", "axes", "saved"),
            libraries=() if toolchain.SIMULATED else ("cupy",),
            simulator=toolchain.SIMULATED,
        )

    @property
    def device(self) -> Device:
        """The device, made at its first use."""
        from numfuse.backends.cuda.driver.devices import device

        return device(self.ordinal)

    def run(self, kind: str, p: Any) -> None:
        """Run a problem of NumPy arrays."""
        from numfuse.backends.cuda.call import host

        host.run(self.device, self.precision, kind, p)

    def configure(self, device: Any = None, precision: str | None = None) -> CudaBackend:
        """This backend on another device, or with another precision of products."""
        from numfuse.backends.cuda.driver.libcuda import count

        ordinal = self.ordinal
        if device is not None:
            there = count()
            chosen = _ordinal(str(device), there)
            if chosen is None:
                raise ValueError(
                    f"device must be the number of a CUDA device below {there}, got {device!r}"
                )
            ordinal = chosen
        if precision not in (None, *PRECISIONS):
            known = f"{', '.join(map(repr, PRECISIONS[:5]))}, 'int8:{FEWEST}' to 'int8:{MOST}'"
            raise ValueError(f"precision must be one of {known} or None, got {precision!r}")
        return _on(ordinal, self.precision if precision is None else precision)

    def describe(self) -> dict[str, Any]:
        """Return what `info` shows, by name."""
        from numfuse.backends.cuda.compile import toolchain
        from numfuse.backends.cuda.driver import devices
        from numfuse.backends.cuda.driver.libcuda import count, driver_version
        from numfuse.backends.cuda.plan.tiers import TIERS

        info = self.device.info
        return {
            "device": str(self.device),
            "capability": ".".join(map(str, info.capability)),
            "driver": f"CUDA {driver_version()}",
            "devices": [str(devices.device(i)) for i in range(count())],
            "tiers": ", ".join(tier.name for tier in TIERS),
            "compiler": ", ".join(f"{k} {v}" for k, v in toolchain.versions().items()),
            "kernel cache": str(toolchain.cache_directory()),
        }

    def to_device(self, x: ndarray) -> DeviceArray:
        """A NumPy array, copied to the device."""
        from numfuse.backends.cuda.call.arrays import upload

        return upload(self.device, x)

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Compile the kernels of contiguous operands, small and large, into the disk cache.

        Nothing runs: the calls are recorded on arrays that are not there.
        """
        from numfuse.backends.cuda.call.record import foresee

        for dtype in dtypes:
            for act in activations:
                for m, k, n in _WARM:
                    if progress is not None:
                        progress(f"{act.name} {dtype.name} {m} x {k} x {n}")
                    foresee(self.device, self.precision, dtype.name, act, m, k, n)

    def tune(
        self, function: Callable[[], Any], reorder: bool, to_numpy: Callable[[Any], ndarray]
    ) -> list[Any]:
        """Return the fastest ways of the products of a function's calls, which are kept on disk.

        `to_numpy` brings what it returns to the host.
        """
        from numfuse.backends.cuda.call import tuner

        return tuner.tune(function, reorder, to_numpy)


#: (M, K, N) of what is compiled ahead: odd and small, small, and large enough for the widest tiles.
_WARM = ((63, 63, 63), (64, 64, 64), (512, 512, 512), (4096, 4096, 4096))
#: The environment's variable that names the device of calls which name none.
_VARIABLE = "NUMFUSE_CUDA_DEVICE"
_BACKENDS: dict[tuple[int, str], CudaBackend] = {}


def _ordinal(text: str, there: int) -> int | None:
    """The number in "1" or "cuda:1"; None where there is no such device."""
    digits = text.removeprefix("cuda:")
    if not digits.isdecimal():
        return None
    number = digits.lstrip("0") or "0"  # (compared as text: int refuses thousands of digits)
    return next((i for i in range(there) if str(i) == number), None)


def _on(ordinal: int, precision: str = "ieee") -> CudaBackend:
    """The one backend object of a device and a precision."""
    return _BACKENDS.setdefault((ordinal, precision), CudaBackend(ordinal, precision))


def default() -> CudaBackend:
    """Return the backend of the device that the environment names, else of the first.

    Raises
    ------
    BackendUnavailable
        There is no driver, no device, or not the one that is named.
    """
    from numfuse.backends.cuda.driver.libcuda import Unusable, count

    try:
        there = count()
    except Unusable as error:
        raise BackendUnavailable("cuda", str(error), "cuda") from error
    wanted = os.environ.get(_VARIABLE) or "0"
    ordinal = _ordinal(wanted, there)
    if ordinal is None:
        # Not the caller's mistake: the backend is set to a device that is not here.
        raise BackendUnavailable(
            "cuda",
            f"{_VARIABLE} must be the number of a CUDA device below {there}, got {wanted!r}",
        )
    return _on(ordinal)
