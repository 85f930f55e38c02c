"""The tasks of a product's backward and double backward: a block's part of each gradient."""

from __future__ import annotations

from typing import Any

from numfuse import functional
from numfuse.activations import Activation
from numfuse.adapters.dask import blocks
from numfuse.adapters.dask.blocks import Task, activation_of, public, task
from numfuse.problem.operands import accumulator
from numfuse.problem.shapes import sum_to

__all__ = ["backward", "column_sums", "double_backward", "grad_pre", "residual_sums"]


@task
def backward(
    x: dict[str, Any], task: Task, needs: tuple[str, ...], exact: tuple[str, ...]
) -> tuple[Any, ...]:
    """A block's part of the gradients `needs`.

    Those in `exact` are in the accumulator's dtype, because they are summed with other blocks'.
    """
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
    found = public("matmul_bias_activation_bwd", x, task, needs=needs, sum_batch=task.sum_batch)
    return _rounded(found, needs, exact, dtype)


@task
def double_backward(
    x: dict[str, Any], task: Task, needs: tuple[str, ...], exact: tuple[str, ...]
) -> tuple[Any, ...]:
    """As `backward`, of the double backward."""
    dtype = x["a"].dtype
    if exact:  # a sum over blocks is not rounded to a half: nor is what they add
        acc_dtype = accumulator("a", dtype)
        x = {name: block.astype(acc_dtype, copy=False) for name, block in x.items()}
    return _rounded(public(task.operation, x, task, needs=needs), needs, exact, dtype)


def _rounded(
    found: Any, needs: tuple[str, ...], exact: tuple[str, ...], dtype: Any
) -> tuple[Any, ...]:
    """Return the gradients `needs` in their dtypes."""
    acc_dtype = accumulator("a", dtype)
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
    dtype = a.dtype
    wide = x["grad"].astype(accumulator("a", dtype))
    act = activation_of(task)
    if not act.is_identity:
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
                part = blocks.accumulated(left, right, task.backend)
            else:
                part = functional.matmul_bias_activation(left, right, backend=task.backend)
            if name == "a":
                part = part.reshape(own_shape)
        found.append(part if name in exact else part.astype(dtype, copy=False))
    return tuple(found)


def _times_slope(grad: Any, pre: Any, act: Activation, task: Task) -> Any:
    """grad_pre of a pre-activation, in the accumulator's dtype."""
    return functional.activation_mul_bwd(
        grad, pre, blocks.ones(pre), act, needs=("a",), guard=task.guard, backend=task.backend
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


@task
def grad_pre(x: dict[str, Any], task: Task, acc_dtype: Any) -> Any:
    """A block of grad_pre, of the complete sum over K or a saved pre-activation."""
    pre = x["pre_activation"] if "pre_activation" in x else blocks.pre_of_sum(x)
    grad, pre = (part.astype(acc_dtype, copy=False) for part in (x["grad"], pre))
    return _times_slope(grad, pre, activation_of(task), task)


@task
def column_sums(x: dict[str, Any], task: Task, acc_dtype: Any) -> Any:
    """A block's part of d_bias, of grad_pre."""
    return (_column_sums(x["grad"].astype(acc_dtype, copy=False), x["bias"], task),)


@task
def residual_sums(x: dict[str, Any], task: Task, kept: tuple[bool, ...], acc_dtype: Any) -> Any:
    """A block's part of d_residual: grad summed over all axes but those that `kept` says."""
    grad = x["grad"]
    lengths = grad.shape[grad.ndim - len(kept) :]
    shape = tuple(n if keep else 1 for n, keep in zip(lengths, kept, strict=True))
    return (sum_to(grad, shape, acc_dtype).astype(acc_dtype),)
