"""Python frames of a call: a bound on what stands between a user's function and the kernels."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import numfuse as nf

PACKAGE = Path(nf.__file__).parent
BACKEND = ("backends/cpu", "runtime/replay.py")
#: Compiled functions report themselves as calls too, under a name with a digest.
NATIVE = re.compile(r"_[0-9a-f]{20}$")


def frames(call):
    """Return (file, function) of every Python frame of numfuse that the call opens."""
    found = []

    def opened(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            if not NATIVE.search(frame.f_code.co_name):
                found.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(opened)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def calls(m):
    rng = np.random.default_rng(0)
    shapes = (m, m + 1), (m + 1, m + 2), (m + 2,), (m, m + 2)
    a, b, bias, grad = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return {
        "forward": lambda: nf.matmul_bias_activation(a, b, bias, "gelu"),
        "backward": lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        "gate": lambda: nf.gelu_mul(grad, grad),
        "gate backward": lambda: nf.gelu_mul_bwd(grad, grad, grad),
        "double backward": lambda: nf.matmul_bias_activation_double_bwd(
            a, b, bias, grad, a, b, bias, "gelu"
        ),
        "tangent": lambda: nf.matmul_bias_activation_jvp(a, b, bias, a, b, bias, "gelu"),
    }


# A repeated call: frames of the backend and its table, and in all. A first call: functions of the
# backend and its table, each counted once, as a block or an operand more opens more frames.
@pytest.mark.parametrize(
    "name, backend, total, functions",
    [
        ("forward", 3, 10, 51),
        ("backward", 3, 15, 69),
        ("gate", 4, 12, 32),
        ("gate backward", 4, 14, 30),
        ("double backward", 5, 58, 70),
        ("tangent", 5, 19, 57),
    ],
)
def test_frames_of_a_call_are_bounded(name, backend, total, functions):
    calls(7)[name]()  # the kernels are there
    call = calls(9)[name]
    first = {x for x in frames(call) if x[0].startswith(BACKEND) and not x[1].startswith("<")}
    again = frames(call)
    own = [x for x in again if x[0].startswith(BACKEND)]
    assert len(own) <= backend, own
    assert len(again) <= total, again
    assert len(first) <= functions, sorted(first)
