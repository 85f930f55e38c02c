"""Layers one after another by their own operations, on whatever arrays these take.

So a network of tensors or tracers is differentiated through as its layers are, and a backend that
has no whole networks runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.differentials import matmul_bias_activation_double_bwd, matmul_bias_activation_jvp
from numfuse.functional import BackendLike, matmul_bias_activation, matmul_bias_activation_bwd
from numfuse.fusion import elementwise
from numfuse.kept import Kept
from numfuse.networks import listed
from numfuse.perceptron import Network, added, rounded, sequences
from numfuse.problem.operands import array_of, as_plain, check_group, same_dtype
from numfuse.problem.results import NetworkGradients, NetworkSecondGradients
from numfuse.runtime.dispatch import adapter_for

NEEDS = ("x", "weights", "biases")
SECOND_NEEDS = ("grad", *NEEDS)
#: What the layers' operations call these.
_LAYER = {"x": "a", "weights": "b", "biases": "bias"}


class Chain:
    """The operands of a call, checked: as a :class:`Network` where they are NumPy's."""

    def __init__(
        self, name: str, x: Any, weights: Any, biases: Any, activation: Any, final: Any,
        guard: bool, backend: BackendLike,
    ) -> None:  # fmt: skip
        weights, biases = listed(weights), listed(biases)
        w, b, activations = sequences(weights, biases, activation, final)
        self.guard, self.backend, self.net = bool(guard), backend, None
        self.x, self.layers = x, list(zip(w, b, activations, strict=True))
        named = {"x": x} | {f"weights[{i}]": y for i, y in enumerate(w)}
        named |= {f"biases[{i}]": y for i, y in enumerate(b) if y is not None}
        self.adapter = adapter_for(**named)
        self.given = weights, biases, (activation, final, bool(guard), backend)
        #: What an adapter runs a network with as one operation to differentiate, where it can.
        self.whole = getattr(self.adapter, "perceptron", None)
        if self.adapter is None:
            width = (0, *getattr(x, "shape", ()))[-1]
            none = np.zeros((0, width)), np.zeros((0, 0))
            how = activation, *none, final, guard, backend
            self.net = net = Network(name, x, weights, biases, *how)
            self.x, self.layers = net.x, net.layers

    @classmethod
    def checked(
        cls, x: Any, weights: Any, biases: Any, activation: Any, final: Any, guard: bool,
        backend: BackendLike,
    ) -> Chain:  # fmt: skip
        """Return the chain of NumPy's arrays of a form that has passed all checks."""
        found = cls.__new__(cls)
        layers = zip(*sequences(weights, biases, activation, final), strict=True)
        found.x, found.layers, found.guard, found.backend = x, list(layers), guard, backend
        found.net = found.adapter = found.whole = None
        return found

    def is_as_given(self, x: Any, weights: Any, biases: Any) -> bool:
        """Return whether the layers have the very arrays of a call, in lists or tuples."""
        if type(weights) not in (list, tuple) or self.x is not x:
            return False
        biases = (None,) * len(weights) if biases is None else biases
        pairs = zip(self.layers, weights, biases, strict=True)
        return all(w is own and b is bias for (w, b, _), own, bias in pairs)

    def cast(self, name: str, x: Any, like: Any = None) -> Any:
        """Return a cotangent or a tangent as the layers take it; `like` has the shape it needs."""
        if x is None:
            return None
        x = x if self.net is None else as_plain(name, array_of(x))
        if like is not None and tuple(x.shape) != tuple(like.shape):
            raise ValueError(f"{name} must have shape {tuple(like.shape)}, got {tuple(x.shape)}")
        if self.net is None:
            return x
        same_dtype({**self.net.given, name: x})
        return x.astype(self.net.acc, copy=False)

    def group(self, name: str, given: Sequence[Any] | None, index: int) -> list[Any]:
        """Return a cotangent or a tangent for each layer's weights (0) or bias (1), or None."""
        count = len(self.layers)
        given = listed(given)
        if given is None:
            return [None] * count
        check_group(name, given, count)
        found = []
        for i, (y, layer) in enumerate(zip(given, self.layers, strict=True)):
            if y is not None and layer[index] is None:
                raise ValueError(f"{name}[{i}] must be None where biases[{i}] is")
            found.append(self.cast(f"{name}[{i}]", y, layer[index]))
        return found

    def rounded(self, x: Any) -> Any:
        """Return a result in the dtype of the operands."""
        return x if self.net is None else rounded(x, self.net.dtype)

    def at_once(self, grad: Any, needs: Sequence[str], out: Any = None, keep: bool = False) -> Any:
        """Return what an adapter makes of all layers at once; None where it does not.

        It keeps nothing: where that is asked for, its backward must be one, too.
        """
        serve = getattr(self.adapter, "perceptron_at_once", None)
        whole = getattr(self.adapter, "perceptron_is_whole", None) if keep else None
        if whole is not None and not whole(self.x, *self.given):
            return None
        return None if serve is None else serve(grad, self.x, *self.given, needs, out)

    def along(
        self, x_dot: Any, groups: Iterable[Sequence[Any]], grad: Any = None,
        needs: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        """Return what an adapter makes at once of a tangent of x alone; None where it does not.

        That is the value and its tangent or, with a cotangent of that, the gradients.
        """
        serve = getattr(self.adapter, "perceptron_along", None)
        if serve is None or x_dot is None or any(y is not None for group in groups for y in group):
            return None
        return serve(x_dot, grad, self.x, *self.given, needs)

    def again(
        self, others: Iterable[Any], options: tuple[Any, ...], long: Callable[[], Any]
    ) -> Any:
        """Return what `long` does; a device's adapter may run what it did before, as one program.

        `others` are the arrays beside the chain's own, `options` all else that `long` depends on.
        """
        found = getattr(self.adapter, "repeated", None)
        return long() if found is None else found(self, others, options, long)

    # --- layer by layer -------------------------------------------------------------------------
    def run(self, kept: Kept | None = None, out: Any = None) -> Any:
        """Return the value; what a backward takes goes to `kept`."""
        if self.whole is not None and kept is None and out is None:
            found = self.whole(self)
            if found is not None:
                return found
        return self.one_by_one(kept, out)

    def one_by_one(self, kept: Kept | None = None, out: Any = None) -> Any:
        """Return the value as `run`, by the layers' operations."""
        h, last = self.x, len(self.layers) - 1
        for i, (w, bias, f) in enumerate(self.layers):
            given: Any = {"out": out if i == last else None, "backend": self.backend}
            if kept is None:
                h = matmul_bias_activation(h, w, bias, f, **given)
                continue
            kept.inputs.append(h)
            h, pre = matmul_bias_activation(h, w, bias, f, return_pre_activation=True, **given)
            kept.sums.append(pre)
        return h

    def _options(self, needs: Iterable[str], pre: Any = None) -> dict[str, Any]:
        found = {"guard": self.guard, "backend": self.backend, "needs": tuple(needs)}
        return found if pre is None else found | {"pre_activation": pre}

    def back(self, grad: Any, kept: Kept, wanted: Sequence[str]) -> NetworkGradients:
        """Return the gradients by what a forward kept."""
        groups: list[list[Any]] = [[], []]
        for i in range(len(self.layers) - 1, -1, -1):
            w, bias, f = self.layers[i]
            needs = [_LAYER[x] for x in wanted if x != "x"] + ["a"] * (i > 0 or "x" in wanted)
            how = self._options(needs, kept.sums[i])
            found = matmul_bias_activation_bwd(grad, kept.inputs[i], w, bias, f, **how)
            grad = found.d_a
            for group, d in zip(groups, (found.d_b, found.d_bias), strict=True):
                group.insert(0, d)
        return NetworkGradients(*only((grad, *map(tuple, groups)), NEEDS, wanted))

    def tangents(
        self, x_dot: Any, weights_dot: Sequence[Any], biases_dot: Sequence[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the value and the tangent before each layer, then those of the result."""
        h, t, last = self.x, x_dot, len(self.layers) - 1
        for i, (w, bias, f) in enumerate(self.layers):
            yield h, t
            moved = t, weights_dot[i], biases_dot[i]
            if i < last and all(y is None for y in moved):
                h = matmul_bias_activation(h, w, bias, f, backend=self.backend)
                continue
            how: Any = {"guard": self.guard, "backend": self.backend}
            h, t = matmul_bias_activation_jvp(h, w, bias, *moved, f, **how)
        yield h, t

    def twice(
        self, u: Any, v: Sequence[Any], w: Sequence[Any], grad: Any, wanted: Sequence[str]
    ) -> NetworkSecondGradients:
        """Return the gradients of <grad, the tangent along u, v and w>: by `grad` that tangent."""
        *before, (_, moved) = self.tangents(u, v, w)
        groups: list[list[Any]] = [[], []]
        second = None  # the gradient by a layer's value; `grad` is that by its tangent
        by_layers = [_LAYER[x] for x in wanted if x in ("weights", "biases")]
        for i in range(len(self.layers) - 1, -1, -1):
            needs = by_layers + ["a"] * (i > 0 or "x" in wanted)
            if wanted == ("grad",):
                break
            (a, t), (b, bias, f) = before[i], self.layers[i]
            made: list[Any] = [None, None, None]
            if second is None or any(y is not None for y in (t, v[i], w[i])):
                operands = t, v[i], w[i], grad, a, b, bias, f
                found: Any = matmul_bias_activation_double_bwd(*operands, **self._options(needs))
                made = [found.d_a, found.d_b, found.d_bias]
            if second is not None:
                found = matmul_bias_activation_bwd(second, a, b, bias, f, **self._options(needs))
                made = list(map(_added, made, found))
            if t is not None and i > 0:  # what is below moves
                alone = self._options(("a",))
                grad = matmul_bias_activation_bwd(grad, a, b, bias, f, **alone).d_a
            second = made[0]
            for group, d in zip(groups, made[1:], strict=True):
                group.insert(0, d)
        every = moved, second, *map(tuple, groups)
        return NetworkSecondGradients(*only(every, SECOND_NEEDS, wanted))


def _added(x: Any, y: Any) -> Any:
    """Return the sum of two arrays, either of which may be None: zero."""
    if isinstance(x, ndarray) and isinstance(y, ndarray):
        return added(x, y)
    if x is None or y is None:
        return y if x is None else x
    # (numfuse's own arrays of a device have no arithmetic; a GPU's are added by a call that can be
    # part of a series)
    plain = hasattr(x, "__add__") and not (getattr(x, "is_cuda", False) or hasattr(x, "toDlpack"))
    return x + y if plain else elementwise(_sum, x, y)


def _sum(x: Any, y: Any) -> Any:
    return x + y


def only(every: Iterable[Any], names: Iterable[str], wanted: Sequence[str]) -> Iterator[Any]:
    """Yield the results that are wanted, and None for the others."""
    for name, y in zip(names, every, strict=True):
        yield y if name in wanted else None
