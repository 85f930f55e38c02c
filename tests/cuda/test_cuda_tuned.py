"""`numfuse.tune`: what it measures, keeps and changes, and what it never changes.

What runs is run in the simulator by `test_cuda_simulator`, and on a GPU where there is one; what
only plans, for GPUs that are not there.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SIMULATED, unavailable

import numfuse as nf
from numfuse import epilogues

try:
    from cuda_devices import AMPERE, HOPPER, TURING

    from numfuse.backends.cuda.plan import tiers, tuned
    from numfuse.backends.cuda.plan.product import Operand, Product
except ImportError as error:
    unavailable("cuda-compiler", f"numba-cuda cannot be imported: {error}")

running = pytest.mark.skipif(not nf.backends()["cuda"], reason=str(nf.backends()["cuda"]))
#: The simulator has one tier.
planning = pytest.mark.skipif(SIMULATED, reason="the simulator has no intrinsics")


@pytest.fixture(autouse=True)
def kept_in(tmp_path, monkeypatch):
    """A directory of the test's own for what is kept."""
    monkeypatch.setattr(tuned, "directory", lambda: tmp_path / "tuned")
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    yield tmp_path / "tuned"
    if nf.backends()["cuda"]:
        from numfuse.backends.cuda.call import entry

        entry.forget()


def product(m, k, n, dtype, places=1, turned=False, **features):
    acc = "float64" if dtype == "float64" else "float32"
    x, out = (Operand(dtype, (r * c, c, 1), 16) for r, c in ((m, k), (m, n)))
    y = Operand(dtype, (k * n, 1, k) if turned else (k * n, n, 1), 16)
    return Product(m, n, k, places, x, y, out, acc, **features)


def layer(made, name="gelu", *results):
    whole = epilogues.layer(nf.activations()[name].curve).select("out", *results)
    bias = Operand(made.x.dtype, (0, 0, 1), 16)
    pre = replace(made.out, dtype=made.accumulator) if results else None
    return replace(made, epilogue=whole, bias=bias, pre=pre)


# --- what is tried --------------------------------------------------------------------------------
SHAPES = [
    (product(2048, 2048, 2048, "float32", turned=True), HOPPER, 4),
    (product(300, 7000, 100, "float32"), HOPPER, 1),
    (product(3000, 500, 700, "float64"), HOPPER, 2),
    (product(3000, 1000, 5000, "bfloat16"), HOPPER, 5),
    (product(3000, 1000, 1000, "float16"), AMPERE, 2),
    (product(512, 9000, 512, "float32", free=True), AMPERE, 1),
    (product(100, 90, 80, "float32"), TURING, 1),
]


@planning
@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c[0].m}x{c[0].k}x{c[0].n} {c[1].name}")
def test_ways_leave_the_order_of_a_sum_as_it_is_unless_it_may_change(case):
    """Guards: a tuned choice changes no bit without `reorder`."""
    made, info, least = case
    tier, plan = tiers.choose(made, info)
    ways = tiers.ways(made, info)
    assert len(ways) >= least and len({name for name, _, _ in ways}) == len(ways)
    for name, _, other in ways:
        assert name.startswith(f"{tier.name}: ")
        assert (other.parts, other.part) == (plan.parts, plan.part), name
        assert other.launches != plan.launches
        # by its name it is found again, whatever the sum ends in
        found_tier, found = tiers.choose(made, info, lambda p, name=name: name)
        assert found_tier is tier and str(found.tiling) == str(other.tiling)
        assert tiers._launched(found) == tiers._launched(other)  # with its copies
        assert tiers.choose(layer(made), info, lambda p, name=name: name)[1].parts == plan.parts
    more = tiers.ways(made, info, reorder=True)
    assert {name for name, _, _ in ways} <= {name for name, _, _ in more}
    # sums over rows have an order that a tile decides on
    summed = replace(made, epilogue=epilogues.residual_layer().select("out"), extra=made.out,
                     sums=True)  # fmt: skip
    assert tiers.ways(summed, info) == []
    assert tiers.ways(replace(made, k=0), info, reorder=True) == []
    # one that has the bits of another product keeps them
    whole = replace(made, whole=True, free=False)
    plan = tiers.choose(whole, info)[1]
    assert all(
        (w.parts, w.part) == (plan.parts, plan.part) for *_, w in tiers.ways(whole, info, True)
    )
    assert tiers.name_of(made, info) not in {name for name, _, _ in more}


@planning
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_two_sums_at_once_are_one_product_and_stay_in_one_piece(dtype):
    two = epilogues.record(lambda z, z1: z * z1, 2, "two")
    made = product(2048, 1024, 1536, dtype, whole=True, y1=Operand(dtype, (0, 1536, 1), 16))
    made = replace(made, epilogue=epilogues.Epilogue("two", ("z", "z1"), (), two.results))
    for reorder in (False, True):
        with tuned.trial(reorder) as trial:
            tier, _ = tuned.choose(made, HOPPER)
            assert [p for p, _ in trial.seen.values()] == [made]
        ways = tiers.ways(made, HOPPER, reorder)
        assert len(ways) > 2 and all(plan.parts == 1 for *_, plan in ways)
        assert all(name.startswith(f"{tier.name}: ") for name, *_ in ways)


@planning
def test_a_name_that_no_tier_has_any_more_goes_as_the_model_says():
    made = product(2048, 2048, 2048, "float32")
    wanted = tiers.choose(made, HOPPER)
    for name in ("cores: 1x1x1", "mma: 64x64", "cores"):
        found = tiers.choose(made, HOPPER, lambda p, name=name: name)
        assert [x.kernel for x in found[1].launches] == [x.kernel for x in wanted[1].launches]


# --- what is kept ---------------------------------------------------------------------------------
def test_a_choice_belongs_to_all_that_it_depends_on():
    base = layer(product(64, 32, 16, "float32"))
    info = HOPPER
    keys = {
        tuned.key_of(made, where, False)
        for made, where in (
            (base, info), (replace(base, m=65), info), (replace(base, places=2), info),
            (product(64, 32, 16, "float32"), info), (layer(product(64, 32, 16, "float64")), info),
            (replace(base, x=replace(base.x, alignment=4)), info),
            (replace(base, y=replace(base.y, strides=(0, 1, 32))), info),
            (layer(product(64, 32, 16, "float32"), "gelu", "pre"), info),
            (replace(base, precision="tf32"), info), (replace(base, free=True), info),
            (base, AMPERE), (base, replace(info, name="H100")),
            (base, replace(info, multiprocessors=114)),
        )
    }  # fmt: skip
    assert len(keys) == 13
    # of a sum in whatever order nothing of its epilogue
    pre = layer(product(64, 32, 16, "float32"), "relu", "pre")
    assert tuned.key_of(base, info, True) == tuned.key_of(pre, info, True)
    assert nf.__version__ in tuned.key_of(base, info, True)


@planning
def test_a_kept_way_is_taken_where_it_is_switched_on(monkeypatch, kept_in):
    made = layer(product(2048, 2048, 2048, "float32", turned=True))
    default = tiers.choose(made, HOPPER)[1]
    name = tiers.ways(made, HOPPER)[0][0]
    tuned.write(tuned.key_of(made, HOPPER, False), name)
    assert str(tuned.choose(made, HOPPER)[1].tiling) == str(default.tiling)
    monkeypatch.setenv(tuned.VARIABLE, "1")
    assert name.startswith(f"cores: {tuned.choose(made, HOPPER)[1].tiling}")
    for name, _, plan in tiers.ways(made, HOPPER):  # with the copies that a name ends in
        tuned.write(tuned.key_of(made, HOPPER, False), name)
        assert tiers._launched(tuned.choose(made, HOPPER)[1]) == tiers._launched(plan), name
    assert tuned.kept(replace(made, m=2049), HOPPER) == ""
    # one that belongs to the sum is that of every product with this sum
    other = tiers.ways(made, HOPPER, True)[-1][0]
    tuned.write(tuned.key_of(made, HOPPER, True), other)
    pre = layer(product(2048, 2048, 2048, "float32", turned=True), "relu", "pre")
    assert tuned.kept(made, HOPPER) == tuned.kept(pre, HOPPER) == other


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "key": "another", "way": "x"}', "\0"]
)
def test_a_damaged_file_is_named_and_ignored(text, monkeypatch, kept_in):
    key = tuned.key_of(product(64, 32, 16, "float32"), HOPPER, False)
    path = tuned.write(key, "cores: x")
    assert tuned.read(key)["way"] == "cores: x"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"{path.name}.* is ignored"):
        assert tuned.read(key) is None
    assert tuned.write(key, "cores: y", seconds=1.5) == path
    assert tuned.read(key)["way"] == "cores: y"


def test_writers_at_once_leave_a_whole_file(kept_in):
    key, wrong = "a product", []

    def write(number):
        for i in range(40):
            tuned.write(key, f"way {number} {i}" * 50)
            found = tuned.read(key)
            if found is None or not found["way"].startswith("way "):
                wrong.append(found)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [x.name for x in kept_in.iterdir()] == [tuned.path_of(key).name]


# --- what runs ------------------------------------------------------------------------------------
def there(*shape, dtype="float32"):
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)
    return nf.to_device(values, "cuda")


@pytest.fixture
def last_is_fastest(monkeypatch):
    """Times by which the way that was tried last is the fastest."""
    from numfuse.backends.cuda.call import tuner

    monkeypatch.setattr(
        tuner, "_times", lambda runs, rounds=1: {x: 1.0 / (1 + i) for i, x in enumerate(runs)}
    )


@running
@pytest.mark.parametrize("reorder", [False, True])
def test_what_was_tuned_is_what_another_process_runs(reorder, monkeypatch, last_is_fastest):
    """Guards: a choice is replayed whole, with its copies, and without `reorder` to the bit."""
    from numfuse.backends.cuda.call import tuner

    a, w, bias = there(20, 12), there(12, 9), there(9)
    call = lambda: nf.matmul_bias_activation(a, w, bias, "gelu")  # noqa: E731
    wanted, before = nf.to_numpy(call()), nf.last_call()
    (choice,) = nf.tune("matmul_bias_activation", a, w, bias, "gelu", reorder=reorder)
    assert choice.way and choice.tried > 1 and choice.seconds < choice.before == 1.0
    assert json.loads(Path(choice.file).read_text())["way"] == choice.way
    call()
    assert str(nf.last_call().tiling) == str(before.tiling)  # it is off by default
    monkeypatch.setenv(tuned.VARIABLE, "1")
    asked, choose = [], tuned.choose
    monkeypatch.setattr(tuned, "choose", lambda *of: asked.append(of) or choose(*of))
    program = tuner._recorded(call).program  # recorded anew, as another process does
    again, told = nf.to_numpy(call()), nf.last_call()
    # (a way's name has more: the length of the parts of K, and what is copied before)
    assert choice.way.startswith(f"{told.tier}: {told.tiling}")
    ((made, info),) = asked
    ways = tiers.ways(made, info, reorder)
    plan = next(plan for name, _, plan in ways if name == choice.way)
    launched = [(prepared.launch.kernel, prepared.launch.grid) for prepared, _ in program._launches]
    assert launched == tiers._launched(plan)
    if not reorder:
        np.testing.assert_array_equal(again, wanted)
    np.testing.assert_allclose(again, wanted, rtol=1e-5, atol=1e-6)


@running
def test_all_products_of_a_function_are_tuned_and_column_sums_keep_their_order(last_is_fastest):
    grad, a, w, bias = there(20, 9), there(20, 12), there(12, 9), there(9)
    choices = nf.tune(nf.matmul_bias_activation_bwd, grad, a, w, bias, "gelu")
    assert len(choices) == 3
    assert [x.way == "" for x in choices] == ["backward" in x.product for x in choices]

    def step(a, w):
        hidden = nf.matmul_bias_activation(a, w, None, "relu")
        return {"value": nf.matmul_bias_activation(hidden, there(9, 5)), "extra": (1, None, "x")}

    assert len(nf.tune(step, a, w)) == 2


@running
def test_a_way_with_another_result_is_not_taken(monkeypatch, last_is_fastest):
    from numfuse.backends.cuda.call import tuner

    seen = []

    def agree(wanted, given, product):
        seen.append(len(given))
        return False

    monkeypatch.setattr(tuner, "agree", agree)
    (choice,) = nf.tune(nf.matmul_bias_activation, there(20, 12), there(12, 9))
    assert seen and choice.way == "" and choice.tried == 1


@running
def test_results_agree_within_what_another_order_may_change():
    from numfuse.backends.cuda.call.tuner import agree

    made = product(64, 1024, 16, "float32")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 1024), np.float32), rng.standard_normal((1024, 16), np.float32)
    value = a @ b
    other = (a[:, :512] @ b[:512] + a[:, 512:] @ b[512:]).astype(np.float32)
    assert agree([value], [other], made) and agree([value], [value], made)
    wrong = value.copy()
    wrong[3:7] = 0
    for bad in (wrong, value * 1.1, value[:-1], np.where(value > 2, np.nan, value)):
        assert not agree([value], [bad], made)
    assert not agree([value], [], made)
    odd = value.copy()
    odd[0, :2] = np.inf, np.nan
    assert agree([odd], [odd.copy()], made) and not agree([odd], [value], made)


@running
def test_times_are_of_every_way_and_the_devices_own():
    from numfuse.backends.cuda.call import tuner

    a, w = there(20, 12), there(12, 9)
    made, seconds = tuner.measured(lambda: nf.matmul_bias_activation(a, w), nf.to_numpy, rounds=2)
    assert (made.m, made.k, made.n) == (20, 12, 9)
    assert len(seconds) > 1 and "" in seconds and all(x > 0 for x in seconds.values())
    with pytest.raises(ValueError, match="must have one product, got 0"):
        tuner.measured(lambda: nf.silu_mul(a, a), nf.to_numpy)


@running
def test_what_has_nothing_to_tune_says_so():
    x = np.ones((3, 3), np.float32)
    assert nf.tune("silu_mul", there(3, 3), there(3, 3)) == ()
    with pytest.raises(ValueError, match="must make calls on arrays of a CUDA device, got none"):
        nf.tune("silu_mul", x, x)
    with pytest.raises(ValueError, match="must be a name of numfuse, got 'no_such'"):
        nf.tune("no_such", x)
    with pytest.raises(TypeError, match="must be callable, or a name, got int"):
        nf.tune(3, x)
