"""Python frames of a call with arrays of a CUDA device: a bound on what stands before a launch.

Run in the simulator by `test_cuda_simulator`. What stands there for the driver's one native call
does not count. Memory has a bound of its own: an array of numfuse's opens frames when it is made
and when it goes, the workspace of a call when it is taken and given back.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SIMULATED, unavailable
from frames import frames

import numfuse as nf

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))
if not SIMULATED:
    pytest.skip("counted in the simulator", allow_module_level=True)

NATIVE = ("backends/cuda/driver/simulated.py", "backends/cuda/compile/")
MEMORY = ("backends/cuda/call/memory.py", "backends/cuda/call/arrays.py", "runtime/pool.py")


def there(*shape):
    return nf.to_device(np.random.default_rng(0).standard_normal(shape, np.float32), "cuda")


def calls(m):
    a, b, bias, grad = there(m, m + 1), there(m + 1, m + 2), there(m + 2), there(m, m + 2)
    d_a, d_b, d_bias, out = there(m, m + 1), there(m + 1, m + 2), there(m + 2), there(m, m + 2)
    pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)[1]
    layer, slope = nf.matmul_bias_activation, nf.matmul_bias_activation_bwd
    return {
        "forward": lambda: layer(a, b, bias, "gelu"),
        "forward, out": lambda: layer(a, b, bias, "gelu", out=out),
        "forward, saved": lambda: layer(a, b, bias, "gelu", return_pre_activation=True),
        "residual": lambda: nf.matmul_bias_residual(a, b, bias, grad),
        "residual backward": lambda: nf.matmul_bias_residual_bwd(grad, a, b, bias, grad),
        "backward": lambda: slope(grad, a, b, bias, "gelu"),
        "backward, out": lambda: slope(grad, a, b, bias, "gelu", out=(d_a, d_b, d_bias)),
        "backward, saved": lambda: slope(grad, a, b, bias, "gelu", pre_activation=pre),
        "gate": lambda: nf.gelu_mul(grad, grad),
        "gate, in place": lambda: nf.activation_mul(out, grad, "gelu", out=out),
        "gate backward": lambda: nf.gelu_mul_bwd(grad, grad, grad),
        "double backward": lambda: nf.matmul_bias_activation_double_bwd(
            a, b, bias, grad, a, b, bias, "gelu"
        ),
        "residual double backward": lambda: nf.matmul_bias_residual_double_bwd(
            a, b, bias, grad, grad, a, b, bias, grad
        ),
        "tangent": lambda: nf.matmul_bias_activation_jvp(a, b, bias, a, b, bias, "gelu"),
        "residual tangent": lambda: nf.matmul_bias_residual_jvp(a, b, bias, grad, a, b, bias, grad),
        "gate double backward": lambda: nf.activation_mul_double_bwd(
            grad, grad, grad, grad, grad, "gelu"
        ),
        "gate tangent": lambda: nf.activation_mul_jvp(grad, grad, grad, grad, "gelu"),
    }


def opened(call):
    return [x for x in frames(call)[1] if not x[0].startswith(NATIVE)]


#: New arrays of a call; functions of numfuse that a first call of a shape passes, each counted
#: once, and the frames that they open, comprehensions included.
BOUNDS = {
    "forward": (1, 117, 363),
    "forward, out": (0, 76, 276),
    "forward, saved": (2, 16, 36),
    "residual": (1, 117, 389),
    "residual backward": (4, 168, 964),
    "backward": (3, 161, 1050),
    "backward, out": (0, 125, 744),
    "backward, saved": (3, 136, 703),
    "gate": (1, 80, 236),
    "gate, in place": (0, 76, 246),
    "gate backward": (2, 84, 326),
    "double backward": (4, 182, 2203),
    "residual double backward": (5, 137, 1285),
    "tangent": (2, 127, 754),
    "residual tangent": (2, 129, 805),
    "gate double backward": (3, 83, 418),
    "gate tangent": (2, 80, 346),
}


def test_frames_of_a_call_are_bounded():
    for call in calls(3).values():
        call()  # the kernels are there
    beyond = {}
    for name, call in calls(4).items():
        made, functions, most = BOUNDS[name]
        entered = opened(call)
        first = {x for x in entered if x[1][0] != "<"}
        call()
        again = opened(call)
        own = [x for x in again if not x[0].startswith(MEMORY)]
        if len(own) > 8 or len(again) - len(own) > 12 * made + 8 or len(first) > functions:
            beyond[name] = len(first), own, len(again) - len(own)
        if len(entered) > most:
            beyond[name] = len(first), len(entered)
    assert not beyond
