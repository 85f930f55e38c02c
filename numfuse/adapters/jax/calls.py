"""How JAX runs a call of numfuse: at once on the host, compiled (`ffi`), or refused.

A call is made from a form, which says all of it but its arrays, and from their shapes and dtypes:
it knows its results, runs on NumPy arrays, makes the problem that is recorded, and has a text that
another process reads.

Arrays that are there are read where they are, but from the second call of a form on by what is
compiled for it. Where XLA cannot call machine code of numfuse, what is compiled calls back to
Python. A callback reads the buffers that XLA hands over: nothing in it waits for XLA's threads, of
which it holds one, and on one core that is all there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from numfuse.adapters.jax import ffi, stream
from numfuse.adapters.jax.operations import Shape

#: What makes a call of a form, of shapes and of the names of dtypes.
Make = Callable[[Any, tuple[Shape, ...], tuple[str, ...]], Any]
config: Any = jax.config
_PRIMITIVES: dict[str, Primitive] = {}


def _call(make: Make, form: Any, given: Sequence[Any]) -> Any:
    return make(form, tuple([x.shape for x in given]), tuple([x.dtype.name for x in given]))


def _refused(platform: str) -> TypeError:
    return TypeError(
        f"JAX must run on the CPU for numfuse, got the platform {platform!r}: nothing moves "
        f"between devices unasked"
    )


@functools.partial(jax.jit, static_argnames=("name", "form"))
def _compiled(*given: Any, name: str, form: Any) -> Any:
    return _PRIMITIVES[name].bind(*given, form=form)


@functools.lru_cache(maxsize=4096)
def _calls(*form: Any) -> Iterator[int]:
    return count()


def _pays(name: str, form: Any, given: Sequence[Any]) -> bool:
    """Whether a call of arrays that are there is worth a compilation: it has come before."""
    if config.jax_disable_jit or not ffi.serves(form):
        return False
    return next(_calls(name, form, *[(x.shape, x.dtype) for x in given])) > 0


def _now(name: str, make: Make, *given: Any, form: Any) -> Any:
    """The results of arrays that are there: on the host the first time, then compiled; on several
    devices compiled at once, which JAX brings together (or refuses to)."""
    arrays = [x for x in given if isinstance(x, jax.Array)]
    devices = {device for x in arrays for device in x.devices()}
    platforms = {device.platform for device in devices}
    for platform in platforms - {"cpu", "gpu", "cuda"}:
        raise _refused(platform)
    if platforms - {"cpu"} or len(devices) > 1 or _pays(name, form, given):
        return _compiled(*given, name=name, form=form)
    found = _call(make, form, given).on_host([np.asarray(x) for x in given])
    where = next((x.sharding for x in arrays if getattr(x, "committed", True)), None)
    return jax.device_put(found, where)


def abstract_results(make: Make, *avals: Any, form: Any) -> list[Any]:
    """The abstract results: of one shard's kind where JAX maps over a mesh."""
    found = []
    for shape, dtype in _call(make, form, avals).results():
        like = avals[0]
        sharding: Any = getattr(like, "sharding", None)
        if sharding is None or sharding.mesh.empty:
            found.append(jax.core.ShapedArray(shape, dtype))
        else:
            spec = PartitionSpec(*[None] * len(shape))
            at = type(sharding)(sharding.mesh, spec)
            found.append(like.update(shape=shape, dtype=dtype, weak_type=False, sharding=at))
    return found


def _lowered(make: Make, ctx: Any, *operands: Any, form: Any) -> Any:
    """Machine code, or a host callback on the buffers themselves: jax.pure_callback would copy its
    operands on XLA's threads and wait for them in one of these."""
    call = _call(make, form, ctx.avals_in)
    made = ffi.prepared(call)
    if made is not None:
        return ffi.lowered(ffi.TARGET, ctx, operands, *made)

    avals = ctx.avals_in, ctx.avals_out
    found, *_ = mlir.emit_python_callback(
        ctx, lambda *x: call.on_host(x), None, operands, *avals, has_side_effect=False
    )
    return found


def _lowered_on_cuda(make: Make, ctx: Any, *operands: Any, form: Any) -> Any:
    """Launches on XLA's stream."""
    made = stream.prepared(_call(make, form, ctx.avals_in))
    return ffi.lowered(stream.TARGET, ctx, operands, *made)


def _lowered_elsewhere(ctx: Any, *operands: Any, form: Any) -> Any:
    raise _refused(ctx.module_context.platforms[0])


def primitive(name: str, make: Make, batched: Any, derived: Any, transposed: Any) -> Primitive:
    """Return a new primitive of JAX's, with its rules."""
    p = _PRIMITIVES[name] = Primitive(f"numfuse_{name}")
    p.multiple_results = True
    p.def_impl(functools.partial(_now, name, make))
    p.def_abstract_eval(functools.partial(abstract_results, make))
    mlir.register_lowering(p, functools.partial(_lowered, make), platform="cpu")
    mlir.register_lowering(p, functools.partial(_lowered_on_cuda, make), platform="cuda")
    mlir.register_lowering(p, _lowered_elsewhere)
    batching.primitive_batchers[p] = batched
    ad.primitive_jvps[p] = derived
    ad.primitive_transposes[p] = transposed
    return p


# --- what rules share -----------------------------------------------------------------------------
def in_front(given: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
    """Return operands with their mapped axis in front, of length 1 where they have none."""
    return [
        jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(given, axes, strict=True)
    ]


def placed(form: Any, given: Sequence[Any]) -> list[Any]:
    """Return the operands that are there in their places, None elsewhere."""
    rest = iter(given)
    return [next(rest) if there else None for there in form.there]


def fitted(x: Any, shape: Shape) -> Any:
    """`x` summed over the axes that `shape` has with length 1, and broadcast along those of `x`."""
    over = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    x = jnp.sum(x, axis=over, keepdims=True) if over else x
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


def _varying(x: Any) -> frozenset[Any]:
    """The axes of a mesh along which a value differs, in `jax.shard_map`."""
    aval = jax.typeof(x)
    return getattr(getattr(aval, "manual_axis_type", aval), "varying", frozenset())


def agreed(given: list[Any]) -> list[Any]:
    """Operands of one kind to `jax.shard_map`: each differs along the axes that any does."""
    if not hasattr(jax.lax, "pcast") or not any(isinstance(x, jax.core.Tracer) for x in given):
        return given
    axes = [_varying(x) for x in given]
    every = frozenset().union(*axes)
    return [
        x if own == every else jax.lax.pcast(x, tuple(sorted(every - own)), to="varying")
        for x, own in zip(given, axes, strict=True)
    ]
