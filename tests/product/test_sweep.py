"""The sweeps of `asv_benches`: their cases, their errors, what they keep and report.

That of CUDA runs where a GPU is lent by the minute, so all but the GPU's own part is run here.
"""

from __future__ import annotations

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "asv_benches"
pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch):
    """What imports one of the scripts."""
    if not SCRIPTS.is_dir():
        pytest.skip("a checkout has the scripts")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_cases_fit_and_are_of_all_kinds_and_a_seed_draws_them_again(script):
    cases = script("sweep_cases")
    memory = float(1 << 30)
    drawn = [cases.draw(random.Random(seed), memory) for seed in range(400)]
    assert drawn == [cases.draw(random.Random(seed), memory) for seed in range(400)]
    assert all(x.nbytes <= memory and x.work <= cases.WORK[x.dtype] for x in drawn)
    for name, kinds in (
        ("operation", set(cases.OPERATIONS)), ("dtype", set(cases.DTYPES)),
        ("activation", set(cases.ACTIVATIONS)), ("turned", {False, True}),
        ("bias", {False, True}), ("real", {False, True}), ("shared", {False, True}),
    ):  # fmt: skip
        assert {getattr(x, name) for x in drawn} == kinds, name
    sizes = [s for x in drawn for s in (x.m, x.k, x.n)]
    assert min(sizes) == 1 and max(sizes) > 1 << 15 and max(sizes) <= cases.MOST
    assert any(s % 2 for x in drawn if not x.real for s in (x.m, x.k, x.n))
    assert 0.3 < sum(x.real for x in drawn) / 400 < 0.7 and any(x.batch for x in drawn)


def test_an_exact_product_has_twice_the_digits_of_float64(script):
    import torch

    cases = script("sweep_cases")
    rng = np.random.default_rng(5)
    x, y = (
        rng.standard_normal((3, 900)),
        rng.standard_normal((900, 4)) * 10.0 ** rng.integers(-9, 9),
    )
    exact = x.astype(np.longdouble) @ y.astype(np.longdouble)
    got = cases.exact_product(torch.from_numpy(x), torch.from_numpy(y), True).numpy()
    # u of the result's own rounding, and as much of the sum of the slices' products
    magnitude = abs(x) @ abs(y)
    assert (abs(got - exact) <= 2.0**-53 * (abs(exact) + 2.0**-8 * magnitude)).all()


@pytest.mark.parametrize("operation", ["forward", "backward, saved", "gated backward"])
def test_a_case_is_measured_and_kept(script, operation, tmp_path, monkeypatch):
    """Guards: a run on a GPU that is lent for minutes does not fail for a misspelt name."""
    import torch

    cases, sweep, report = map(script, ("sweep_cases", "cuda_sweep", "sweep_report"))
    case = cases.Case(operation, "f32", 5, 6, 7, 0, False, True, True, "relu", False, 3)
    way = torch.compile
    monkeypatch.setattr(  # its tracing alone
        torch, "compile", lambda f, **how: way(f, backend="eager", fullgraph=True, **how)
    )
    into, records = tmp_path / "run.jsonl", [{"kind": "run", "id": "one", "gpu": "a GPU"}]
    odd = replace(case, activation="no such thing")
    done = sweep.sweep(
        iter([case, odd]), "cpu", sweep.HostClock(), True, np.inf,
        lambda record: records.append({**record, "run": "one"}),
    )  # fmt: skip
    assert done == 2 and "case" in records[2]["failed"]
    assert records[1]["failed"] == {}, records[1]["failed"]
    names = set(records[1]["device"])
    assert names == set(records[1]["wall"]) == set(records[1]["errors"]) >= {
        "numfuse", "torch", "torch.compile",
    }  # fmt: skip
    assert ("fused cuBLAS" in names) == (operation == "forward")
    assert all(e < 1e-5 for errors in records[1]["errors"].values() for e in errors)
    into.write_text("\n".join(map(json.dumps, records)) + '\n{"kind": "case", "cut')
    read = report.read([into, into])
    assert len(read) == 2 and read[0]["of"]["gpu"] == "a GPU"
    assert report.ratio(read[0]) > 0 and report.ratio(read[1]) is None


def test_a_wrong_result_and_a_nan_show_in_the_error(script):
    import torch

    cases = script("sweep_cases")
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    off = cases.norms(torch.tensor([3.0, 4.5]), (exact,))
    assert off == [(0.5, 5.0)] and cases.errors(off) == [0.1]
    nan = cases.norms((exact, torch.tensor([3.0, torch.nan])), (exact, exact))
    assert cases.errors(nan) == [0.0, np.inf]
    assert cases.errors(off, [(1.2, 12.0)]) == [0.1]  # 5, 12 and 13
    with pytest.raises(ValueError, match=r"must have shape \(2,\), got \(1,\)"):
        cases.norms(torch.tensor([3.0]), (exact,))


@pytest.mark.parametrize("operation", ["forward", "backward, saved", "gated backward, saved"])
def test_other_numbers_are_drawn_into_what_was_saved_too(script, operation):
    import torch

    cases = script("sweep_cases")
    case = cases.Case(operation, "f64", 5, 6, 1, 0, False, True, True, "silu", False, 3)
    layers = cases.Layers(case, "cpu")
    contestants = layers.contestants(False)
    before = layers.exact()
    layers.draw_again(4)
    exact = layers.exact()
    assert not any(torch.equal(x, y) for x, y in zip(before, exact, strict=True))
    for call in contestants.values():
        assert max(cases.errors(cases.norms(call(), exact))) < 1e-14


def test_the_report_counts_shapes_errors_and_the_worst(script, tmp_path):
    cases, report = script("sweep_cases"), script("sweep_report")
    shape = cases.Case("forward", "f32", 300, 7000, 100, 0, False, False, True, "gelu", False, 0)
    records = []
    for i, (peer, off) in enumerate(((0.2, 5), (1.0, 1), (1.0, 1), (2.0, 1))):
        case = replace(shape, seed=i, turned=i > 1).record()
        device = {"numfuse": 1e-3, "torch": 1e-3 * peer, "torch.compile": 3e-3}
        error = {"numfuse": [off * 2e-7], "torch": [2e-7], "torch.compile": [2e-8]}
        records.append({"kind": "case", "case": case, "run": "a", "device": device, "wall": device,
                        "errors": error, "failed": {}, "tier": "cores: x"})  # fmt: skip
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in records))
    found = report.read([path])
    text = report.report(found, worst=2)
    mean = (0.2 * 2.0) ** 0.25
    assert f"| all, device time | 4 | 75.0% | 1 | 0.20 | {mean:.3f} | 25.0% |" in text
    assert f"| weight: (out, in) | 2 | 100.0% | 0 | 1.00 | {2**0.5:.3f} | 0.0% |" in text
    worst = text.partition("the worst 2")[2].splitlines()[2]
    assert worst.startswith("| forward, f32, gelu: 300 x 7000 x 100, bias | 0.20 | 0.20 | torch |")
    assert "error 5 x: forward" in text
    report.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    assert report.report([]) == "No results are kept."


def test_calls_of_full_size_are_planned_without_a_gpu(script):
    pytest.importorskip("numba_cuda")
    cases, plans = script("sweep_cases"), script("cuda_plans")
    rng = random.Random(11)
    for info in plans.GPUS.values():
        for _ in range(6):
            case = cases.draw(rng, float(3 << 30))
            told, launches = plans.planned(case, info)
            assert launches and told, case


def test_a_fit_finds_the_constants_that_measurements_were_made_by(script, tmp_path):
    """Guards: what `cuda_fit` prints is what the times say, and lessens error and regret."""
    pytest.importorskip("numba_cuda")
    fit, plans = script("cuda_fit"), script("cuda_plans")
    from dataclasses import asdict

    from numfuse.backends.cuda.plan import tiers
    from numfuse.backends.cuda.plan.product import Operand, Product

    rng, info = np.random.default_rng(3), plans.GPUS["h200"]
    true = {"speed of CORE_BLOCKS[1]": 0.7, "speed of CORE_BLOCKS[5]": 1.4, "COPY_COST": 2.0}
    changed = fit.constants("cores float32")
    logs = [
        np.log(next((x for name, x in true.items() if c.name.startswith(name)), 1.0))
        for c in changed
    ]
    lines = []
    for _ in range(40):
        m, k, n = (int(2 ** rng.uniform(7, 12.5)) for _ in range(3))
        lay = [Operand("float32", (r * c, c, 1), 16) for r, c in ((m, k), (k, n), (m, n))]
        if rng.random() < 0.5:
            lay[1] = Operand("float32", (k * n, 1, k), 16)
        product = Product(m, n, k, 1, *lay, "float32")
        names = [name for name, _, _ in tiers.ways(product, info, True) if " rows" not in name][:8]
        item = fit.Measured(product, info, names[0], {})
        with fit.put(changed, logs):
            cost = fit.costs(item, names)
        times = 3e-6 + np.hypot(4.5e-12 * np.array(cost), item.nbytes / 3.5e12)
        times *= np.exp(0.01 * rng.standard_normal(len(names)))
        seconds = {"": times[0], **dict(zip(names[1:], times[1:], strict=True))}
        ways = {"device": asdict(info), "product": fit.facts(product), "chosen": names[0]}
        lines.append(json.dumps({"ways": {**ways, "seconds": seconds}}))
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*lines, '{"ways": {"dev']))
    items = fit.measured([path], "H200")
    assert len(items) == 40 and items[0].product == fit.product_of(fit.facts(items[0].product))
    assert fit.measured([path], "A100") == []
    model = fit.Model("cores float32", items)
    before, at = model.fit(0), model.fit(6)
    first, last = (np.median(abs(model.residuals(x))) for x in (before, at))
    assert last < 0.02 < first
    worse, better = (np.mean(model.regrets(x[3:])) for x in (before, at))
    assert better < worse and better < 0.02
    found = dict(zip([c.name for c in model.constants], np.exp(at[3:]), strict=True))
    for name, value in true.items():
        (got,) = (x for full, x in found.items() if full.startswith(name))
        assert abs(np.log(got / value)) < abs(np.log(value)) / 2, (name, got)
    # the constants are again what they were
    assert [c.value for c in fit.constants("cores float32")] == [c.value for c in changed]
    text = fit.report(items, 2, 4)
    assert "cores float32" in text and "regret: median" in text and "held out, fitted" in text


def test_the_processors_cases_fit_and_a_seed_draws_them_again(script):
    sweep, cases = script("cpu_sweep"), script("cpu_cases")
    drawn = [sweep.draw(random.Random(seed)) for seed in range(500)]
    assert drawn == [sweep.draw(random.Random(seed)) for seed in range(500)]
    assert all(x.work <= sweep.WORK and x.nbytes <= sweep.MEMORY for x in drawn)
    assert {x.operation for x in drawn} == set(cases.OPERATIONS)
    assert {x.layout for x in drawn} == set(sweep.LAYOUTS)
    sizes = [s for x in drawn if not cases.OPERATIONS[x.operation].pointwise for s in (x.m, x.k)]
    assert min(sizes) == 1 and max(sizes) > 1 << 15
    assert sweep.Case(**json.loads(json.dumps(vars(drawn[0])))) == drawn[0]


@pytest.mark.parametrize("layout", ["rows", "b turned", "a apart"])
def test_everyone_on_the_processor_computes_the_same(layout, script):
    sweep, cases, contestants = map(script, ("cpu_sweep", "cpu_cases", "cpu_contestants"))
    from numfuse.cli import timing

    for name, operation in cases.OPERATIONS.items():
        if layout != "rows" and not operation.batches:
            continue
        for order in operation.orders:
            shape = {"m": 3, "k": 4, "n": 5, "depth": 2 if operation.network else 1}
            case = sweep.Case(name, order, "float64", "tanh", **shape, layout=layout)
            made = contestants.Contestants(case, np.random.default_rng(3))
            by_hand = made._numpy()
            runs = {
                "numfuse": operation.ours(made, order),
                **({"NumPy": by_hand} if by_hand else {}),
            }
            exact = timing.arrays(made.exact())
            for who, run in runs.items():
                found = run()
                found = [x for x in found if x is not None] if isinstance(found, tuple) else found
                assert timing.relative_error(timing.arrays(found), exact) < 1e-12, (
                    name,
                    order,
                    who,
                )


def test_the_processors_report_tells_ratios_and_what_was_wrong(script):
    sweep = script("cpu_sweep")
    case = vars(sweep.Case("layer", "value", "float32", "relu", 2, 3, 4))
    times = {"numfuse": 2e-6, "NumPy": 1e-6, "JAX": 3e-6}
    record = {"case": case, "threads": 2, "seconds": times, "tolerance": 1e-5, "failed": {}}
    told = sweep.report([{**record, "error": {"numfuse": 1e-6}}], 3)
    assert "| all | 1 | 0.50 | 0% | 100% | 0.50 |" in told and "WRONG" not in told
    assert "0.50 layer, value, float32, relu, 2 x 3 x 4" in told
    assert "WRONG layer" in sweep.report([{**record, "error": {"numfuse": 1e-3}}], 3)
