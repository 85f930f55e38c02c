"""The backend that a WGSL module of the shader contract is."""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from numfuse.backends import Call, latest
from numfuse.backends.webgpu.contract import nesting, run
from numfuse.backends.webgpu.contract.entry_points import ACTIVATIONS, ENTRY_POINTS
from numfuse.backends.webgpu.contract.source import Module
from numfuse.backends.webgpu.device.commands import Pipeline
from numfuse.backends.webgpu.device.device import Device
from numfuse.errors import DeviceError, DeviceLost
from numfuse.problem.results import settled

if TYPE_CHECKING:
    from numfuse.activations import Activation
    from numfuse.backends.webgpu.contract.check import Compared

#: Element types of an array that cannot be meant for f32.
_OTHER_ELEMENTS = ("u32", "i32", "f16", "f64", "u64", "i64", "atomic", "bool")
#: How alike a name must be to one of the contract's to be taken for a mistake in writing it: one
#: or two letters of it. Other entry points are a module's own affair.
_ALIKE = 0.93


class ContractBackend:
    """A WGSL module that keeps the shader contract; see :class:`numfuse.backends.Backend`.

    Made by :func:`numfuse.webgpu.load_shaders`. It computes float32 NumPy arrays with the
    activations of the contract. What the contract has no word for:

    - the backward computes the pre-activation again, a saved one (`pre_activation`) is not read;
    - the pre-activation that a forward returns is that forward once more, with the activation none;
    - a derivative that is not finite always counts as 0, so guard=False is an error except for the
      activations none and relu, of which it is always finite.

    Attributes
    ----------
    source : str
        The WGSL text.
    entry_points : tuple of str
        Those of the contract that the module has.
    others : tuple of str
        Its other compute entry points, which are never run.
    passes : int
        Dispatches so far.
    """

    name = "webgpu"

    def __init__(self, source: str, owner: Any, label: str = "shaders") -> None:
        self.source, self.label = source, label
        self._owner = owner
        self._lock = threading.Lock()
        self.passes = 0
        levels = nesting.depth(source)
        if levels > nesting.MOST:
            raise ValueError(
                f"{label} must nest at most {nesting.MOST} levels deep, got {levels}: a bracket, a "
                f"block and an else are each a level within those around them, and so are "
                f"{nesting.PER_LEVEL} operators of one expression, or {nesting.PER_LEVEL} "
                f"declarations that use each other in turn; names for parts (let) make it shallow"
            )
        device: Device = owner.device
        with _as_argument(label), device.reported(label):
            device.handle.create_shader_module(label=label, code=source)
        self._module = Module(source)
        found = self._module.entry_points
        self.entry_points = tuple(name for name in ENTRY_POINTS if name in found)
        self.others = tuple(name for name in found if name not in ENTRY_POINTS)
        self._hold_against_contract()
        self._compiled = device, self._compile(device)

    def __repr__(self) -> str:
        return f"ContractBackend({self.label!r}, entry_points={list(self.entry_points)})"

    # --- the module -----------------------------------------------------------------------------

    def _hold_against_contract(self) -> None:
        """Raise ValueError for what the text alone shows to be wrong."""
        for name in self.others:
            alike = difflib.get_close_matches(name.casefold(), ENTRY_POINTS, 1, _ALIKE)
            # (geglu_mul_f32 is no misspelt gelu_mul_f32)
            if alike and alike[0].startswith("gemm") and alike[0] not in self.entry_points:
                raise ValueError(
                    f"{self.label}: the shader contract has no entry point {name!r}; "
                    f"it has {alike[0]!r}"
                )
        if not self.entry_points:
            raise ValueError(
                f"{self.label}: a module must have an entry point of the shader contract "
                f"({', '.join(ENTRY_POINTS)}), got {', '.join(self.others) or 'none'}"
            )
        for name in self.entry_points:
            wanted = ENTRY_POINTS[name].workgroup
            try:
                size = self._module.workgroup(name)
                wrong = "" if size == wanted else f"got {_sizes(size)}"
            except ValueError as error:
                wrong = f"but {error}"
            if wrong:
                raise ValueError(
                    f"{self.label}: the workgroup size of {name!r} must be {_sizes(wanted)} in the "
                    f"shader contract, {wrong}"
                )
            self._hold_bindings(name)

    def _hold_bindings(self, name: str) -> None:
        """Raise ValueError for an array of other elements, or a binding of another kind."""
        interface = ENTRY_POINTS[name].interface
        for index, array in enumerate(interface.arrays):
            here = self._module.touched(name, index)
            if len(here) != 1:
                continue  # unused, or a local variable has the name of a buffer: for the validation
            (variable,) = here
            kind = self._module.resolved(variable.type)
            wrong = None
            if variable.space != "storage":
                wrong = f"var<{variable.space}>"
            elif interface.read_write and variable.access != "read_write":
                wrong = f"access {variable.access!r}"
            elif kind.startswith(tuple(f"array<{other}" for other in _OTHER_ELEMENTS)):
                wrong = kind
            if wrong is not None:
                access = "read_write" if interface.read_write else variable.access
                raise ValueError(
                    f"{self.label}: binding {index} ({array}) of {name!r} must be "
                    f"var<storage, {access}> of array<f32> in the shader contract, got {wrong} "
                    f"for {variable.name!r}"
                )

    def _compile(self, device: Device) -> dict[str, Pipeline]:
        with _as_argument(self.label), device.reported(self.label):
            module = device.handle.create_shader_module(label=self.label, code=self.source)
        return {name: self._pipeline(device, module, name) for name in self.entry_points}

    def _pipeline(self, device: Device, module: Any, name: str) -> Pipeline:
        """Return the pipeline of an entry point, with the layout that the contract gives it."""
        interface = ENTRY_POINTS[name].interface
        # A layout has to say what the shader says. A binding for which the text shows two kinds of
        # access (a local variable with the name of a buffer) is tried with both.
        choices: list[list[str]] = []
        for index in range(len(interface.arrays)):
            found = {v.access for v in self._module.touched(name, index)} & {"read", "read_write"}
            choices.append(["read_write"] if interface.read_write else sorted(found) or ["read"])
        # with the sizes that a shader may ask for: a struct of a uniform has whole 16 bytes
        uniform = "uniform", -(-len(interface.uniform.names) // 4) * 16
        label = f"{self.label}/{name}"
        failure: DeviceError | None = None
        for accesses in product(*choices):
            try:
                with device.reported(label):
                    kinds = *((access, 4) for access in accesses), uniform
                    return device.compiled(label, module, kinds, name)
            except DeviceLost:
                raise
            except DeviceError as error:
                failure = failure or error
        bound = ", ".join(f"{i} {array}" for i, array in enumerate(interface.arrays))
        raise ValueError(
            f"{self.label}: {name!r} does not fit the shader contract, which binds {bound}, and "
            f"{len(interface.arrays)} a uniform of {len(interface.uniform.names)} u32: {failure}"
        ) from failure

    # --- runs -----------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device that the module runs on."""
        device: Device = self._owner.device
        return device

    def pipelines(self) -> tuple[Device, dict[str, Pipeline]]:
        """The device, and the pipelines on it; compiled again after it was lost."""
        device = self.device
        with self._lock:
            if self._compiled[0] is not device:
                self._compiled = device, self._compile(device)
            return self._compiled

    def require(self, *names: str, one: bool = False) -> str:
        """Return the first of these entry points that the module has.

        ValueError if it lacks one of them; with `one`, all.
        """
        found = [name for name in names if name in self.entry_points]
        if found and (one or len(found) == len(names)):
            return found[0]
        absent = [name for name in names if name not in found]
        wanted = f" {' or '.join(names)}" if one else f"s {', '.join(names)}"
        told = "both are" if one else f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'}"
        raise ValueError(
            f"{self.label} must have the entry point{wanted} for this operation, but {told} "
            f"absent; it has {', '.join((*self.entry_points, *self.others))}"
        )

    def _run(self, kind: str, p: Any) -> None:
        """Run a problem by the entry points of the module."""
        if p.dtype != np.float32:
            raise TypeError(
                f"{kind} on {self.device.name} by the shader contract must have dtype float32, "
                f"got {p.dtype.name}"
            )
        act = p.activation
        if act.id not in range(len(ACTIVATIONS)):
            raise ValueError(
                f"activation must be one of the shader contract's ({', '.join(ACTIVATIONS)}), "
                f"got {act.name!r}"
            )
        if not getattr(p, "guard", True) and act.name not in ("none", "relu"):
            raise ValueError(
                f"guard must be True for {act.name!r} by the shader contract: a derivative that is "
                f"not finite counts as 0 there, got False"
            )
        names = [] if settled(p) else getattr(run, kind)(self, p)
        latest.call = Call(
            "webgpu", self.device.name, "contract", " ".join(names) or f"{kind}/nothing", None
        )

    forward = partialmethod(_run, "forward")
    backward = partialmethod(_run, "backward")
    gated = partialmethod(_run, "gated")
    gated_backward = partialmethod(_run, "gated_backward")

    def count(self, passes: int) -> None:
        """Add to the number of passes."""
        with self._lock:
            self.passes += passes

    def check(self) -> dict[Compared, float]:
        """Run every entry point beside the reference backend.

        Returns
        -------
        dict
            {(output, shape, activation): relative error}, the keys being named tuples. The shape is
            (batch, M, K, N), or (numel,) of a gate. The error is the largest difference from the
            reference in float64, divided by the largest magnitude of the reference; infinite where
            one has a NaN or an infinity and the other has not. A sound module has some 1e-7 to
            1e-5. Entry points that the module lacks are left out.
        """
        from numfuse.backends.webgpu.contract import check as contract_check

        return contract_check.check(self)

    def describe(self) -> dict[str, Any]:
        """The device, and which entry points the module has."""
        return {
            "device": self.device.describe()["device"],
            "shaders": self.label,
            "entry points": list(self.entry_points),
            "absent": [name for name in ENTRY_POINTS if name not in self.entry_points],
            "not in the contract": list(self.others),
        }

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ndarray:
        """A new array for this backend's results."""
        return np.empty(shape, dtype)

    def to_device(self, x: ndarray) -> Any:
        """Not in the contract."""
        raise TypeError(
            f"an array cannot stay on {self.device.name} for {self!r}: the shader contract's "
            f"operands are NumPy arrays; use numfuse.to_device(x, 'webgpu') for numfuse's shaders"
        )

    def warmup(
        self,
        activations: Sequence[Activation],
        dtypes: Sequence[np.dtype[Any]],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """All entry points were compiled when the module was loaded."""
        self.pipelines()


def _sizes(workgroup: tuple[int, int, int]) -> str:
    return " x ".join(map(str, workgroup))


@contextlib.contextmanager
def _as_argument(label: str) -> Iterator[None]:
    """A device's refusal of a module is the error of an argument."""
    try:
        yield
    except DeviceLost:
        raise
    except DeviceError as error:
        raise ValueError(f"{label} must be a module of WGSL: {error}") from error
