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
from numfuse.activations import Activation
from numfuse.activations import get as get_activation
from numfuse.adapters.signatures import SIGNATURES
from numfuse.problem.operands import accumulator
from numfuse.runtime.dispatch import adapter_of
from numfuse.runtime.threads import at_most

__all__ = [
    "NONE",
    "Task",
    "accumulated",
    "activation_of",
    "block_index",
    "chosen",
    "epilogue",
    "item",
    "ones",
    "pre_of_sum",
    "product",
    "public",
    "results",
    "single",
    "task",
    "total",
    "unchanged",
]


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


def public(operation: str, x: dict[str, Any], task: Task, **options: Any) -> Any:
    """Return what a public function makes of blocks by name; an operand that is absent is None."""
    signature = SIGNATURES[operation]
    options |= {"activation": activation_of(task), "guard": task.guard}
    options = {name: options[name] for name in signature.options if name in options}
    function = getattr(functional, operation, None) or getattr(differentials, operation)
    operands = {name: x.get(name) for name in signature.arrays}
    return function(**operands, **options, backend=task.backend)


def activation_of(task: Task) -> Activation:
    """Return the activation that a task brings."""
    return _unpickled(task.activation)


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of (blocks by name, task, options) into the work of one task of a graph."""

    @functools.wraps(function)
    def run(
        index: tuple[int, ...], *blocks: Any, names: tuple[str, ...], task: Task, **options: Any
    ) -> Any:
        x = dict(zip(names, map(single, blocks), strict=True))
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


def ones(x: Any) -> Any:
    """As `x`, without its memory."""
    return np.broadcast_to(np.ones_like(x, shape=(1,) * x.ndim), x.shape)


def accumulated(a: Any, b: Any, backend: Any) -> Any:
    """a @ b in the accumulator's dtype."""
    if accumulator("a", a.dtype) == a.dtype:
        return functional.matmul_bias_activation(a, b, backend=backend)
    return functional.matmul_bias_activation(a, b, backend=backend, return_pre_activation=True)[1]


# --- tasks of one call ------------------------------------------------------------------------


@task
def results(x: dict[str, Any], task: Task, **options: Any) -> Any:
    """A block of the results of the operation: one, or the tuple of those that are needed."""
    found = public(task.operation, x, task, **options)
    if "needs" not in options:
        return found
    parts = tuple(getattr(found, f"d_{name}") for name in options["needs"])
    return parts if len(parts) > 1 else parts[0]


# --- K in several chunks ----------------------------------------------------------------------


@task
def product(x: dict[str, Any], task: Task) -> Any:
    """A block's part of a @ b from one chunk of K, with an axis of length 1 in front."""
    return accumulated(x["a"], x["b"], task.backend)[None]


@task
def epilogue(x: dict[str, Any], task: Task, to: Any, save_pre: bool = False) -> Any:
    """Return the result of a forward from the complete sum over K."""
    pre = pre_of_sum(x)
    act = activation_of(task)
    if "residual" in x:
        out = pre + x["residual"].astype(pre.dtype)
    elif act.is_identity:
        out = pre
    else:
        out = functional.activation_mul(pre, ones(pre), act, backend=task.backend)
    out = out.astype(to, copy=save_pre and out is pre)
    return (out, pre) if save_pre else out


def pre_of_sum(x: dict[str, Any]) -> Any:
    pre = x["sum"][0]
    return pre + x["bias"].astype(pre.dtype) if "bias" in x else pre


# --- results taken apart and added up, whatever made them ---------------------------------------


def single(block: Any) -> Any:
    """The one block in the nested lists that Dask makes along axes which the result lacks."""
    while isinstance(block, list):
        (block,) = block
    return block


def block_index(block_id: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A task's own place in its graph, handed to the block function as an operand."""
    return block_id


def item(block: Any, *, number: int, to: Any = None) -> Any:
    """One of the results of a block."""
    block = single(block)[number]
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
