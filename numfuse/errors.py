"""The exceptions that numfuse adds to Python's own."""

__all__ = ["BackendUnavailable", "DeviceError", "DeviceLost"]


class BackendUnavailable(RuntimeError):
    """A backend was asked for that cannot run here.

    Shapes and values raise ValueError, dtypes and kinds of array raise TypeError; this one says
    that the request itself was sound and that the machine, or the installation, lacks something.

    Parameters
    ----------
    backend : str
        The name that was asked for.
    reason : str
        Why it cannot run, as a clause: "no device was found".
    extra : str, optional
        The extra of the distribution that brings what is missing, without the brackets: "cuda".
    """

    def __init__(self, backend: str, reason: str, extra: str | None = None) -> None:
        self.backend = backend
        self.reason = reason
        self.extra = extra
        remedy = f" (extra: numfuse[{extra}])" if extra else ""
        super().__init__(f"backend {backend!r} is not available: {reason}{remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        # Exceptions pickle by their one-string args; ours needs all three back (process pools).
        return type(self), (self.backend, self.reason, self.extra)


class DeviceError(RuntimeError):
    """A device or its driver refused work that numfuse gave it; the message names the kernel.

    Nothing was written, and the next call works. A device that ran out of memory raises
    MemoryError.
    """


class DeviceLost(DeviceError):
    """A device is gone (unplugged, reset, its driver ended), and the arrays on it with it.

    The next call with NumPy arrays starts on a new device; arrays of the lost one raise this error.
    """
