"""numfuse's functions on JAX arrays: those on a CUDA device, outside of jit, grad and vmap."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__: list[str] = []


def _on_cuda(x: Any) -> bool:
    devices = getattr(x, "devices", None)
    if not callable(devices) or type(x).__name__.endswith("Tracer"):
        return True  # no array: for the messages of adapters.cuda
    return all(device.platform in ("gpu", "cuda") for device in devices())


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    served: Callable[..., Any] | None = None

    def forwarded(*args: Any, **options: Any) -> Any:
        nonlocal served
        if served is None:
            for x in (*args, *options.values()):
                if not _on_cuda(x):
                    raise TypeError(
                        "an array must be on a CUDA device, got one on the CPU: make it a "
                        "NumPy array yourself if its gradient and device do not matter"
                    )
            served = getattr(import_module("numfuse.adapters.cuda"), name)
        return served(*args, **options)

    globals()[name] = forwarded
    return forwarded
