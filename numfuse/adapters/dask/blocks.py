"""The work of one task of a Dask graph: the public functions on blocks of any kind of array.

A worker imports this module, and nothing of Dask. A task is given the index of its block first: an
error that is raised inside gets the index as a note, and stays the same error.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from numfuse import differentials, functional
from numfuse.activations import get as get_activation
from numfuse.adapters.signatures import SIGNATURES
from numfuse.fused_operations import FusedOperation
from numfuse.gated import layer
from numfuse.problem.forms import Form
from numfuse.problem.operands import accumulator
from numfuse.problem.shapes import sum_to
from numfuse.runtime.dispatch import adapter_of
from numfuse.runtime.threads import at_most


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
def _unpickled(activation: bytes) -> Any:
    """Return an activation or an epilogue, once in a process: reading one takes a millisecond."""
    return pickle.loads(activation)


def _public(operation: str, x: dict[str, Any], task: Task, **options: Any) -> Any:
    """Return what a public function makes of blocks by name; an operand that is absent is None."""
    signature = SIGNATURES[operation]
    options |= {"activation": _unpickled(task.activation), "guard": task.guard}
    options = {name: options[name] for name in signature.options if name in options}
    function = getattr(functional, operation, None) or getattr(differentials, operation)
    operands = {name: x.get(name) for name in signature.arrays}
    return function(**operands, **options, backend=task.backend)


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of (blocks by name, task, options) into the work of one task of a graph."""

    @functools.wraps(function)
    def run(
        index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task, **options: Any
    ) -> Any:
        x = dict(zip(names, map(_single, blocks), strict=True))
        try:
            with at_most(_share(task.threads)):
                found = function(x, task, **options)
            if type(x[names[0]]) is not np.ndarray:
                _pace(x[names[0]])
        except Exception as error:
            error.add_note(f"in block {index} of numfuse.{task.operation}")
            raise
        return found

    return run


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


def _ones(x: Any) -> Any:
    """As `x`, without its memory."""
    return np.broadcast_to(np.ones_like(x, shape=(1,) * x.ndim), x.shape)


def _wide_product(a: Any, b: Any, bias: Any, backend: Any) -> Any:
    """a @ b + bias in the accumulator's dtype."""
    if accumulator("a", a.dtype) == a.dtype:
        return functional.matmul_bias_activation(a, b, bias, backend=backend)
    options: Any = {"backend": backend, "return_pre_activation": True}
    return functional.matmul_bias_activation(a, b, bias, **options)[1]


# --- results ------------------------------------------------------------------------------------


@task
def results(x: dict[str, Any], task: Task, **options: Any) -> Any:
    """A block of the results of the operation, or the tuple of the gradients that are needed."""
    found = _public(task.operation, x, task, **options)
    if "needs" not in options:
        return found
    return tuple(getattr(found, f"d_{name}") for name in options["needs"])


@task
def product(x: dict[str, Any], task: Task) -> Any:
    """A block's part of a @ b from one chunk of K, with an axis of length 1 in front."""
    return _wide_product(x["a"], x["b"], None, task.backend)[None]


@task
def epilogue(x: dict[str, Any], task: Task, to: Any, save_pre: bool = False) -> Any:
    """Return the result of a forward from the complete sum over K."""
    pre = _pre_of_sum(x)
    act = _unpickled(task.activation)
    if "residual" in x:
        out = pre + x["residual"].astype(pre.dtype)
    elif act.is_identity:
        out = pre
    else:
        out = functional.activation_mul(pre, _ones(pre), act, backend=task.backend)
    out = out.astype(to, copy=save_pre and out is pre)
    return (out, pre) if save_pre else out


def _pre_of_sum(x: dict[str, Any]) -> Any:
    pre = x["sum"][0]
    return pre + x["bias"].astype(pre.dtype) if "bias" in x else pre


@lru_cache(maxsize=4096)
def _operation(name: str, form: Form, keep: Any) -> FusedOperation:
    if form.biases:
        return layer(form.kind, keep)
    return FusedOperation(name, form, lambda f: f.over(form.factors), keep, lambda f: f)


@task
def fused(
    x: dict[str, Any], task: Task, form: Form, keep: Any, needs: Any = (), exact: Any = ()
) -> tuple[Any, ...]:
    """Return a block of the results of an epilogue, or its part of the gradients `needs`.

    Those in `exact` are in the accumulator's dtype, because they are summed with other blocks'.
    """
    f, op = _unpickled(task.activation), _operation(task.operation, form, keep)
    dtype = next(block.dtype for name, block in x.items() if not name.startswith("z_"))
    acc_dtype = accumulator("a", dtype)
    if exact and dtype != acc_dtype:
        x = {name: block.astype(acc_dtype) for name, block in x.items()}
    flags = tuple([getattr(task, name) for name in op.flags])
    found = op(tuple(map(x.get, op.operands)), f, flags, needs, None, task.backend)
    if "backward" not in form.kind:
        return found if op.several else (found,)
    made = dict(zip(op.needs, found, strict=True))
    return tuple([made[n].astype(acc_dtype if n in exact else dtype, copy=False) for n in needs])


# --- gradients: a block's part of each -----------------------------------------------------------


@task
def gradients(
    x: dict[str, Any], task: Task, needs: tuple[str, ...], exact: tuple[str, ...]
) -> tuple[Any, ...]:
    """A block's part of the gradients `needs` of a backward or a double backward.

    Those in `exact` are in the accumulator's dtype, because they are summed with other blocks'.
    """
    a, b, bias, grad = x["a"], x["b"], x.get("bias"), x["grad"]
    dtype, operation = a.dtype, task.operation
    acc_dtype, twice = accumulator("a", dtype), "double" in operation
    if not twice:
        operation = "matmul_bias_activation_bwd"
        # grad_pre, made from the whole sum over K: products of halves take it in halves too.
        x["grad"] = grad.astype(dtype, copy=False)
    if dtype != acc_dtype and exact:
        shared = b.ndim == 2 and (bias is None or bias.ndim == 1)
        if shared and not twice and a.shape[:-1] == grad.shape[:-1]:
            return _half_gradients(x, needs, exact, task)
        # Second order, or batches of halves that are summed over in part: in that dtype, all of it.
        x = {name: block.astype(acc_dtype) for name, block in x.items()}
    found = _public(operation, x, task, needs=needs, sum_batch=task.sum_batch)
    return tuple(
        getattr(found, f"d_{name}").astype(acc_dtype if name in exact else dtype, copy=False)
        for name in needs
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
    dtype, backend = a.dtype, task.backend
    wide = x["grad"].astype(accumulator("a", dtype))
    if not _unpickled(task.activation).is_identity:
        pre = x.get("pre_activation")
        if pre is None:
            pre = _wide_product(a, x["b"], x.get("bias"), backend)
        wide = _times_slope(wide, pre, task)
    narrow = wide.astype(dtype)
    found = []
    for name in needs:
        if name == "bias":
            part = _column_sums(wide, x["bias"], task)
        else:
            left, right = (narrow, x["b"].T) if name == "a" else (a.T, narrow)
            multiply = _wide_product if name in exact else functional.matmul_bias_activation
            part = multiply(left, right, None, backend=backend)
            if name == "a":
                part = part.reshape(own_shape)
        found.append(part if name in exact else part.astype(dtype, copy=False))
    return tuple(found)


def _times_slope(grad: Any, pre: Any, task: Task) -> Any:
    """grad_pre of a pre-activation, in the accumulator's dtype."""
    acc_dtype, act = accumulator("grad", grad.dtype), _unpickled(task.activation)
    grad, pre = (x.astype(acc_dtype, copy=False) for x in (grad, pre))
    return functional.activation_mul_bwd(
        grad, pre, _ones(pre), act, needs=("a",), guard=task.guard, backend=task.backend
    ).d_a


def _column_sums(grad_pre: Any, bias: Any, task: Task) -> Any:
    """d_bias of grad_pre in the accumulator's dtype: that of a product with K = 0."""
    grad_pre = grad_pre.astype(accumulator("grad", grad_pre.dtype), copy=False)
    return functional.matmul_bias_activation_bwd(
        grad_pre,
        grad_pre[..., :0],
        grad_pre[..., :0, :],
        bias.astype(grad_pre.dtype),
        needs=("bias",),
        backend=task.backend,
    ).d_bias


@task
def grad_pre(x: dict[str, Any], task: Task) -> Any:
    """A block of grad_pre, of the complete sum over K or a saved pre-activation."""
    pre = x["pre_activation"] if "pre_activation" in x else _pre_of_sum(x)
    return _times_slope(x["grad"], pre, task)


@task
def column_sums(x: dict[str, Any], task: Task, **options: Any) -> Any:
    """A block's part of d_bias, of grad_pre."""
    return (_column_sums(x["grad"], x["bias"], task),)


@task
def residual_sums(x: dict[str, Any], task: Task, kept: tuple[bool, ...], **options: Any) -> Any:
    """A block's part of d_residual: grad summed over all axes but those that `kept` says."""
    grad = x["grad"]
    acc_dtype = accumulator("grad", grad.dtype)
    lengths = grad.shape[grad.ndim - len(kept) :]
    shape = tuple(n if keep else 1 for n, keep in zip(lengths, kept, strict=True))
    return (sum_to(grad, shape, acc_dtype).astype(acc_dtype),)


# --- results taken apart and added up, whatever made them ---------------------------------------


def _single(block: Any) -> Any:
    """The one block in the nested lists that Dask makes along axes which the result lacks."""
    while isinstance(block, list):
        (block,) = block
    return block


def block_index(block_id: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A task's own place in its graph, handed to the block function as an operand."""
    return block_id


def item(block: Any, *, number: int, to: Any = None) -> Any:
    """One of the results of a block."""
    block = _single(block)[number]
    return block if to is None else block.astype(to, copy=False)


def chosen(block: Any, *, numbers: tuple[int, ...]) -> Any:
    """Some of the results of a block."""
    return tuple(block[i] for i in numbers)


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
