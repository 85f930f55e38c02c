"""Tangents of a network's points, and gradients of these, that one kernel makes on a CUDA device.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`. Guards: where x
alone moves, `mlp_jvp` and `mlp_double_bwd` are launches of a network, and right as by layers.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import unavailable
from on_device import poisoned

import numfuse as nf

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

F64, F32 = np.dtype(np.float64), np.dtype(np.float32)
EVERY = ("grad", "x", "weights", "biases")


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, "cuda")
    monkeypatch.setattr("numfuse.adapters.cuda_whole.ENABLED", True)


class Case:
    """A network, its points and their tangents, on the host and on the device."""

    def __init__(self, widths, points, dtype=F64, batch=(), **how):
        rng = np.random.default_rng([points, *widths])

        def normal(*shape, scale=1.0):
            return (scale * rng.standard_normal(shape)).astype(dtype)

        pairs = list(itertools.pairwise(widths))
        self.x, self.u = normal(*batch, points, widths[0]), normal(*batch, points, widths[0])
        self.weights = [normal(*batch, k, n, scale=k**-0.5) for k, n in pairs]
        self.biases = [normal(*batch, *[1] * len(batch), n) for n in widths[1:]]
        self.grad, self.how = normal(*batch, points, widths[-1]), how

    def there(self, given):
        """Arrays of the device, in lists too."""
        if isinstance(given, list):
            return [self.there(y) for y in given]
        return None if given is None else nf.to_device(given, "cuda")

    def tangent(self, place, **more):
        given = [place(y) for y in (self.x, self.weights, self.biases, self.u)]
        return nf.mlp_jvp(*given, None, None, **self.how | more)

    def second(self, place, needs=EVERY, v=None, **more):
        given = [place(y) for y in (self.grad, self.x, self.weights, self.biases)]
        found = nf.mlp_double_bwd(
            place(self.u), place(v), None, *given, needs=needs, **self.how | more
        )
        groups = [list(y) if isinstance(y, tuple) else [y] for y in found]
        return list(itertools.chain(*groups))

    def close(self, found, wanted):
        """Sums of these lengths, each rounded some dozen times on its way through the layers."""
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if y is None:
                continue
            assert (tuple(x.shape), x.dtype) == (y.shape, self.x.dtype)
            terms = max(self.x.shape[-2], *y.shape) * 16
            bound = terms * np.finfo(self.x.dtype).eps * max(1.0, np.abs(y).max())
            assert np.abs(nf.to_numpy(x) - y).max() <= bound

    def check(self, needs=EVERY):
        """Tangents and second gradients are those of layers, by one kernel each way."""
        host = self._wide()
        wanted, gradients = host.tangent(lambda y: y), host.second(lambda y: y, needs)
        self.close(self.tangent(self.there), wanted)
        assert "network" in nf.last_call().kernel
        found = self.second(self.there, needs)
        told = nf.last_call().kernel
        back = set(needs) != {"grad"}
        assert "network" in told and ("backward" in told) == back
        self.close(found, gradients)
        return found

    def _wide(self):
        found = Case.__new__(Case)
        found.__dict__ |= self.__dict__
        for name in ("x", "u", "grad", "weights", "biases"):
            y = getattr(self, name)
            wide = [None if z is None else z.astype(F64) for z in y] if type(y) is list else None
            setattr(found, name, y.astype(F64) if wide is None else wide)
        return found


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("widths", [(2, 8, 8, 1), (1, 3, 1), (3, 8, 5, 8, 2)])
def test_tangents_of_points_are_one_launch_and_so_are_their_gradients(widths, dtype):
    Case(widths, 7, dtype).check()


@pytest.mark.parametrize("points", [1, 5, 29])
def test_blocks_and_tiles_that_are_not_full_add_nothing(points):
    Case((2, 8, 8, 1), points).check()


@pytest.mark.parametrize("needs", [("grad",), ("x",), ("weights",), ("grad", "biases")])
def test_gradients_that_are_not_needed_are_none_and_change_nothing(needs):
    case = Case((2, 8, 5, 1), 5)
    every, found = case.check(), case.check(needs)
    groups = dict(zip(EVERY, (every[:1], every[1:2], every[2:5], every[5:]), strict=True))
    wanted = itertools.chain(*[groups[x] if x in needs else [None] for x in EVERY])
    for x, y in zip(found, wanted, strict=True):
        assert (x is None and y is None) or np.array_equal(nf.to_numpy(x), nf.to_numpy(y))


@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
def test_any_activation(activation):
    Case((2, 8, 8, 1), 5, activation=activation).check()


def test_several_networks_are_rows_of_the_grid():
    case = Case((2, 8, 5, 1), 5, F32, batch=(3,))
    case.biases[1] = None
    case.check()


def test_the_value_has_the_bits_of_the_network():
    case = Case((2, 8, 8, 1), 9, F32)
    found = case.tangent(case.there).out
    alone = nf.mlp(*map(case.there, (case.x, case.weights, case.biases)))
    assert np.array_equal(nf.to_numpy(found), nf.to_numpy(alone))


def test_weights_that_move_go_by_layers():
    case = Case((2, 4, 4, 1), 3)
    found = case.second(case.there, v=case.weights)
    assert "network" not in nf.last_call().kernel
    case.close(found, case.second(lambda y: y, v=case.weights))


def test_a_call_that_comes_again_has_the_same_bits():
    case = Case((2, 8, 8, 1), 9, F32)
    for x, y in zip(case.second(case.there), case.second(case.there), strict=True):
        assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y))
