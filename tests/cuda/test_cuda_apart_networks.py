"""Networks' gradients in 16 bits whose sums one warp group has, run by `cuda_machine`.

Guards: gradients are right to the bounds of `test_cuda_half_networks`, whichever warps come late:
nothing is read before it was written, nor written over before it was read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

try:
    import test_cuda_half_networks as half
    from cuda_devices import HOPPER
    from cuda_machine import Machine

    from numfuse.activations import get
    from numfuse.backends.cuda.plan import half_networks
    from numfuse.backends.cuda.plan.group_sizes import Apart, apart_rule, apart_sizes_of
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

if SIMULATED:
    pytest.skip("the simulator has no intrinsics", allow_module_level=True)


class Uneven(Machine):
    """A machine some of whose warps do not go on for a while: others by turns, or by their group.

    `late` is a group whose warps go on in few turns alone.
    """

    late: int | None = None

    def __init__(self, *arrays, **functions):
        super().__init__(*arrays, **functions)
        self.rng = np.random.default_rng(0)

    def _ready(self, threads):
        if any(t.waits and t.waits[0] == "barrier" for t in threads):
            return super()._ready(threads)
        warps = [threads[i : i + 32] for i in range(0, len(threads), 32)]
        chances = [0.02 if i // 4 == self.late else 0.6 for i in range(len(warps))]
        found = [w for w, p in zip(warps, chances, strict=True) if self.rng.random() < p]
        try:
            return super()._ready([t for warp in found for t in warp]) or super()._ready(threads)
        except AssertionError:  # these wait for others
            return super()._ready(threads)


def case_of(monkeypatch, how, widths, points, dtype="bfloat16", **more):
    """A case on a device of one multiprocessor, that is run so where it fits."""
    monkeypatch.setattr(half_networks, "APART", lambda *_: how)
    case = half.Case(widths, points, dtype, **more)
    case.info = replace(HOPPER, multiprocessors=1)
    return case


def padded_of(widths):
    return tuple(-(-max(own) // 16) * 16 for own in (widths[:1], widths[1:-1], widths[-1:]))


@pytest.mark.long
@pytest.mark.parametrize(
    "how, widths, points, dtype, activation, layout",
    [
        (Apart(3), (64,) * 4, 450, "bfloat16", "relu", "rows"),
        (Apart(3, True), (64,) * 5, 405, "bfloat16", "relu", "rows"),
        # (gradients by the last hidden layer's sums lie where the next rows of x will)
        (Apart(3), (64,) * 6, 577, "float16", "relu", "rows"),
        (Apart(3), (64,) * 4, 200, "bfloat16", "silu", "rows"),
        (Apart(2), (64, 64, 64, 64, 48), 130, "float16", "tanh", "rows"),
        (Apart(2), (3, 64, 64, 64, 1), 330, "bfloat16", "tanh", "rows"),
        (Apart(3, True), (3, 50, 60, 33, 5), 210, "float16", "relu", "reversed"),
        (Apart(3), (48, 40, 64, 56), 66, "bfloat16", "relu", "rows"),
    ],
)
def test_one_group_adds_the_gradients_of_all_rows_up(
    monkeypatch, how, widths, points, dtype, activation, layout
):
    case = case_of(monkeypatch, how, widths, points, dtype, layout=layout)
    made = case.run(True, activation)
    case.verify(case.run(False, activation), made, activation)
    assert f"network backward apart {dtype} 64" in case.kernels
    alone = case.run(True, activation, moves=False)
    assert (made["flat"].view("i2") == alone["flat"].view("i2")).all()


@pytest.mark.long
@pytest.mark.parametrize("late", [None, 0, 3])
@pytest.mark.parametrize(
    "how, widths, activation",
    [(Apart(3), (64,) * 6, "relu"), (Apart(3), (64,) * 4, "tanh")],
)
def test_bits_are_the_same_whichever_warps_are_late(monkeypatch, how, widths, activation, late):
    case = case_of(monkeypatch, how, widths, 450)
    even = case.run(True, activation)
    monkeypatch.setattr(half, "Machine", Uneven)
    monkeypatch.setattr(Uneven, "late", late)
    uneven = case.run(True, activation)
    assert "network backward apart bfloat16 64" in case.kernels
    for name, x in even.items():
        assert (x.view("i2") == uneven[name].view("i2")).all(), name


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_several_networks_are_rows_of_the_grid(monkeypatch, shared):
    cases = [case_of(monkeypatch, Apart(3), (64, 64, 64, 16), 100, seed=seed) for seed in range(2)]
    several = half.Several(cases, shared)
    value, made = several.run(False), several.run(True, moves=not shared)
    for i, case in enumerate(cases):
        case.verify({"u": value["u"][i]}, {name: y[i] for name, y in made.items()})
    assert "network backward apart bfloat16 64" in several.kernels


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sum_that_is_not_finite_stays_in_its_rows(monkeypatch):
    """Guards: rows behind the last, of which an activation may make anything, add nothing."""
    case = case_of(monkeypatch, Apart(3), (64, 64, 64, 16), 70, biases=False)
    made = case.run(True, "none")
    assert all(np.isfinite(half.wide(y)).all() for y in made.values())


def test_sizes_that_fit():
    """Guards: shared memory, and registers that groups give up for the one that takes them."""
    for groups in (2, 3):
        for widths in ((64,) * 4, (64,) * 5, (64,) * 6, (3, 64, 64, 64, 1), (20, 50, 60, 33, 5)):
            for rectified in (True, False):
                how = Apart(groups, True)
                s = apart_sizes_of(HOPPER, widths, padded_of(widths), rectified, how)
                if s is None:
                    assert groups == 3 and not rectified and len(widths) > 4 and widths[0] == 64
                    continue
                assert s.taken <= HOPPER.shared_per_block and s.groups == groups
                fewer, more = s.registers
                at_launch = min(255, 65536 // (128 * (groups + 1))) // 8 * 8
                assert groups * fewer + more <= (groups + 1) * at_launch
                assert s.totals < more and s.masks <= rectified
                places = [*s.values_at, *s.gradients_at, *(s.slopes_at * s.keeps_slopes)]
                assert all(at % 1024 == 0 for at in places)
    assert apart_sizes_of(HOPPER, (64,) * 6, (64,) * 3, True, Apart(3)).next_is_spare
    assert apart_sizes_of(HOPPER, (64,) * 3, (64,) * 3, True, Apart(3)) is None


@pytest.mark.parametrize(
    "activation, layers, groups",
    [
        ("relu", 3, 3), ("relu", 4, 3), ("relu", 5, 2), ("tanh", 3, 3), ("silu", 3, 3),
        ("tanh", 4, 0), ("gelu_erf", 3, 0), ("relu", 6, 0),
    ],
)  # fmt: skip
def test_gradients_go_the_way_that_was_faster(activation, layers, groups):
    how = apart_rule((64,) * 3, layers, get(activation))
    assert (how.groups if how else 0) == groups
    if how is not None:
        rectified = activation == "relu"
        assert apart_sizes_of(HOPPER, (64,) * (layers + 1), (64,) * 3, rectified, how) is not None
    assert apart_rule((16, 64, 16), layers, get(activation)) is None
