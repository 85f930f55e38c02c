"""Calls on arrays of a CUDA device: where they run, what they give back, what they refuse.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.

Guards: nothing is copied to the host, every check is applied to every call, and memory comes back
(docs/cuda.md).
"""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from arrays import NUMPY_KNOWS_DLPACK_1, bits
from conftest import SIMULATED, unavailable
from on_device import poisoned

import numfuse as nf
from numfuse.runtime import dispatch, dlpack

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

from numfuse.backends.cuda.call.arrays import DeviceArray, pool_of  # noqa: E402
from numfuse.backends.cuda.call.memory import Pool, size_class  # noqa: E402
from numfuse.backends.cuda.call.record import REPLAY  # noqa: E402
from numfuse.backends.cuda.driver.devices import device  # noqa: E402

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, "cuda")


def there(x):
    return nf.to_device(x, "cuda")


@pytest.fixture
def operands():
    rng = np.random.default_rng(3)

    def make(dtype=np.float32, m=9, n=7, k=5):
        shapes = ((m, n), (m, k), (k, n), (n,))
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    return make


def same(given, wanted):
    return all(
        (x is None and y is None) or (bits(nf.to_numpy(x)) == bits(y)).all()
        for x, y in zip(given, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_on_the_device_gives_what_it_gives_for_numpy_arrays(operands, dtype):
    arrays = operands(dtype)
    grad, a, b, bias = map(there, arrays)
    for _ in range(2):  # recorded, then repeated
        out = nf.matmul_bias_activation(a, b, bias, "tanh")
        gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh")
        assert isinstance(out, DeviceArray) and out.dtype == dtype
        wanted = nf.matmul_bias_activation(*arrays[1:], "tanh", backend="cuda")
        assert same([out], [wanted])
        wanted = nf.matmul_bias_activation_bwd(*arrays, "tanh", backend="cuda")
        assert type(gradients) is type(wanted) and same(gradients, wanted)
    assert dispatch._SERVED[DeviceArray] is not None  # its adapter is looked for once


def test_a_repeated_call_reads_its_own_arrays(operands):
    first, second = operands(), operands()
    out = [nf.matmul_bias_activation(*map(there, x[1:]), "relu") for x in (first, second)]
    wanted = [nf.matmul_bias_activation(*x[1:], "relu", backend="cuda") for x in (first, second)]
    assert same(out, wanted) and not same(out[:1], wanted[1:])


@pytest.mark.parametrize("source, out", [((1, 8), (8,)), ((8,), (1, 8)), ((4, 2), (2, 4))])
def test_a_copy_of_another_shape_is_refused(source, out):
    from numfuse.backends.cuda.plan.batches import copy
    from numfuse.backends.cuda.plan.program import Recorder

    rec = Recorder(device(0))
    with pytest.raises(AssertionError, match="equal sizes"):
        copy(rec, *(rec.fresh(shape, "float32") for shape in (source, out)))


@pytest.mark.parametrize("name", ["grad", "a", "b", "residual"])
def test_none_for_an_operand_that_must_be_there_is_one_type_error(operands, name):
    grad, a, b, bias = map(there, operands())
    given = {"grad": grad, "a": a, "b": b, "bias": bias, "residual": grad, name: None}
    with pytest.raises(TypeError) as caught:
        nf.matmul_bias_residual_bwd(**given)
    assert str(caught.value) == f"{name} must be an array, got None"
    if name == "grad":
        return
    del given["grad"]
    for call in (
        lambda: nf.matmul_bias_residual(**given),
        lambda: nf.matmul_bias_residual_jvp(**given, a_dot=a, b_dot=b, bias_dot=bias,
                                            residual_dot=grad),
        lambda: nf.matmul_bias_residual_double_bwd(a, b, bias, grad, grad, **given),
    ):  # fmt: skip
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == f"{name} must be an array, got None"


#: Calls by the names of their operands in the order of the signature, None left out here or there.
CALLS = {
    "forward": ("matmul_bias_activation", "a b bias", ("tanh",), {}),
    "saved": ("matmul_bias_activation", "a b -", ("tanh",), {"return_pre_activation": True}),
    "residual": ("matmul_bias_residual", "a b - grad", (), {}),
    "backward": ("matmul_bias_activation_bwd", "grad a b bias", ("tanh",), {"guard": False}),
    "from the saved": ("matmul_bias_activation_bwd", "grad a b bias", ("tanh",), {"pre": True}),
    "some": ("matmul_bias_activation_bwd", "grad a b -", ("tanh",), {"needs": ("b",)}),
    "a list": ("matmul_bias_activation_bwd", "grad a b bias", ("tanh",), {"needs": ["b", "a"]}),
    "residual backward": ("matmul_bias_residual_bwd", "grad a b bias residual", (), {}),
    "second": ("matmul_bias_activation_double_bwd", "u v w grad a b bias", ("tanh",), {}),
    "second, some": ("matmul_bias_activation_double_bwd", "- v - grad a b bias", ("tanh",), {}),
    "residual second": (
        "matmul_bias_residual_double_bwd", "u v w z grad a b bias residual", (), {}
    ),
    "tangent": ("matmul_bias_activation_jvp", "a b bias u - w", ("tanh",), {}),
    "residual tangent": ("matmul_bias_residual_jvp", "a b bias residual u v w z", (), {}),
    "gate": ("silu_mul", "grad z", (), {}),
    "gate backward": ("silu_mul_bwd", "grad z residual", (), {}),
    "gate second": ("activation_mul_double_bwd", "grad - z residual z", ("tanh",), {}),
    "gate tangent": ("activation_mul_jvp", "grad z - residual", ("tanh",), {}),
}  # fmt: skip


def test_a_call_that_comes_again_is_known_and_has_its_operands_in_place(operands):
    for case, (name, words, rest, options) in CALLS.items():
        REPLAY.clear()
        seen, hits = [], REPLAY.statistics().hits
        for _ in range(3):
            (grad, a, b, bias), (z, u, v, w) = operands(m=3, n=2, k=4), operands(m=3, n=2, k=4)
            residual = operands(m=3, n=2, k=4)[0]
            named = {
                "grad": grad, "a": a, "b": b, "bias": bias, "residual": residual, "z": z, "u": u,
                "v": v, "w": w, "-": None,
            }  # fmt: skip
            arrays = [named[word] for word in words.split()]
            host = dict(options)
            if host.pop("pre", False):
                host["pre_activation"] = (a @ b + bias).astype(np.float32)
            on = {key: there(x) if key == "pre_activation" else x for key, x in host.items()}
            moved = (None if x is None else there(x) for x in arrays)
            given = getattr(nf, name)(*moved, *rest, **on)
            wanted = getattr(nf, name)(*arrays, *rest, **host, backend="cuda")
            if not isinstance(wanted, tuple):
                given, wanted = (given,), (wanted,)
            assert type(given) is type(wanted) and same(given, wanted), case
            found = REPLAY.statistics()
            seen.append((found.entries, found.hits - hits))
        # NumPy's arrays are a second entry of the same table
        assert seen == [(2, 0), (2, 2), (2, 4)], case


def test_a_block_with_a_backend_of_its_own_is_one_more_call_and_no_more(operands):
    x = there(operands()[1])
    REPLAY.clear()
    for _ in range(3):
        nf.silu_mul(x, x)
        for precision in ("ieee", "tf32"):
            with nf.use_backend("cuda", precision=precision):
                nf.silu_mul(x, x)
    assert REPLAY.statistics().entries == 2


def test_arrays_of_two_libraries_that_look_alike_are_two_calls(operands, monkeypatch):
    from numfuse.adapters import cuda as functions
    from numfuse.backends.cuda.call import foreign

    class Theirs:
        def __init__(self, x):
            self.x = x

    class Kind(foreign.Own):
        def parts(self, x):
            return foreign.Own.parts(x.x)

        def maker(self, *form):
            make = super().maker(*form)
            return lambda: Theirs(make())

        def address(self, x):
            return x.x.address

    monkeypatch.setitem(foreign.KINDS, Theirs, Kind())
    x = there(operands()[1])
    for _ in range(3):
        assert type(functions.activation_mul(Theirs(x), Theirs(x), "silu")) is Theirs
        assert type(functions.activation_mul(x, x, "silu")) is DeviceArray


@pytest.mark.parametrize("needs", [("a", "b", "bias"), ("b",), ("bias", "a")])
@pytest.mark.parametrize("activation", ["gelu", "none"])
def test_a_weight_and_its_gradient_may_be_transposed(operands, needs, activation):
    """Guards: PyTorch's gradient of a weight lies as the weight does, without a copy."""
    from numfuse.adapters import cuda as functions
    from numfuse.operations import OPERATIONS

    grad, a, b, bias = operands(m=9, n=6, k=5)
    weight = np.ascontiguousarray(b.T)
    x = (*(there(x) for x in (grad, a, weight, bias)), None)
    operation = OPERATIONS["matmul_bias_activation_bwd"]
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend="cuda")
    for _ in range(3):
        found = functions.run(
            operation, x, activation, (False, True), needs, None, None, functions.checked, 2
        )
        assert [name for name in found._fields if getattr(found, name) is not None] == [
            f"d_{name}" for name in ("a", "b", "bias") if name in needs
        ]
        for name in needs:
            y = nf.to_numpy(getattr(found, f"d_{name}"))
            z = getattr(wanted, f"d_{name}")
            z = z.T if name == "b" else z
            assert y.shape == z.shape
            assert np.abs(y - z).max() <= 1e-5 * np.abs(z).max()
    y = functions.run(
        OPERATIONS["matmul_bias_activation"], (x[1], x[2], x[3]), activation, (False,), (), None,
        None, functions.checked, 1,
    )  # fmt: skip
    assert same([y], [nf.matmul_bias_activation(a, b, bias, activation, backend="cuda")])


def test_arrays_by_keyword_are_in_place(operands):
    from numfuse.adapters import cuda as functions

    _, a, b, bias = operands(m=6, n=6, k=6)
    for _ in range(3):
        given = functions.matmul_bias_activation(there(a), bias=there(bias), b=there(b))
        other = functions.matmul_bias_activation(there(b), bias=there(bias), b=there(a))
        wanted = [
            nf.matmul_bias_activation(x, y, bias, backend="cuda") for x, y in ((a, b), (b, a))
        ]
        assert same([given, other], wanted)


def test_a_call_that_only_looks_like_a_known_one_is_not_taken_for_it(operands):
    _, a, _, _ = operands(m=8, n=8, k=8)
    whole = there(np.concatenate([a, a[:1]]))
    views = whole[:8], whole[1:], whole[:8].T, whole[7::-1], whole[:8, 1:]
    hosts = a, np.concatenate([a[1:], a[:1]]), a.T, a[::-1], a[:, 1:]
    for _ in range(2):
        for view, host in zip(views, hosts, strict=True):
            for activation in ("silu", nf.activations()["tanh"]):
                for guard in (True, False):
                    given = nf.activation_mul_bwd(view, view, view, activation, guard=guard)
                    wanted = nf.activation_mul_bwd(
                        host, host, host, activation, guard=guard, backend="cuda"
                    )
                    assert same(given, wanted)
        with nf.use_backend("cuda", precision="bf16x6"):
            assert same([nf.silu_mul(views[0], views[2])], [nf.silu_mul(a, a.T, backend="cuda")])
        with pytest.raises(ValueError, match="backend must be 'cuda'"):
            nf.silu_mul(views[0], views[0], backend="cpu")


def test_views_are_read_where_they_are(operands):
    _, a, b, bias = operands(m=8, k=6)
    on = there(a), there(b), there(bias)
    out = nf.matmul_bias_activation(on[0][::2, ::-1], on[1][::-1], on[2][::-1], "none")
    wanted = nf.matmul_bias_activation(a[::2, ::-1], b[::-1], bias[::-1], "none", backend="cuda")
    assert same([out], [wanted])
    assert same([nf.silu_mul(on[0].T, on[0].T)], [nf.silu_mul(a.T, a.T, backend="cuda")])
    assert on[0].reshape(4, -1).shape == (4, 12)
    with pytest.raises(ValueError, match="without a copy"):
        on[0].T.reshape(-1)


def test_outputs_of_the_caller_are_written_and_returned(operands):
    grad, a, b, bias = operands()
    on = [there(x) for x in (grad, a, b, bias)]
    outs = there(np.full_like(a, np.nan)), None, there(np.full_like(bias, np.nan))
    for _ in range(2):
        given = nf.matmul_bias_activation_bwd(*on, "silu", out=outs)
        assert given.d_a is outs[0] and given.d_bias is outs[2]
        wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend="cuda")
        assert same(given, wanted)
    x = there(a)
    assert nf.silu_mul(x, on[1], out=x) is x
    assert same([x], [nf.silu_mul(a, a, backend="cuda")])


def test_an_output_over_an_operand_is_refused_every_time(operands):
    _, a, _, _ = operands(m=5, n=5, k=5)
    x, other = there(a), there(a)
    for _ in range(2):
        nf.matmul_bias_activation(x, x, out=other)
        with pytest.raises(ValueError, match="share memory"):
            nf.matmul_bias_activation(x, x, out=x)


def test_what_is_not_on_the_device_is_refused(operands):
    _, a, b, _ = operands()
    x = there(a)
    with pytest.raises(TypeError, match=r"b must be on cuda:0 .*numfuse.to_device\(b, 'cuda'\)"):
        nf.matmul_bias_activation(x, b)
    with pytest.raises(TypeError, match="out must be on cuda:0"):
        nf.silu_mul(x, x, out=a)
    with pytest.raises(TypeError, match="b must be an array, got None"):
        nf.matmul_bias_activation(x, None)
    with pytest.raises(ValueError, match="backend must be 'cuda'"):
        nf.silu_mul(x, x, backend="cpu")
    with pytest.raises(TypeError, match="not moved to NumPy unless asked"):
        np.asarray(x)


def test_every_check_of_an_operand_is_applied(operands):
    grad, a, b, bias = (there(x) for x in operands())
    with pytest.raises(ValueError, match="must have shape"):
        nf.matmul_bias_activation(a, b, out=a)
    with pytest.raises(ValueError, match="needs must hold names"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, needs=("c",))
    with pytest.raises(TypeError, match="out must be a tuple"):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, out=a)
    with pytest.raises(ValueError, match="activation must be one of"):
        nf.matmul_bias_activation(a, b, bias, "rleu")


def test_arrays_without_elements(operands):
    a, b, bias = there(np.ones((0, 3), np.float32)), there(np.ones((3, 4), np.float32)), None
    assert nf.matmul_bias_activation(a, b, bias).shape == (0, 4)
    grad = there(np.ones((0, 4), np.float32))
    given = nf.matmul_bias_activation_bwd(grad, a, b)
    assert (nf.to_numpy(given.d_b) == 0).all()
    empty = there(np.ones((0,), np.float32))
    assert nf.silu_mul(empty, empty).shape == (0,)


def test_the_residuals_gradient(operands):
    grad, a, b, bias = operands()
    on = [there(x) for x in (grad, a, b, bias)]
    for residual in (grad[:1], grad[:, :1], grad[0], grad):
        given = nf.matmul_bias_residual_bwd(*on, there(residual.copy()))
        wanted = nf.matmul_bias_residual_bwd(grad, a, b, bias, residual, backend="cuda")
        np.testing.assert_allclose(nf.to_numpy(given.d_residual), wanted.d_residual, rtol=1e-5)
        assert given.d_residual.shape == residual.shape
        assert same(given[:3], wanted[:3])


def test_a_redefined_activation_is_not_the_kept_one(operands):
    a = operands()[1]
    x = there(a)

    @nf.activation(name="of this test")
    def first(x):
        return x + 1.0

    once = nf.to_numpy(nf.activation_mul(x, x, "of this test"))

    @nf.activation(name="of this test")
    def second(x):
        return x + 2.0

    twice = nf.to_numpy(nf.activation_mul(x, x, "of this test"))
    np.testing.assert_allclose(twice - once, a, rtol=1e-4, atol=1e-5)


FORMULAS = {
    "forward": lambda g, a, b, bias: nf.matmul_bias_activation(a, b, bias, "mine"),
    "saved": lambda g, a, b, bias: nf.matmul_bias_activation(
        a, b, bias, "mine", return_pre_activation=True),
    "backward": lambda g, a, b, bias: nf.matmul_bias_activation_bwd(g, a, b, bias, "mine"),
    "second": lambda g, a, b, bias: nf.matmul_bias_activation_double_bwd(
        a, b, bias, g, a, b, bias, "mine"),
    "tangent": lambda g, a, b, bias: nf.matmul_bias_activation_jvp(a, b, bias, a, b, bias, "mine"),
    "gate": lambda g, a, b, bias: nf.activation_mul(a, a, "mine"),
    "gate backward": lambda g, a, b, bias: nf.activation_mul_bwd(a, a, a, "mine"),
    "gate second": lambda g, a, b, bias: nf.activation_mul_double_bwd(a, a, a, a, a, "mine"),
    "gate tangent": lambda g, a, b, bias: nf.activation_mul_jvp(a, a, a, a, "mine"),
}  # fmt: skip


def define(factor):
    return nf.activation(lambda x: factor * x * x, name="mine")


def kept():
    """How much is kept of calls: everything that may hold a formula, or what was made of one."""
    from numfuse.backends.cuda.compile import toolchain

    gc.collect()
    tied = device(0).kept_products._ties._keys.values()  # (others have no formula)
    formulas = sum(1 for kernel in toolchain.kernels() if kernel.formulas)
    return REPLAY.statistics().entries, sum(map(len, tied)), formulas


@pytest.mark.parametrize("place", ["host", "device"])
def test_what_is_kept_of_a_definition_goes_with_it(place, operands):
    given = operands(m=3, n=2, k=4)
    if place == "device":
        given = [there(x) for x in given]
    nf.activation(lambda x: x, name="mine")
    before = kept()
    for case, call in FORMULAS.items():
        for factor in (2.0, 3.0):
            act = define(factor)
            watched = [weakref.ref(act), *(weakref.ref(act.trace(order)) for order in (0, 1))]
            del act
            with nf.use_backend("cuda"):
                for _ in range(2):  # recorded, then repeated
                    call(*given)
            now = kept()
            assert now[0] == before[0] + 1 and now[2] > before[2], case
            assert all(ref() is not None for ref in watched), case
            nf.activation(lambda x: x, name="mine")
            gc.collect()
            assert [ref() for ref in watched] == [None] * 3, case
            assert kept() == before, case


def test_a_definition_that_somebody_has_keeps_what_was_made_of_it(operands):
    from numfuse.backends.cuda.compile import toolchain

    x = there(operands(m=3, n=2, k=4)[1])
    nf.activation(lambda x: x, name="mine")
    before = kept()
    held = define(5.0)
    first = nf.to_numpy(nf.activation_mul(x, x, held))
    own = set(toolchain.kernels())
    for step in range(3):
        define(6.0 + step)
        nf.activation_mul(x, x, "mine")
    assert own <= set(toolchain.kernels())
    assert (nf.to_numpy(nf.activation_mul(x, x, held)) == first).all()
    assert own <= set(toolchain.kernels())
    del held, own
    nf.activation(lambda x: x, name="mine")
    assert kept() == before


def test_a_redefined_derivative_lets_its_own_kernels_go_alone(operands):
    from numfuse.backends.cuda.compile import toolchain

    x = there(operands(m=3, n=2, k=4)[1])
    act = define(9.0)
    nf.activation_mul(x, x, act)
    forward = {kernel for kernel in toolchain.kernels() if kernel.formulas}
    for slope in (5.0, 7.0, 11.0):
        act.derivative(lambda x, slope=slope: slope * x)
        found = nf.activation_mul_bwd(x, x, x, act, needs=("a",)).d_a
        np.testing.assert_allclose(nf.to_numpy(found), slope * nf.to_numpy(x) ** 3, rtol=1e-5)
        gc.collect()
        now = {kernel for kernel in toolchain.kernels() if kernel.formulas}
        assert forward <= now and len(now - forward) == 1


def test_the_call_is_told(operands):
    _, a, b, bias = (there(x) for x in operands())
    nf.matmul_bias_activation(a, b, bias, "relu")
    call = nf.last_call()
    assert call.backend == "cuda" and call.device == str(a.device)
    assert call.kernel.startswith("forward/relu") and call.tiling is not None


def test_dlpack_gives_and_takes_arrays(operands):
    a = operands()[1]
    x = there(a)

    class Foreign:
        """An array of another library, of which the memory is that of x."""

        taken = 0

        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, **options):
            Foreign.taken += 1
            return x.__dlpack__(**options)

    out = nf.silu_mul(Foreign(), Foreign())
    assert Foreign.taken == 2
    assert same([out], [nf.silu_mul(a, a, backend="cuda")])


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_lets_go_of_its_array_once_it_is_done(operands, max_version):
    x = there(operands()[1])
    memory = weakref.ref(x)
    held = dlpack.Imported("x", x.__dlpack__(max_version=max_version))
    assert (held.device, held.address, held.dtype) == ((2, 0), x.address, "float32")
    assert held.writable and not held.copied
    capsule = x.__dlpack__(stream=1)  # and one that nobody takes
    del x
    gc.collect()
    assert memory() is not None
    del held, capsule
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlpack_copies_where_it_is_asked_to(operands, dtype):
    a = operands(dtype)[1]
    x = there(a)[:, ::2]
    for how, device_type in (({"dl_device": (1, 0)}, 1), ({"copy": True}, 2)):
        held = dlpack.Imported("x", x.__dlpack__(max_version=(1, 0), **how))
        assert held.device[0] == device_type and held.address != x.address
        assert held.copied == NUMPY_KNOWS_DLPACK_1
        assert held.shape == x.shape
    if NUMPY_KNOWS_DLPACK_1 and dtype is not ml_dtypes.bfloat16:  # (of which NumPy has none)
        assert (np.from_dlpack(x, device="cpu") == a[:, ::2]).all()
    for how, message in (
        ({"dl_device": (1, 0), "copy": False}, "as a copy, got copy=False"),
        ({"dl_device": (2, 7)}, r"to its own device \(2, 0\) or, as a copy, to the host"),
    ):
        with pytest.raises(BufferError, match=message):
            x.__dlpack__(**how)
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported device"):
        np.from_dlpack(x)  # the error of who takes it arrives, and the capsule goes


def test_a_read_only_array_of_dlpack_is_no_output(operands):
    x = there(operands()[1])
    x = DeviceArray(x.memory, x.address, x.shape, x.strides, x.dtype, False)

    class Foreign:
        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

    if NUMPY_KNOWS_DLPACK_1:
        nf.silu_mul(Foreign(), Foreign())
        with pytest.raises(ValueError, match="out must be writable, got a read-only array"):
            nf.silu_mul(Foreign(), Foreign(), out=Foreign())
    with pytest.raises(BufferError, match="readonly"):
        x.__dlpack__()  # an older capsule cannot say it


def test_the_array_interface_gives_and_takes_arrays(operands):
    a = operands()[1]
    x = there(a)

    class Foreign:
        @property
        def __cuda_array_interface__(self):
            return x.T.__cuda_array_interface__

    out = nf.silu_mul(Foreign(), Foreign())
    assert same([out], [nf.silu_mul(a.T, a.T, backend="cuda")])
    half = there(a.astype(ml_dtypes.bfloat16))
    with pytest.raises(AttributeError, match="no bfloat16"):
        half.__cuda_array_interface__  # noqa: B018


def test_precision_is_checked():
    with pytest.raises(ValueError, match="precision must be one of 'ieee', 'bf16x6', 'bf16x3'"):
        nf.use_backend("cuda", precision="fp8")
    with pytest.raises(ValueError, match="device must be the number"):
        nf.use_backend("cuda", device=99)
    assert nf.use_backend("cuda", precision="tf32").backend.precision == "tf32"


# --- memory -------------------------------------------------------------------------------------


def test_a_result_gives_its_memory_back():
    pool = pool_of(device())
    x = there(np.ones((64, 64), np.float32))
    nf.silu_mul(x, x)
    gc.collect()
    held = pool.held
    for _ in range(20):
        nf.silu_mul(x, x)
    assert pool.held == held


def test_the_pool_gives_a_block_again_in_the_order_of_its_stream():
    pool = Pool(device())
    one = pool.take(1000, 0)
    pool.give(one)
    assert pool.kept == one.nbytes == 1024
    two = pool.take(900, 0)
    assert two.address == one.address and pool.kept == 0
    three = pool.take(900, 0)
    assert three.address != two.address
    pool.give(two)
    pool.give(three)
    pool.release()
    assert pool.kept == pool.held == 0


def test_the_pool_keeps_no_more_than_its_limit():
    pool = Pool(device(), limit=4096)
    blocks = [pool.take(4096, 0) for _ in range(3)]
    for block in blocks:
        pool.give(block)
    assert pool.kept == pool.held == 4096
    # and what is asked for now stays, though others fill it
    for _ in range(2):
        block = pool.take(2048, 0)
        pool.give(block)
    assert pool.take(2048, 0).address == block.address
    pool.release()


@pytest.mark.parametrize("nbytes", [1, 512, 513, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_a_block_is_large_enough_and_not_twice_too_large(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(512, 2 * nbytes, 2 << 20)
    assert size % 256 == 0


@pytest.mark.skipif(SIMULATED, reason="the simulator has no streams")
def test_a_block_that_another_stream_used_waits_for_it():
    import ctypes

    owner = device()
    stream = ctypes.c_void_p()
    with owner.current():
        owner.check(owner.cuda.cuStreamCreate(ctypes.byref(stream), 1), "a stream")
    pool = Pool(owner)
    block = pool.take(1 << 20, 0)
    pool.give(block, {0, stream.value})
    owner.synchronize()
    assert pool.take(1 << 20, 0).address == block.address
