"""Networks' values and jets of tensors of the CPU that come again, by their memory's addresses.

A call is known by the forms of its tensors; a known one asks for nothing but these, and launches
the program that its first call, on NumPy's arrays over the tensors, left in the backend's replay
(`numfuse.repeats`). So a small network takes what its launch and PyTorch's node take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, empty, empty_like, nn

from numfuse.activations import Activation
from numfuse.activations.table import TABLE
from numfuse.adapters.jets import NetworkOperands
from numfuse.adapters.perceptrons import ValueCall, value_call
from numfuse.adapters.torch.eager import is_small, mode
from numfuse.adapters.torch.forms import Forms
from numfuse.adapters.torch.replayed import form_over, like, loaded, place, reads_places
from numfuse.adapters.torch.saved import SavedStacks
from numfuse.adapters.torch.tensors import (
    TEAM,
    array_over,
    arrays_over,
    autocasts,
    dtypes,
    to_tensor,
    to_tensors,
    watched,
)
from numfuse.chains import Chain
from numfuse.kept import Kept, KeptStacks
from numfuse.repeats import KeptProgram
from numfuse.runtime.fingerprint import form_of
from numfuse.runtime.replay import Replay
from numfuse.runtime.strided import ghost
from numfuse.runtime.threads import share

_Given = Sequence[Tensor | None]
_SEQUENCES = list, tuple, nn.ParameterList


class _How:
    """A key that the core finds a call by, and tensors of the forms of its results."""

    __slots__ = ("_likes", "key")

    def __init__(self, key: tuple[Hashable, ...]) -> None:
        self.key = key
        self._likes: list[Tensor | None] | None = None

    def results(self, found: KeptProgram, beside: Any) -> list[Any]:
        """Return them, of a single element each; a key's program always makes the same forms."""
        if self._likes is None:
            self._likes = [None if y is None else like(y[0], beside.dtype) for y in found.made]
        return self._likes


#: Bytes of a saved tensor of stacks at the most; more come from a pool (`numfuse.kept.KeptStacks`).
_SAVED = 1 << 16


def _kept_stacks(stacks: tuple[int, Any] | None, like: Any) -> tuple[Kept | None, tuple[Any, ...]]:
    """Return room for what a forward keeps, if anything, and that as its launch takes it."""
    if stacks is None:
        return None, ()
    count, dtype = stacks
    if count * dtype.itemsize <= _SAVED:
        saved = SavedStacks(empty(count, dtype=like.dtype))
        return saved, (place(saved.tensor.data_ptr()),)
    kept = KeptStacks(count, dtype)
    return kept, (kept.stacks,)


class KnownNetwork:
    """A network's call on tensors of known forms, which goes as one operation of the core.

    It holds no activation: these come with each call, and their serial numbers are in its key.
    """

    __slots__ = ("_bytes", "_forms", "_keys", "_repeats", "small")

    def __init__(self, operands: _Given, backend: Any) -> None:
        x = operands[0]
        assert x is not None
        dtype = dtypes()[x.dtype]
        #: The bits of an address of which one makes a tensor unaligned.
        self._bytes = dtype.itemsize - 1
        self._forms = tuple([None if y is None else form_over(y, dtype) for y in operands])
        #: Whether a question to PyTorch's engine would take longer than a gradient.
        weights = operands[1 : 1 + len(operands) // 2]
        self.small = is_small(x, max([w for w in weights if w is not None], key=Tensor.numel))
        self._keys: dict[Hashable, _How] = {}
        #: Whether the backend launches programs that take addresses alone.
        replays = type(getattr(backend, "replay", None)) is Replay
        self._repeats = replays and backend.name == "cpu" and reads_places()

    def forward(self, call: ValueCall, x: _Given, keep: bool) -> tuple[Tensor, Any]:
        """Return the value, and what a backward takes as `kept`."""
        how = self._keys.get(keep)
        if how is None:
            how = self._keys[keep] = _How(_key("mlp", call, (keep,), self._forms))
        share.team = TEAM
        try:
            found = self._program(call, how)
            places = None if found is None else self._places(x)
            if found is None or places is None:
                made, kept = call.forward(arrays_over(x), keep)
                return to_tensor(made), kept
            kept, behind = _kept_stacks(found.stacks, x[0])
            (out,) = self._launched(call, how, found, places, x[0], behind)
            return out, kept
        finally:
            share.team = None

    def backward(
        self, call: ValueCall, g: Tensor, x: _Given, needs: Sequence[bool], kept: Any
    ) -> list[Any]:
        """Return the gradient of each operand, None where it is not needed."""
        saved = type(kept) is SavedStacks
        stacks = kept.tensor if saved else getattr(kept, "stacks", None)
        asked = *needs, g.shape, g.stride(), None if stacks is None else stacks.shape
        how = self._keys.get(asked)
        share.team = TEAM
        try:
            if how is None:
                others = [form_over(g, dtypes()[g.dtype])]
                if stacks is not None:
                    others.append(ghost(tuple(stacks.shape), kept.stacks.dtype))
                options = call.groups(needs), True
                how = _How(_key("mlp_bwd", call, options, (*self._forms, *others)))
                if len(self._keys) < 64:  # (of cotangents of any strides)
                    self._keys[asked] = how
            found = self._program(call, how) if stacks is not None or kept is None else None
            places = None if found is None else self._places((*x, g))
            if found is None or places is None:
                made = call.backward(array_over(g), arrays_over(x), needs, kept)
                return to_tensors(made)
            if stacks is not None:
                places.append(place(stacks.data_ptr()) if saved else stacks)
            results = self._launched(call, how, found, places, g)
            return [y if need else None for y, need in zip(results, needs, strict=True)]
        finally:
            share.team = None

    def _launched(
        self, call: NetworkOperands, how: _How, found: KeptProgram, given: Sequence[Any],
        beside: Any, behind: Sequence[Any] = (),
    ) -> list[Any]:  # fmt: skip
        """Return the results of a program, of what its launch takes before and behind these."""
        results = [None if y is None else empty_like(y) for y in how.results(found, beside)]
        made = [None if y is None else place(y.data_ptr()) for y in results]
        call.backend.launch(found.program, (*found.constants, *given, *made, *behind))
        return results

    def _program(self, call: NetworkOperands, how: _How) -> KeptProgram | None:
        """Return the program of a call that came before, if addresses are all it takes."""
        found = call.backend.replay.find(how.key) if self._repeats else None
        if type(found) is not KeptProgram or found.program.zeroed or found.program.sums:
            return None
        if found.varies is not None and found.varies() != found.variant:
            return None
        return found

    def _places(self, x: _Given) -> list[Any] | None:
        """Return the operands as a launch takes them; None where memory is not what it should."""
        found: list[Any] = []
        bits = 0
        for y in x:
            if y is None:
                found.append(None)
                continue
            at = y.data_ptr()
            if not at or y.is_neg():  # its memory has not its values
                return None
            bits |= at
            found.append(place(at))
        return None if bits & self._bytes else found


class KnownJet(KnownNetwork):
    """A network's jet on tensors of known forms, with constants that are always the same."""

    __slots__ = ("_constants",)

    def __init__(self, operands: _Given, backend: Any, constants: tuple[Hashable, ...]) -> None:
        super().__init__(operands, backend)
        self._constants = constants

    def _without_stacks(
        self, call: NetworkOperands, how: _How, x: _Given, beside: Any
    ) -> list[Any] | None:
        """Return the results of a call that came before and keeps nothing; None of another one."""
        found = self._program(call, how)
        places = None if found is None or found.stacks is not None else self._places(x)
        if found is None or places is None:
            return None
        share.team = TEAM
        try:
            return self._launched(call, how, found, places, beside)
        finally:
            share.team = None

    def jet(self, call: NetworkOperands, x: _Given) -> list[Any] | None:
        """Return the results, if such a call came before and keeps nothing."""
        how = self._keys.get("jet")
        if how is None:
            options = call.guard, *self._constants
            how = self._keys["jet"] = _How(_key("mlp_jet", call, options, self._forms))
        return self._without_stacks(call, how, x, x[0])

    def jet_backward(
        self, call: NetworkOperands, gs: _Given, x: _Given, needs: Sequence[bool]
    ) -> list[Any] | None:
        """Return the gradient of each operand, None where it is not needed, as `jet` does."""
        asked = *needs, *[None if g is None else (g.shape, g.stride()) for g in gs]
        how = self._keys.get(asked)
        if how is None:
            dtype = dtypes()
            others = [None if g is None else form_over(g, dtype[g.dtype]) for g in gs]
            options = call.groups(needs), call.guard, *self._constants
            how = _How(_key("mlp_jet_bwd", call, options, (*self._forms, *others)))
            if len(self._keys) < 64:  # (of cotangents of any strides)
                self._keys[asked] = how
        found = self._without_stacks(call, how, (*x, *gs), x[0])
        if found is None:
            return None
        return [y if need else None for y, need in zip(found, needs, strict=True)]


#: By backend, activations and forms of tensors; False of a network that goes by layers.
_KNOWN: Replay[Any] = Replay(1024, 0)
#: The latest of these, and what `mode` says of them.
_LATEST = Forms()


def flat_call(
    x: Tensor, weights: Any, biases: Any, activation: Any, final: Any
) -> tuple[list[Any], tuple[Activation, ...]] | None:
    """Return a call's operands, None for a bias that is not there, and each layer's activation.

    None: it is no call in the usual form.
    """
    if type(weights) not in _SEQUENCES:
        return None
    count = len(weights)
    if biases is None:
        biases = (None,) * count
    elif type(biases) not in _SEQUENCES or len(biases) != count:
        return None
    hidden = activation
    if type(activation) is str or type(activation) is Activation:
        hidden = (activation,) * (count - 1)
    elif type(activation) not in (list, tuple) or len(activation) != count - 1:
        return None
    made: list[Any] = [TABLE.get(f) if type(f) is str else f for f in (*hidden, final)]
    for f in made:
        if type(f) is not Activation:
            return None
    return [x, *weights, *biases], tuple(made)


def again(
    x: Tensor, weights: Any, biases: Any, activation: Any, final: Any, backend: Any,
    node: Callable[..., Tensor],
) -> Tensor | None:  # fmt: skip
    """Return a network's value, with `node` where gradients are recorded.

    None: it goes another way, which also says what is wrong with a call.
    """
    if torch.compiler.is_compiling() or not x.is_cpu:
        return None
    given = flat_call(x, weights, biases, activation, final)
    if given is None:
        return None
    operands, made = given
    chosen = loaded(backend)
    if chosen is None or watched() or autocasts(x):  # (None: nobody has loaded it yet)
        return None
    call = ValueCall(made, True, chosen)
    asked = chosen, *call.mark
    found = _LATEST.find(asked, operands)
    if found is None:
        how = mode(operands)
        if not how:
            return None
        form: list[Any] = [*asked]
        for y in operands:
            if y is None:
                form.append(None)
            else:
                form += y.shape, y.stride(), y.dtype
        known = _KNOWN.find(tuple(form))
        if known is None:
            checked = Chain("mlp", x, weights, biases, activation, final, True, chosen)
            known = value_call(checked) is not None and KnownNetwork(operands, chosen)
            _KNOWN.keep(tuple(form), known)
        found = how, known
        _LATEST.keep(asked, operands, lambda: found)
    how, known = found
    if not known:
        return None
    if how == 2:
        return node(*operands, call, known)
    value: Tensor = known.forward(call, operands, False)[0]
    return value


def _key(
    name: str, call: NetworkOperands, options: Any, forms: tuple[Any, ...]
) -> tuple[Hashable, ...]:
    """Return what the core finds a call by (`numfuse.repeats.again`)."""
    *hidden, last = [f.serial for f in call.activations]
    return name, len(hidden) + 1, tuple, 0, tuple(hidden), last, options, form_of(forms)
