"""Networks' jets on the arrays of PyTorch and CuPy on a CUDA device: what `stacks` asks of them.

Copies, views and new arrays are the library's own, so memory comes from its pool and work goes to
its current stream, in a capture too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.activations import get
from numfuse.adapters import cuda_whole, marks
from numfuse.adapters.cuda_arrays import CuPy, Torch
from numfuse.adapters.cuda_whole import Whole, whole
from numfuse.adapters.stacks import Array, Arrays, DeviceNetwork, Kept, refuse_kind
from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call import foreign
from numfuse.backends.cuda.call.arrays import DeviceArray, ghost
from numfuse.backends.cuda.call.foreign import Kind, kind_of
from numfuse.backends.cuda.call.record import NOTES
from numfuse.backends.cuda.call.series import repeated
from numfuse.backends.cuda.plan import half_networks
from numfuse.chains import Chain
from numfuse.perceptron import Network
from numfuse.runtime.views import dtype_of


class Noted(Arrays):
    """Arrays that are made and read where calls are noted; see `call.series`."""

    def noted(self, x: Array) -> Array:
        """Note an array that was made."""
        notes = NOTES.get()
        if notes is not None:
            notes.made.append(x)
        return x

    def constant(self, x: ndarray, like: Array, shape: tuple[int, ...]) -> Array:
        made, notes = super().constant(x, like, shape), NOTES.get()
        if notes is not None:
            notes.constants.append(made)
        return made

    def chains(self, net: Network) -> bool:
        """Return whether layers have so many directions that their passes go into products."""
        one = net.x.ndim == 2 and all(w.ndim == 2 for w, _, _ in net.layers)
        summed = net.weights is not None and net.seconds <= 1
        return one and summed and net.dtype == net.acc and net.directions >= tiling.MEMBERS_LEAST


class Own(Noted):
    """numfuse's own arrays."""

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        return self.noted(super().empty(like, shape))

    def place(self, x: Array) -> int:
        found: int = x.ordinal
        return found

    def whole(self, network: DeviceNetwork, backward: bool, more: bool = False) -> Whole | None:
        return None if more else whole(network, self.place(network.x), backward)


class Library(Noted):
    """A library's arrays; `functions` are numfuse's on these, `reader` says how they are read."""

    def __init__(self, functions: Any, reader: Kind, put: Callable[..., Array], kind: Any) -> None:
        super().__init__(put, kind)
        self.functions, self.reader = functions, reader

    def ghost(self, x: Array) -> ndarray:
        read, _, _ = self.reader.read("out", x)
        dtype = dtype_of(read.dtype)
        steps = [s * dtype.itemsize for s in read.strides]
        return ghost(read.address, tuple(read.shape), steps, dtype, read.writable)

    def place(self, x: Array) -> int:
        return self.reader.read("x", x)[1]

    def dtype(self, x: Array) -> np.dtype[Any]:
        return dtype_of(self.reader.read("x", x)[0].dtype)

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        read, ordinal, _ = self.reader.read("x", like)
        return self.noted(self.reader.maker(ordinal, shape, read.dtype)())

    def whole(self, network: DeviceNetwork, backward: bool, more: bool = False) -> Whole | None:
        return None if more else whole(network, self.place(network.x), backward)

    def jet(self, operation: Any, *call: Any) -> Any:
        return self.functions.jet(operation, *call)

    def product(self, a: Array, b: Array, backend: Any) -> Array:
        return self.functions.matmul_bias_activation(a, b, backend=backend)

    def product_bwd(self, *operands: Any, **how: Any) -> Any:
        return self.functions.matmul_bias_activation_bwd(*operands, **how)


class TorchArrays(Library):
    """PyTorch's tensors."""

    def __init__(self, functions: Any, reader: Kind) -> None:
        self._torch: Any = import_module("torch")

        def put(x: ndarray, device: Any) -> Array:
            half = x.dtype.kind != "f"  # bfloat16
            made = self._torch.from_numpy(x.view(np.int16) if half else x)
            return (made.view(self._torch.bfloat16) if half else made).to(device)

        super().__init__(functions, reader, put, self._torch.Tensor)

    def repeated(self, x: Array, shape: tuple[int, ...]) -> Array:
        return x.expand(shape)

    def turned(self, x: Array, axes: tuple[int, ...]) -> Array:
        return x.permute(axes)


class CupyArrays(Library):
    """CuPy's arrays."""

    def __init__(self, functions: Any, reader: Kind) -> None:
        self._cupy: Any = import_module("cupy")

        def put(x: ndarray, device: Any) -> Array:
            with device:
                return self._cupy.asarray(x)

        super().__init__(functions, reader, put, self._cupy.ndarray)

    def repeated(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self._cupy.broadcast_to(x, shape)


_LIBRARIES: dict[type[Kind], type[Any]] = {Torch: TorchArrays, CuPy: CupyArrays}


def arrays_of(functions: Any, put: Callable[..., DeviceArray]) -> Callable[[str, Any], Arrays]:
    """Return what finds how a network goes with the arrays of a kind; see `stacks.network`."""
    own, known = Own(put, DeviceArray), dict[Kind, Arrays]()

    def find(name: str, x: Any) -> Arrays:
        reader = kind_of(x)
        if isinstance(reader, foreign.Own):
            return own
        made = _LIBRARIES.get(type(reader)) if reader is not None else None
        if reader is None or made is None:
            raise refuse_kind(name, x, ", PyTorch's or CuPy's of a CUDA device")
        if reader not in known:
            known[reader] = made(functions, reader)
        return known[reader]

    return find


def _of_kept(keep: Kept, arrays: list[Any]) -> tuple[int, int]:
    """Add what a forward kept to arrays; return how many inputs and sums that were."""
    arrays += [*keep.inputs, *keep.sums, keep.whole]
    return len(keep.inputs), len(keep.sums)


def again(long: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs networks' jets as `long` does, and those that come again as one program."""

    def run(
        grads: Sequence[Any] | None, x: Any, weights: Any, biases: Any, how: tuple[Any, ...],
        form: tuple[Any, Any], keep: Any, needs: Sequence[str], out: Any = None,
    ) -> Any:  # fmt: skip
        """Return a forward's results or, with `grads`, the gradients."""

        def call() -> Any:
            return long(grads, x, weights, biases, how, form, keep, needs, out)

        lists = type(weights) in (tuple, list) and type(grads or ()) in (tuple, list)
        if out is not None or not lists or kind_of(x) is None:
            return call()
        kind = "network" if grads is None else "network backward"
        arrays, kept = [x, *weights, *(biases or ()), *(grads or ())], keep
        if grads is not None and keep is not None:
            if not isinstance(keep, Kept):
                return call()
            kept = _of_kept(keep, arrays)
        rest = kept, tuple(needs), switches()
        try:
            mark = marks.mark(kind, weights, biases, how, form, *rest)
        except (TypeError, ValueError):  # the long way says what is wrong
            mark = None
        if mark is None:
            return call()

        activation, final, _, backend = how
        formulas = partial(_formulas, [*marks.several(activation), final])
        return repeated(mark, arrays, backend, formulas, call)

    return run


def switches() -> tuple[Any, ...]:
    """Return the choices of ways that may be made for all networks."""
    return cuda_whole.ENABLED, cuda_whole.HALF, half_networks.switches()


def _formulas(activations: Iterable[Any]) -> list[Any]:
    """Return the formulas with which a network's program goes."""
    return [e for f in activations for e in get(f).formulas()]


def chain_again(
    chain: Chain, others: Iterable[Any], options: tuple[Any, ...], long: Callable[[], Any]
) -> Any:
    """Return what `long` does with a chain's layers: as one program, if they come again."""
    weights, biases, activations = zip(*chain.layers, strict=True)
    arrays = [chain.x, *weights, *biases, *others]
    mark = tuple(map(marks.function, activations)), chain.guard, options, switches()
    return repeated(mark, arrays, chain.backend, partial(_formulas, activations), long)


def call_again(
    asked: tuple[Any, ...], arrays: Sequence[Any], call: Any, long: Callable[[], Any]
) -> Any:
    """Return what `long` does with a network: as one program, if it comes again.

    `asked` is what it does, `call` the network (`adapters.jets.NetworkOperands`), `arrays` are all
    that it reads.
    """
    mark = "call", asked, call.mark, switches()
    return repeated(mark, arrays, call.backend, partial(_formulas, call.activations), long)


def jet_again(
    call: Any, grads: Sequence[Any] | None, operands: Sequence[Any], constants: Sequence[Any],
    keep: Any, needs: tuple[str, ...], long: Callable[[], Any],
) -> Any:  # fmt: skip
    """Return what `long` does, a network's jet or its backward, as `again` does.

    `keep` is whether a forward keeps something, or what it kept (`stacks.Kept`).
    """
    arrays, kept = [*operands, *(grads or ())], keep
    if isinstance(keep, Kept):
        kept = _of_kept(keep, arrays)
    known = [marks.content(y) for y in constants]
    if None in known:
        return long()
    asked = "jet" if grads is None else "jet backward", kept, needs, *known
    return call_again(asked, arrays, call, long)
