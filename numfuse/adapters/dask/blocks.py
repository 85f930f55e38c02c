"""The work of one task of a Dask graph: the public functions on blocks of any kind of array.

A worker imports this module, and nothing of Dask. Every function takes the index of its block
first: an error that is raised inside gets the index as a note, and stays the same error.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from numfuse import differentials, functional
from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.expr import SYMBOL
from numfuse.problem.operands import accumulator
from numfuse.problem.shapes import sum_to
from numfuse.runtime.dispatch import adapter_of
from numfuse.runtime.threads import at_most

__all__ = ["Task"]


class Task(NamedTuple):
    """The description that all tasks of an operation share."""

    #: The public function, for messages.
    operation: str
    #: The pickled Activation: its formula travels to workers that have never heard of it.
    activation: bytes
    #: A name, a backend object or None.
    backend: Any
    #: Threads that the task may use.
    threads: int
    guard: bool = True
    sum_batch: bool = False
    #: Whether the backend is that of a `use_backend` around the call.
    implied: bool = False

    def on(self, kind: type) -> Task:
        """Return this description for a kind of blocks: only NumPy's keep an implied backend."""
        if self.implied and kind is not np.ndarray:
            return self._replace(backend=None, implied=False)
        return self._replace(implied=False)


#: The identity, pickled.
NONE = pickle.dumps(get_activation("none"))


@lru_cache(maxsize=64)
def _unpickled(activation: bytes) -> Activation:
    # Once in a process: reading a formula takes a millisecond.
    found: Activation = pickle.loads(activation)
    return found


def is_identity(activation: Activation) -> bool:
    """Whether the value is x itself: then the pre-activation is not needed for any gradient."""
    return activation.trace(0) is SYMBOL


@contextmanager
def _block(task: Task, index: tuple[int, ...], block: Any) -> Iterator[None]:
    """Around what a task does with `block` (and others): its threads, and whose error it is."""
    try:
        with at_most(_share(task.threads)):
            yield
        if type(block) is not np.ndarray:
            _pace(block)
    except Exception as error:
        error.add_note(f"in block {index} of numfuse.{task.operation}")
        raise


def _pace(block: Any) -> None:
    """Let a task last about as long as its kernels do, where a device runs them later.

    Dask would take tasks that return at once for free: all blocks would be given to one worker, and
    a part that another worker waits for be copied behind all kernels that are queued.
    """
    try:
        pace = getattr(adapter_of(block=block), "pace", None)
    except TypeError:  # of a kind that has none
        return
    if pace is not None:
        pace(block)


def _share(threads: int) -> int:
    """The threads of a task: what was asked for, at most its share of a worker's cores."""
    distributed = sys.modules.get("distributed")
    if threads == 1 or distributed is None:
        return threads
    try:
        worker = distributed.get_worker()
    except ValueError:
        return threads  # another scheduler's task
    import numba

    cores = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    return max(1, min(threads, cores // worker.state.nthreads))


def single(block: Any) -> Any:
    """The one block in the nested lists that Dask makes along axes which the result lacks."""
    while isinstance(block, list):
        (block,) = block
    return block


def _ones(x: Any) -> Any:
    """As `x`, without its memory."""
    return np.broadcast_to(np.ones_like(x, shape=(1,) * x.ndim), x.shape)


def _accumulated(a: Any, b: Any, backend: Any) -> Any:
    """a @ b in the accumulator's dtype."""
    if accumulator("a", a.dtype) == a.dtype:
        return functional.matmul_bias_activation(a, b, backend=backend)
    return functional.matmul_bias_activation(a, b, backend=backend, return_pre_activation=True)[1]


# --- forward --------------------------------------------------------------------------------------


def forward(
    index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task, save_pre: bool = False
) -> Any:
    """A block of the result, or the pair of it and of the pre-activation."""
    x = dict(zip(names, map(single, blocks), strict=True))
    with _block(task, index, x["a"]):
        if "residual" in x:
            return functional.matmul_bias_residual(
                x["a"], x["b"], x.get("bias"), x["residual"], backend=task.backend
            )
        return functional.matmul_bias_activation(
            x["a"],
            x["b"],
            x.get("bias"),
            _unpickled(task.activation),
            return_pre_activation=save_pre,
            backend=task.backend,
        )  # type: ignore[call-overload]


def product(index: tuple[int, ...], a: Any, b: Any, *, task: Task) -> Any:
    """A block's part of a @ b from one chunk of K, with an axis of length 1 in front."""
    with _block(task, index, single(a)):
        return _accumulated(single(a), single(b), task.backend)[None]


def epilogue(
    index: tuple[int, ...],
    *blocks: Any,
    names: tuple[str, ...],
    task: Task,
    to: Any,
    save_pre: bool = False,
) -> Any:
    """Return the result of `forward` from the complete sum over K."""
    x = dict(zip(names, map(single, blocks), strict=True))
    with _block(task, index, x["sum"]):
        pre = _pre_of_sum(x)
        act = _unpickled(task.activation)
        if "residual" in x:
            out = pre + x["residual"].astype(pre.dtype)
        elif is_identity(act):
            out = pre
        else:
            out = functional.activation_mul(pre, _ones(pre), act, backend=task.backend)
        out = out.astype(to, copy=save_pre and out is pre)
        return (out, pre) if save_pre else out


def _pre_of_sum(x: dict[str, Any]) -> Any:
    pre = x["sum"][0]
    return pre + x["bias"].astype(pre.dtype) if "bias" in x else pre


# --- backward -------------------------------------------------------------------------------------


def backward(
    index: tuple[int, ...],
    *blocks: Any,
    names: tuple[str, ...],
    needs: tuple[str, ...],
    exact: tuple[str, ...],
    task: Task,
) -> Any:
    """A block's part of the gradients `needs`: a tuple, or the array where it is only one.

    Those in `exact` are in the accumulator's dtype, because they are summed with other blocks'.
    """
    x = dict(zip(names, map(single, blocks), strict=True))
    with _block(task, index, x["grad"]):
        found = _gradients(x, needs, exact, task)
    return found[0] if len(needs) == 1 else found


def _gradients(
    x: dict[str, Any], needs: tuple[str, ...], exact: tuple[str, ...], task: Task
) -> tuple[Any, ...]:
    a, b, bias = x["a"], x["b"], x.get("bias")
    dtype = a.dtype
    acc_dtype = accumulator("a", dtype)
    if x["grad"].dtype != dtype:
        # grad_pre, made from the whole sum over K: products of halves take it in halves too.
        x["grad"] = x["grad"].astype(dtype)
    if dtype != acc_dtype and exact:
        shared = b.ndim == 2 and (bias is None or bias.ndim == 1)
        if shared and a.shape[:-1] == x["grad"].shape[:-1]:
            return _half_gradients(x, needs, exact, task)
        # Batches of halves that are summed over in part: the same in the accumulator's dtype.
        x = {name: block.astype(acc_dtype) for name, block in x.items()}
    found = functional.matmul_bias_activation_bwd(
        x["grad"],
        x["a"],
        x["b"],
        x.get("bias"),
        _unpickled(task.activation),
        pre_activation=x.get("pre_activation"),
        needs=needs,
        sum_batch=task.sum_batch,
        guard=task.guard,
        backend=task.backend,
    )
    parts = {"a": found.d_a, "b": found.d_b, "bias": found.d_bias}
    return tuple(
        parts[name].astype(acc_dtype if name in exact else dtype, copy=False) for name in needs
    )


def _half_gradients(
    x: dict[str, Any], needs: tuple[str, ...], exact: tuple[str, ...], task: Task
) -> tuple[Any, ...]:
    """The gradients of half types with sums that are not rounded to halves.

    Products read grad_pre in the storage dtype, so that they run on the units for halves.
    """
    n, own_shape = x["b"].shape[-1], x["a"].shape
    a = x["a"].reshape(-1, x["a"].shape[-1])
    x = x | {"a": a, "grad": x["grad"].reshape(-1, n)}
    if "pre_activation" in x:
        x["pre_activation"] = x["pre_activation"].reshape(-1, n)
    dtype = a.dtype
    wide = x["grad"].astype(accumulator("a", dtype))
    act = _unpickled(task.activation)
    if not is_identity(act):
        pre = x.get("pre_activation")
        if pre is None:
            pre = functional.matmul_bias_activation(
                a, x["b"], x.get("bias"), backend=task.backend, return_pre_activation=True
            )[1]
        wide = _times_slope(wide, pre.astype(wide.dtype, copy=False), act, task)
    narrow = wide.astype(dtype)
    found = []
    for name in needs:
        if name == "bias":
            part = _column_sums(wide, x["bias"], task)
        else:
            left, right = (narrow, x["b"].T) if name == "a" else (a.T, narrow)
            if name in exact:
                part = _accumulated(left, right, task.backend)
            else:
                part = functional.matmul_bias_activation(left, right, backend=task.backend)
            if name == "a":
                part = part.reshape(own_shape)
        found.append(part if name in exact else part.astype(dtype, copy=False))
    return tuple(found)


def _times_slope(grad: Any, pre: Any, act: Activation, task: Task) -> Any:
    """grad_pre = grad * act'(pre), in the accumulator's dtype."""
    return functional.activation_mul_bwd(
        grad, pre, _ones(pre), act, needs=("a",), guard=task.guard, backend=task.backend
    ).d_a


def _column_sums(grad_pre: Any, bias: Any, task: Task) -> Any:
    """d_bias of grad_pre in its dtype: that of a product with K = 0."""
    return functional.matmul_bias_activation_bwd(
        grad_pre,
        grad_pre[..., :0],
        grad_pre[..., :0, :],
        bias.astype(grad_pre.dtype),
        needs=("bias",),
        backend=task.backend,
    ).d_bias


def grad_pre(
    index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task, acc_dtype: Any
) -> Any:
    """A block of grad_pre, of the complete sum over K or a saved pre-activation."""
    x = dict(zip(names, map(single, blocks), strict=True))
    with _block(task, index, x["grad"]):
        pre = x["pre_activation"] if "pre_activation" in x else _pre_of_sum(x)
        grad = x["grad"].astype(acc_dtype, copy=False)
        pre = pre.astype(acc_dtype, copy=False)
        return _times_slope(grad, pre, _unpickled(task.activation), task)


def column_sums(index: tuple[int, ...], grad: Any, bias: Any, *, task: Task, acc_dtype: Any) -> Any:
    """A block's part of d_bias, of grad_pre."""
    with _block(task, index, single(grad)):
        return _column_sums(single(grad).astype(acc_dtype, copy=False), single(bias), task)


def residual_sums(
    index: tuple[int, ...], grad: Any, *, kept: tuple[bool, ...], task: Task, acc_dtype: Any
) -> Any:
    """A block's part of d_residual: grad summed over all axes but those that `kept` says."""
    with _block(task, index, single(grad)):
        grad = single(grad)
        lengths = grad.shape[grad.ndim - len(kept) :]
        shape = tuple(n if keep else 1 for n, keep in zip(lengths, kept, strict=True))
        return sum_to(grad, shape, acc_dtype).astype(acc_dtype)


# --- second order and forward mode ----------------------------------------------------------------


def double_backward(
    index: tuple[int, ...],
    *blocks: Any,
    names: tuple[str, ...],
    needs: tuple[str, ...],
    exact: tuple[str, ...],
    task: Task,
) -> Any:
    """As `backward`, of the double backward."""
    x = dict(zip(names, map(single, blocks), strict=True))
    with _block(task, index, x["a"]):
        dtype = x["a"].dtype
        acc_dtype = accumulator("a", dtype)
        if exact:  # a sum over blocks is not rounded to a half: nor is what they add
            x = {name: block.astype(acc_dtype, copy=False) for name, block in x.items()}
        if "residual" in x:
            found: Any = differentials.matmul_bias_residual_double_bwd(
                x.get("u"),
                x.get("v"),
                x.get("w"),
                x.get("z"),
                x["grad"],
                x["a"],
                x["b"],
                x.get("bias"),
                x["residual"],
                needs=needs,
                guard=task.guard,
                backend=task.backend,
            )
        else:
            found = differentials.matmul_bias_activation_double_bwd(
                x.get("u"),
                x.get("v"),
                x.get("w"),
                x["grad"],
                x["a"],
                x["b"],
                x.get("bias"),
                _unpickled(task.activation),
                needs=needs,
                guard=task.guard,
                backend=task.backend,
                pre_activation=x.get("pre_activation"),
            )
        parts = tuple(
            getattr(found, f"d_{name}").astype(acc_dtype if name in exact else dtype, copy=False)
            for name in needs
        )
    return parts[0] if len(needs) == 1 else parts


def tangent(index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task) -> Any:
    """The pair of a block of the result and of its derivative."""
    x = dict(zip(names, map(single, blocks), strict=True))
    a_dot, b_dot, bias_dot = (x.get(f"{name}_dot") for name in ("a", "b", "bias"))
    with _block(task, index, x["a"]):
        if "residual" in x:
            return differentials.matmul_bias_residual_jvp(
                x["a"],
                x["b"],
                x.get("bias"),
                x["residual"],
                a_dot,
                b_dot,
                bias_dot,
                x.get("residual_dot"),
                backend=task.backend,
            )
        return differentials.matmul_bias_activation_jvp(
            x["a"],
            x["b"],
            x.get("bias"),
            a_dot,
            b_dot,
            bias_dot,
            _unpickled(task.activation),
            guard=task.guard,
            backend=task.backend,
        )


# --- gated ----------------------------------------------------------------------------------------


def gated(index: tuple[int, ...], a: Any, b: Any, *, task: Task) -> Any:
    with _block(task, index, a):
        act = _unpickled(task.activation)
        return functional.activation_mul(a, b, act, backend=task.backend)


def gated_backward(
    index: tuple[int, ...], grad: Any, a: Any, b: Any, *, needs: tuple[str, ...], task: Task
) -> Any:
    with _block(task, index, a):
        found = functional.activation_mul_bwd(
            grad,
            a,
            b,
            _unpickled(task.activation),
            needs=needs,
            guard=task.guard,
            backend=task.backend,
        )
    return found if len(needs) > 1 else getattr(found, f"d_{needs[0]}")


def gated_double_backward(
    index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], needs: tuple[str, ...], task: Task
) -> Any:
    x = dict(zip(names, blocks, strict=True))
    with _block(task, index, x["a"]):
        found = differentials.activation_mul_double_bwd(
            x.get("u"),
            x.get("v"),
            x["grad"],
            x["a"],
            x["b"],
            _unpickled(task.activation),
            needs=needs,
            guard=task.guard,
            backend=task.backend,
        )
    parts = tuple(getattr(found, f"d_{name}") for name in needs)
    return parts if len(needs) > 1 else parts[0]


def gated_tangent(index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task) -> Any:
    x = dict(zip(names, blocks, strict=True))
    with _block(task, index, x["a"]):
        return differentials.activation_mul_jvp(
            x["a"],
            x["b"],
            x.get("a_dot"),
            x.get("b_dot"),
            _unpickled(task.activation),
            guard=task.guard,
            backend=task.backend,
        )


# --- sums over blocks -----------------------------------------------------------------------------


def block_index(block_id: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A task's own place in its graph, handed to the block function as an operand."""
    return block_id


def item(block: Any, *, number: int | None, to: Any = None) -> Any:
    """One of the results of a block."""
    block = single(block)
    block = block if number is None else block[number]
    return block if to is None else block.astype(to, copy=False)


def chosen(block: Any, *, numbers: tuple[int, ...]) -> Any:
    """Some of the results of a block: a tuple, or the array where it is only one."""
    return tuple(block[i] for i in numbers) if len(numbers) > 1 else block[numbers[0]]


def unchanged(block: Any, axis: Any = None, keepdims: Any = None) -> Any:
    return block


def total(blocks: Any, axis: Any = None, keepdims: Any = None) -> Any:
    """The sum of some blocks, or tuples of them, in their order, whichever was there first."""
    flat = list(_flat(blocks))
    if isinstance(flat[0], tuple):
        return tuple(_added(parts) for parts in zip(*flat, strict=True))
    return _added(flat)


def _added(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    result = parts[0] + parts[1]
    for part in parts[2:]:
        result += part
    return result


def _flat(blocks: Any) -> Iterator[Any]:
    if isinstance(blocks, list):
        for block in blocks:
            yield from _flat(block)
    else:
        yield blocks
