"""The uses that the command and `asv_benches/uses.py` time: every row runs and is checked."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from numfuse.__main__ import build_parser
from numfuse.cli import bench, report, steps, timing, uses

SCRIPTS = Path(__file__).parents[2] / "asv_benches"


@pytest.fixture
def script(monkeypatch):
    """The script, as a module."""
    if not SCRIPTS.is_dir():
        pytest.skip("a checkout has the scripts")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("uses")


def run(use):
    missing = [module for module in use.modules if not uses.Use("", (module,), None).installed()]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    found = uses.measure(use, np.random.default_rng(5), seconds=0.0, rounds=1)
    assert found["failed"] == {} and report.wrong_uses([found]) == []
    assert set(found["seconds"]) == set(found["error"]) > {"numfuse"}
    assert all(seconds > 0 for seconds in found["seconds"].values())


TINY = {
    "demo": ("numpy", steps.demo),
    "inference": ("numpy", steps.inference(3, (4, 5, 1))),
    "MLP": ("torch", steps.torch_step("MLP", 5, (3, 4, 2), activation="tanh", block=True)),
    "MLP inference": ("torch", steps.torch_step("MLP", 5, (3, 4, 2), train=False)),
    "half": ("torch", steps.torch_step("MLP", 5, (3, 4, 2), dtype="bfloat16")),
    "gated": ("torch", steps.torch_step("gated", 5, (3, 4, 2), activation="silu", block=True)),
    "layer": ("jax", steps.jax_layer(3, 4)),
    "its gradients": ("jax", steps.jax_layer(3, 4, gradient=True)),
}


@pytest.mark.parametrize("name", TINY)
def test_every_step_agrees_with_its_peer(name):
    module, make = TINY[name]
    run(uses.Use(name, (module,), make))


def test_a_regressors_step_agrees_with_its_peer(script):
    run(uses.Use("regressor", ("numpy",), script.regressor(6, (2, 5, 4, 2), "float64")))


def test_the_memory_of_a_step_stands_in_the_table(script):
    row = {"use": "x", "seconds": {"numfuse": 1.0, "peer": 2.0}, "error": {}}
    row["memory"] = {"numfuse": 3 << 20, "peer": 5 << 20, "numfuse compiled": 1 << 20}
    table = script.with_memory(report.uses_table([row]), [row])
    ((cells, _),) = table.rows
    assert len(cells) == len(table.head) and cells[-1] == "3 (5)"


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["autograd", "torch nested", "torch.func", "jax.jit jvp of jvp", "jax.jit nested"]
)
def test_every_way_to_a_pinn_agrees_with_its_peer(script, way):
    run(script.pinn(way, "float64", (3, 4), 5))


@pytest.mark.parametrize("mode", ["no_grad", "forward", "forward, backward"])
def test_one_small_layer_agrees_with_its_peer(script, mode):
    pytest.importorskip("torch")
    (use,) = [use for use in script.small_layers(2, 3) if use.name.endswith(f"rows, {mode}")]
    run(use)


def test_rows_are_drawn_by_their_seed_alone(script):
    first, again, other = ([u.name for u in script.drawn(s, 6, "cpu", False)] for s in (1, 1, 2))
    assert first == again != other
    assert len(first) == len(other) == 6


def test_names_of_rows_are_unique(script):
    for rows in (script.on_the_cpu, script.on_a_gpu):
        names = [use.name for use in rows(quick=False, compiled=False)]
        assert len(set(names)) == len(names)


def test_a_contestant_that_cannot_is_reported_and_one_that_is_wrong_is_found():
    def make(generator):
        x = generator.standard_normal(4)
        runs = {"numfuse": lambda: x + 1e-6, "peer": lambda: x, "other": lambda: 1 / 0}
        return steps.Work(runs, lambda: x, "float64")

    found = uses.measure(uses.Use("sum", (), make), np.random.default_rng(0), 0.0, 1)
    assert found["failed"] == {"other": "ZeroDivisionError: division by zero"}
    (sentence,) = report.wrong_uses([found])
    assert sentence.startswith("numfuse: sum: relative error")
    ((cells, _),) = report.uses_table([found]).rows
    assert cells[0] == "sum" and cells[2].startswith("peer ")


def test_a_device_is_waited_for_at_the_end_of_a_stretch():
    calls = []
    timing.interleave(
        {"step": lambda: calls.append("step")},
        rounds=2,
        sample=1e-3,
        rest=0.0,
        settle=lambda: calls.append("settle"),
    )
    assert calls[-1] == "settle"
    assert calls.count("settle") == 6 and calls.count("step") > 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], []),
        (["--full"], []),
        (["--quick"], ["NumPy"]),
        (["--sizes", "64"], None),
        (["--operations", "forward"], None),
        (["--sizes", "64", "--uses", "demo"], ["demo"]),
        (["--operations", "forward", "--uses"], []),
    ],
)
def test_uses_are_measured_where_nothing_else_is_asked_for(arguments, words):
    assert bench.choose_uses(build_parser().parse_args(["bench", *arguments])) == words


def test_five_to_eight_uses_stand_in_the_table():
    assert 5 <= len(uses.USES) <= 8
    assert [use.name for use in uses.chosen(["demo"])] == [uses.USES[0].name]
