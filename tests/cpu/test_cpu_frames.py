"""Python frames of a call: a bound on what stands between a user's function and the kernels."""

from __future__ import annotations

import numpy as np
import pytest
from frames import frames

import numfuse as nf
from numfuse.backends.cpu.face import BACKEND as CPU
from numfuse.backends.cpu.launch import workspace

BACKEND = ("backends/cpu", "runtime/replay.py")


def calls(m, batch=(), view=np.asarray):
    """Return a call of every public function, with all its operands and `out` where there is one.

    `view` makes another view of each operand.
    """
    rng = np.random.default_rng(0)
    shapes = (*batch, m, m + 1), (m + 1, m + 2), (m + 2,), (*batch, m, m + 2)
    made = [rng.standard_normal(shape, np.float32) for shape in shapes]
    outs = [np.empty_like(x) for x in (made[3], *made)]
    a, b, bias, grad = map(view, made)
    out, d_a, d_b, d_bias, d_residual = outs
    layer, moved = (a, b, bias), (a, b, bias)
    act = nf.activations()["gelu"]
    found = {
        "forward": lambda: nf.matmul_bias_activation(*layer, "gelu"),
        "forward, an activation": lambda: nf.matmul_bias_activation(*layer, act),
        "forward, pre": lambda: nf.matmul_bias_activation(
            *layer, "gelu", return_pre_activation=True, out=out
        ),
        "residual": lambda: nf.matmul_bias_residual(*layer, grad, out=out),
        "backward": lambda: nf.matmul_bias_activation_bwd(grad, *layer, "gelu"),
        "backward, saved": lambda: nf.matmul_bias_activation_bwd(
            grad, *layer, "gelu", pre_activation=grad, needs=["a", "b"], out=(d_a, d_b, None)
        ),
        "backward, residual": lambda: nf.matmul_bias_residual_bwd(
            grad, *layer, grad, out=(d_a, d_b, d_bias, d_residual)
        ),
        "backward, row of a residual": lambda: nf.matmul_bias_residual_bwd(grad, *layer, bias),
        "gate": lambda: nf.activation_mul(grad, grad, "gelu", out=out),
        "gate, named": lambda: nf.gelu_mul(grad, grad),
        "gate, in place": lambda: nf.silu_mul(out, grad, out=out[:]),
        "gate backward": lambda: nf.gelu_mul_bwd(grad, grad, grad, out=(out, d_residual)),
        "double backward": lambda: nf.matmul_bias_activation_double_bwd(
            *moved, grad, *layer, "gelu"
        ),
        "double backward, residual": lambda: nf.matmul_bias_residual_double_bwd(
            *moved, grad, grad, *layer, grad
        ),
        "tangent": lambda: nf.matmul_bias_activation_jvp(*layer, *moved, "gelu"),
        "tangent, residual": lambda: nf.matmul_bias_residual_jvp(*layer, grad, *moved, grad),
        "gate double backward": lambda: nf.activation_mul_double_bwd(
            grad, grad, grad, grad, grad, "gelu"
        ),
        "gate tangent": lambda: nf.activation_mul_jvp(grad, grad, grad, grad, "gelu"),
    }
    return {name: found[name] for name in found}


@pytest.fixture(autouse=True)
def usual_state():
    """Threads of the tests before may have left several pieces of memory, and tables that are full,
    where a record takes the place of another.
    """
    workspace.pool.clear()
    CPU.replay.clear()


@pytest.mark.parametrize("name", calls(1))
@pytest.mark.parametrize(
    "how",
    [{}, {"batch": (2, 3)}, {"view": lambda x: x[..., ::-1]}],
    ids=["contiguous", "batch", "strided"],
)
def test_a_repeated_call_opens_at_most_eight_frames(name, how):
    call = calls(9, **how)[name]
    call()
    # The usual one of its ways: a call may find that another one's memory is away.
    again = min((frames(call)[1] for _ in range(3)), key=len)
    assert len(again) <= 8, again
    backend = [x for x in again if x[0].startswith(BACKEND)]
    assert len(backend) <= 3, backend


def test_a_repeated_call_on_threads_opens_few_more():
    a = np.ones((300, 300), np.float32)

    def call():
        nf.matmul_bias_activation(a, a, a[0], "gelu")

    call()
    # The usual one of its ways: late threads of another library's pool make it take another.
    assert min(len(frames(call)[1]) for _ in range(5)) <= 14


# A first call of a shape: all functions of numfuse, each counted once, and the frames that they
# open, comprehensions included (some more where vectors are narrow); in a process of its own, where
# it may pass some more.
@pytest.mark.parametrize(
    "name, functions, most",
    [
        ("forward", 43, 72),
        ("residual", 48, 78),
        ("backward", 62, 172),
        ("backward, residual", 74, 219),
        ("gate, named", 38, 54),
        ("gate backward", 43, 77),
        ("double backward", 67, 260),
        ("tangent", 53, 114),
    ],
)
def test_a_first_call_passes_few_functions(name, functions, most):
    for m in (17, 19):  # the kernels are there (fewer columns have others)
        calls(m)[name]()
    opened = frames(calls(23)[name])[1]
    first = {x for x in opened if not x[1].startswith("<")}
    seen = "\n".join(map(" ".join, opened))  # pytest shortens a list, and which ones is the news
    assert len(first) <= functions, seen
    assert len(opened) <= most, seen
