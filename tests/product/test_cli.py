"""The command line: what a person types, what they read, what it leaves behind."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numfuse
from numfuse.__main__ import build_parser, main
from numfuse.cli import bench, network, peers, report, timing

SMALL = ["--sizes", "24x40x16", "--threads", "1", "--rounds", "2", "--peers", "NumPy"]


def python(*arguments, cwd=None):
    """A fresh process that finds the numfuse under test wherever it runs."""
    paths = [str(Path(numfuse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
    )


def without(module, *arguments):
    """The command line in a process in which `module` cannot be imported."""
    return python(
        "-c",
        f"import sys; sys.modules[{module!r}] = None; from numfuse.__main__ import main; "
        f"sys.exit(main({list(arguments)!r}))",
    )


# --- demo -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo as the README has it, run once."""
    directory = tmp_path_factory.mktemp("demo")
    done = python("-m", "numfuse", "demo", cwd=directory)
    assert done.returncode == 0, done.stderr
    return done, directory


@pytest.mark.long
def test_demo_learns_the_digits_and_says_so_in_its_last_line(demo):
    last = demo[0].stdout.splitlines()[-1]
    assert re.fullmatch(r"test accuracy: [01]\.\d{4}", last)
    assert float(last.split()[-1]) >= 0.97


@pytest.mark.long
def test_demo_draws_a_picture(demo):
    from matplotlib.image import imread

    assert [path.name for path in demo[1].iterdir()] == ["numfuse_demo.png"]
    picture = imread(demo[1] / "numfuse_demo.png")
    height, width = picture.shape[:2]
    assert 500 <= height <= 2000 and 1000 <= width <= 4000
    ink = picture[..., :3].min(axis=-1) < 0.9
    # The curves are on the left, the digits on the right; an empty axis has about 1 % ink.
    assert ink[:, : width // 2].mean() > 0.01
    assert ink[:, width // 2 :].mean() > 0.1


@pytest.mark.long
def test_demo_compares_its_step_with_numpy_and_checks_the_gradients(demo):
    text = demo[0].stdout
    assert "time per training step" in text
    assert re.search(r"NumPy .* x numfuse's time; gradients agree to \de-0[5-9]", text)
    assert re.search(r"is the fastest here|take the same time", text)
    assert "running on cpu" in text
    assert "compiling kernels, once; cached afterwards" in text


@pytest.mark.long
def test_demo_leaves_the_terminal_alone_when_its_output_is_a_file(demo):
    assert "\x1b" not in demo[0].stdout
    assert demo[0].stderr == ""


@pytest.mark.long
def test_demo_on_another_backend_and_path(tmp_path):
    path = tmp_path / "named.png"
    done = python(
        *("-m", "numfuse", "demo", "--backend", "reference", "--epochs", "1"),
        *("--batch", "64", "--seed", "5", "--output", str(path)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "running on reference" in done.stdout
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "cuba"], "backend must be one of"),
        (["--output", "no/such/directory/x.png"], "no directory"),
    ],
)
def test_demo_refuses_in_a_sentence(arguments, sentence, tmp_path):
    done = python("-m", "numfuse", "demo", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("demo", "sklearn", "demo"), ("demo", "matplotlib", "demo"), ("bench", "rich", "bench")],
)
def test_missing_extra_is_one_sentence(command, module, extra):
    done = without(module, command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert module in line and f'pip install "numfuse[{extra}]"' in line


def test_every_form_of_the_step_is_the_derivative_of_the_loss():
    generator = np.random.default_rng(1)
    x, labels = generator.random((40, network.PIXELS)), generator.integers(0, 10, 40)
    single = network.Parameters.random(generator)
    p = network.Parameters(single.flat.astype(np.float64))
    g = network.Parameters(np.zeros_like(p.flat))
    direction = generator.standard_normal(p.flat.shape)
    step = 1e-6

    def loss(sign):
        moved = network.Parameters(p.flat + sign * step * direction)
        return network.unfused_gradients(moved, network.Parameters(g.flat.copy()), x, labels)

    slope = (loss(1) - loss(-1)) / (2 * step)
    for gradients_of in (network.unfused_gradients, network.fused_gradients):
        g.flat[:] = np.nan
        gradients_of(p, g, x, labels)
        assert g.flat @ direction == pytest.approx(slope, rel=1e-6)


# --- info -----------------------------------------------------------------------------------------


def test_info_tells_what_was_found_and_why_the_rest_was_not():
    done = python("-m", "numfuse", "info")
    assert done.returncode == 0, done.stderr
    assert "cpu: available" in done.stdout
    for fact in ("vector width", "threads", "threading layer", "cache"):
        assert re.search(rf"^  .*{fact} +\S", done.stdout, re.MULTILINE), fact
    for name, status in numfuse.backends().items():
        if not status:
            assert f"{name}: not available\n  {status}" in done.stdout


def test_info_as_json_names_every_backend(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["numfuse"] == numfuse.__version__
    assert set(found["backends"]) == set(numfuse.backends())
    assert found["backends"]["cpu"]["available"] is True


def test_help_names_the_commands_and_needs_no_compiler():
    done = python(
        "-c",
        "import sys; from numfuse.__main__ import build_parser as p; print(p().format_help());"
        "sys.exit('numba' in sys.modules)",
    )
    assert done.returncode == 0, done.stderr
    for command in ("demo", "info", "bench"):
        assert command in done.stdout


# --- bench ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A tiny measurement, all operations and both dtypes, through the command line."""
    directory = tmp_path_factory.mktemp("bench")
    page = directory / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    done = python(
        *("-m", "numfuse", "bench", *SMALL, "--json", "b.json", "--markdown", "page.md"),
        *("--operations", *peers.OPERATIONS, "--uses", "1 row"),
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    assert {x.name for x in directory.iterdir()} == {"page.md", "b.json", "numfuse_bench.png"}
    return done.stdout, json.loads((directory / "b.json").read_text()), page.read_text()


@pytest.mark.long
def test_bench_measures_every_operation_and_checks_every_result(measured):
    cases = measured[1]["cases"]
    assert {(case["operation"], case["dtype"]) for case in cases} == {
        (operation, dtype) for operation in peers.OPERATIONS for dtype in ("float32", "float64")
    }
    for case in cases:
        assert set(case["seconds"]) == set(case["error"]) == {"numfuse", "NumPy"}
        assert all(seconds > 0 for seconds in case["seconds"].values())
        assert all(error <= case["tolerance"] for error in case["error"].values())
        assert case["failed"] == {}
        assert (case["peak_gflops"] is None) == case["operation"].startswith("gated")


@pytest.mark.long
def test_bench_shows_uses_before_kernels(measured):
    printed, found, page = measured
    (row,) = found["uses"]
    assert row["use"] == "NumPy, 1 row through 64-64-64-1 relu" and not row["failed"]
    assert set(row["seconds"]) == {"numfuse", "NumPy"}
    for text in (printed, page):
        assert 0 < text.index("Uses: ") < text.index(row["use"]) < text.index("float32, 1 thread")


@pytest.mark.long
def test_bench_finds_a_wrong_result(measured):
    assert bench.wrong_results(measured[1]) == []
    broken = json.loads(json.dumps(measured[1]))
    for value in (1e-2, float("nan")):
        broken["cases"][0]["error"]["numfuse"] = value
        (sentence,) = bench.wrong_results(broken)
        assert "numfuse: forward float32 24x40x16" in sentence


@pytest.mark.long
def test_bench_tables_stand_between_the_marks(measured):
    page = measured[2]
    assert page.startswith(f"before\n{report.BEGIN}\n") and page.endswith(f"{report.END}\nafter\n")
    assert "old" not in page
    assert page.count("| forward | 24x40x16 |") == 2


@pytest.mark.long
def test_bench_says_in_words_where_a_peer_is_faster(measured):
    loser = json.loads(json.dumps(measured[1]))
    loser["cases"] = loser["cases"][:2]
    for case, ours in zip(loser["cases"], (2.0, 0.5), strict=True):
        case["seconds"] = {"numfuse": ours, "NumPy": 1.0}
    lines = report.verdict(loser)
    assert "faster than every peer in 1 of 2 cases" in lines[0]
    assert lines[1:] == [
        "NumPy is 2.00 times as fast as numfuse: forward, float32, 24x40x16, 1 thread."
    ]
    assert "numfuse is faster than every peer" in measured[0]


@pytest.mark.long
def test_bench_draws_every_case_under_the_ceilings(measured, tmp_path, monkeypatch):
    from matplotlib.axes import Axes
    from matplotlib.image import imread

    from numfuse.cli import roofline

    labels, drawn = [], []
    annotate, plot = Axes.annotate, Axes.plot
    monkeypatch.setattr(
        Axes,
        "annotate",
        lambda self, text, *a, **k: (labels.append(text), annotate(self, text, *a, **k))[1],
    )
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: (drawn.append(a), plot(self, *a, **k))[1]
    )
    roofline.draw(tmp_path / "x.png", measured[1])
    ours = {(x, y) for x, y, *mark in drawn if mark == ["o"]}
    for case in measured[1]["cases"]:
        amount = case["flop"] or case["bytes"]
        x = amount / case["bytes"] if case["flop"] else amount / 2**20
        assert pytest.approx((x, amount / case["seconds"]["numfuse"] / 1e9)) in list(ours)
    assert len(ours) == sum(mark == ["D"] for _, _, *mark in drawn) == len(measured[1]["cases"])
    text = " ".join(labels)
    assert "triad" in text and "FMA peak, float32" in text and "FMA peak, float64" in text
    picture = imread(tmp_path / "x.png")
    assert picture.shape[1] >= 1000 and (picture[..., :3].min(axis=-1) < 0.9).mean() > 0.01


@pytest.mark.long
def test_bench_stops_when_its_time_is_up_and_says_what_it_left_out(tmp_path):
    done = python(
        *("-m", "numfuse", "bench", "--sizes", "8", "12", "16", "--threads", "1", "--rounds", "1"),
        *("--dtype", "float32", "--operations", "forward", "gated", "--peers", "NumPy"),
        *("--seconds", "0", "--json", "b.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b.json").read_text())
    (case,) = found["cases"]
    assert found["sessions"][0]["disturbed"]["stretches"] > 0
    assert (case["operation"], case["m"]) == ("forward", 8)
    assert "5 of 6 cases on 1 thread(s) were left out, as the time was up" in done.stdout


def test_a_plain_bench_is_done_in_two_minutes_and_no_other_is_cut():
    def seconds(*arguments):
        return bench.budget(build_parser().parse_args(["bench", *arguments]))

    assert seconds() == seconds("--activation", "silu") == bench.SECONDS < 110
    assert (
        seconds("--sizes", "64") == seconds("--full") == seconds("--dtype", "float32") == math.inf
    )
    assert seconds("--full", "--seconds", "7") == 7


def test_cases_come_by_turns_and_none_is_lost():
    cases = bench.choose_cases(build_parser().parse_args(["bench"]))
    turns = bench.by_turns(cases)
    assert sorted(turns) == sorted(cases)
    groups = {(case[0], case[4]) for case in cases}
    assert {(case[0], case[4]) for case in turns[: len(groups)]} == groups


def test_bench_without_matplotlib_goes_without_a_picture(tmp_path):
    code = (
        "import sys, json; sys.modules['matplotlib'] = None; import importlib.util as u;"
        "find = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n == 'matplotlib' else find(n, *a);"
        "from numfuse.cli.bench import draw; from pathlib import Path;"
        "draw({'cases': [{}]}, Path('x.png'), print)"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'pip install "numfuse[bench]"' in done.stdout
    assert not list(tmp_path.iterdir())


def test_bench_that_cannot_write_says_so_in_a_sentence_before_it_measures(tmp_path):
    done = python("-m", "numfuse", "bench", "--json", "no/such/directory/b.json", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "numfuse bench: no directory for no/such/directory/b.json\n"


def test_bench_whose_file_cannot_be_written_says_so_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda arguments, advance: {})
    monkeypatch.setattr(report, "show", lambda found, console: None)
    arguments = build_parser().parse_args(["bench", "--json", str(tmp_path)])
    assert bench.run(arguments) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_a_peer_that_fails_is_reported_and_the_rest_goes_on(monkeypatch):
    from numfuse.cli import session

    def broken(case, operands):
        raise RuntimeError("no compiler")

    monkeypatch.setitem(peers.PEERS, "JAX", ("jax", broken))
    plan = {"peers": ["NumPy", "JAX"], "threads": 1, "rounds": 1, "sample": 0.0, "rest": False}
    case = peers.Case("gated", 8, 8, 0, "float64", "silu")
    found = session.run_case(case, {**plan, "seed": 0}, np.random.default_rng(0))
    assert found["failed"] == {"JAX": "RuntimeError: no compiler"}
    assert set(found["seconds"]) == {"numfuse", "NumPy"}


def assert_same_work(peer, case):
    if not peers.installed(peer):
        pytest.skip(f"{peers.PEERS[peer][0]} is not installed")
    operands = peers.draw_operands(case, np.random.default_rng(2))
    with numfuse.use_backend("reference"):
        right = timing.arrays(peers.contestant("numfuse", case, operands)())
    try:
        theirs = peers.contestant(peer, case, operands)
        results = timing.arrays(theirs())
    except Exception as error:
        if "InvalidCxxCompiler" not in f"{type(error).__name__} {error}":
            raise
        pytest.skip("torch.compile finds no C++ compiler")
    assert timing.relative_error(results, right) <= peers.tolerance(case)
    again = timing.arrays(theirs())  # in-place scratch must not change a second call
    assert timing.relative_error(again, right) <= peers.tolerance(case)


@pytest.mark.parametrize("operation", peers.OPERATIONS)
@pytest.mark.parametrize(
    ("peer", "activation"),
    [
        (peer, activation)
        for peer in peers.PEERS
        for activation in peers.ACTIVATIONS
        if peer != "torch.compile" or activation == "gelu"  # seconds each: one stands for all
    ],
)
def test_peers_do_the_same_work(peer, operation, activation):
    assert_same_work(peer, peers.Case(operation, 33, 17, 21, "float64", activation))


VIEWS = [layout for layout in peers.LAYOUTS if layout != "contiguous"]


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("operation", peers.PRODUCTS)
@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer != "torch.compile"])
def test_peers_do_the_same_work_on_views(peer, operation, layout):
    assert_same_work(peer, peers.Case(operation, 33, 17, 21, "float64", "silu", layout))


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operands_in_a_layout_are_views_of_arrays_of_their_own(dtype, layout):
    case = peers.Case("backward", 33, 17, 21, dtype, "gelu", layout)
    o = peers.draw_operands(case, np.random.default_rng(3))
    assert (o.a.shape, o.b.shape, o.grad.shape) == ((33, 21), (21, 17), (33, 17))
    assert o.a.dtype == o.b.dtype == o.grad.dtype == dtype
    size = o.a.itemsize
    strides = {
        "transposed": ((size, 33 * size), (size, 21 * size), (17 * size, size)),
        "sliced": ((53 * size, size), (49 * size, size), (49 * size, size)),
        "strided": ((42 * size, 2 * size), (34 * size, 2 * size), (34 * size, size)),
    }
    assert (o.a.strides, o.b.strides, o.grad.strides) == strides[layout]
    # JAX is given the whole arrays and takes the same views of them.
    for view, x in zip(peers.LAYOUTS[layout], (o.a, o.b, o.grad), strict=True):
        whole = x if x.base is None else x.base
        assert whole.flags.c_contiguous and whole.base is None
        np.testing.assert_array_equal(view.take(whole), x)
    assert all(x.flags.c_contiguous for x in peers.contestant("numfuse", case, o)())


def test_only_the_full_grid_has_views_and_of_products_alone():
    def layouts(*arguments):
        cases = bench.choose_cases(build_parser().parse_args(["bench", *arguments]))
        assert len(set(cases)) == len(cases)
        return {(case[0], case[-1]) for case in cases if case[-1] != "contiguous"}

    assert layouts() == layouts("--quick") == set()
    assert layouts("--full") == {(o, x) for o in ("forward", "backward") for x in VIEWS}
    assert layouts("--full", "--sizes", "64") == set()
    chosen = layouts("--sizes", "64", "--layouts", "strided")
    assert chosen == {(operation, "strided") for operation in peers.PRODUCTS}


def test_the_floor_is_the_longer_of_arithmetic_and_memory():
    def case(*fields):
        made = peers.Case(*fields)
        return {**made._asdict(), "flop": made.flop, "bytes": made.bytes}

    def floor(case, peak):
        return report.floor(case, peak, 10.0)

    # 2 m n k flops; a, b and the result with the bias once: 2^20 + 2^20 + 2^20 + 2^10 elements.
    cube = case("forward", 1024, 1024, 1024, "float32", "gelu")
    assert cube["flop"] == 2 << 30 and cube["bytes"] == 4 * ((3 << 20) + (1 << 10))
    assert floor(cube, 100.0) == (pytest.approx((2 << 30) / 100e9), "arithmetic")
    assert floor(cube, 10000.0) == (pytest.approx(cube["bytes"] / 10e9), "memory")
    # A single row is limited by reading b.
    row = case("forward", 1, 1024, 1024, "float64", "gelu")
    assert floor(row, 100.0) == (pytest.approx(row["bytes"] / 10e9), "memory")
    # Three gradients, their operands, bias and d_bias.
    backward = case("backward", 8, 16, 32, "float64", "gelu")
    assert backward["bytes"] == 8 * (2 * (8 * 32 + 32 * 16 + 16) + 8 * 16)
    saved = case("backward_saved", 8, 16, 32, "float64", "gelu")
    assert saved["bytes"] == 8 * (2 * (8 * 32 + 32 * 16 + 8 * 16) + 16)
    strided = case("forward", 8, 16, 32, "float64", "gelu", "strided")
    assert strided["bytes"] == 8 * (2 * (8 * 32 + 32 * 16) + 8 * 16 + 16)
    gated = case("gated", 1024, 1024, 0, "float32", "gelu")
    assert floor(gated, None) == (pytest.approx(12 * (1 << 20) / 10e9), "memory")


@pytest.mark.long
def test_tables_say_which_floor_applies_and_its_share(measured):
    for line in measured[2].splitlines():
        if line.startswith("| operation"):
            head = [cell.strip() for cell in line.split("|")]
        elif re.match(r"\| (forward|backward|gated)", line):
            row = dict(zip(head, (cell.strip() for cell in line.split("|")), strict=True))
            assert re.fullmatch(r"\S+ (ns|µs|ms|s) (arithmetic|memory)", row["floor"])
            assert re.fullmatch(r"\d+%", row["of floor"])
            assert not row["operation"].startswith("gated") or row["floor"].endswith("memory")
    assert "of floor" in head


@pytest.mark.parametrize("text", ["0", "3x4", "1x2x3x4", "axbxc", "-5"])
def test_bench_refuses_a_size_that_is_none(text):
    with pytest.raises(Exception, match="expected N or MxNxK"):
        bench.size(text)


def test_threads_beyond_the_cores_are_left_out_with_a_sentence():
    arguments = build_parser().parse_args(["bench", "--threads", "1", "2", "3"])
    threads, notes = bench.choose_threads(arguments, cores=[4, 6])
    assert threads == [1, 2]
    assert notes == ["3 threads are left out: this process may use 2 core(s)"]


def test_interleaving_runs_everyone_equally_often():
    calls = {"one": 0, "two": 0}

    def contestant(name):
        def call():
            calls[name] += 1

        return call

    seconds = timing.interleave(
        {name: contestant(name) for name in calls}, rounds=5, sample=0.0, rest=0.0
    )
    assert {name: len(figures) for name, figures in seconds.items()} == {"one": 5, "two": 5}
    assert calls == {"one": 12, "two": 12}  # 2 to calibrate, then one untimed and one timed a round


def test_a_disturbed_stretch_is_timed_again_but_not_for_ever():
    speeds = iter([10.0, 10.0, 10.0, 5.0, 10.0, 9.5] + [1.0] * 100)
    probe = timing.Probe(lambda: next(speeds))
    runs = []
    seconds = timing.interleave(
        {"one": lambda: runs.append(1)}, rounds=3, sample=0.0, rest=0.0, probe=probe
    )
    # Calm; calm before but not after, then calm; never calm again.
    assert len(seconds["one"]) == 3
    assert (probe.stretches, probe.disturbed) == (3 + timing.TRIES, 1 + timing.TRIES)
    assert len(runs) == 2 + 2 * probe.stretches


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (1.234e-3, "1.23 ms"), (4.5e-6, "4.5 µs")]
)
def test_times_are_readable(seconds, text):
    assert timing.readable(seconds) == text
