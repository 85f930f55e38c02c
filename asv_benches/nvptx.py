"""PTX by LLVM's own NVPTX target, which llvmlite's wheels hold: NVVM's place taken.

Run by itself it says what the installed llvmlite has, and compiles the smallest kernel that needs a
function of libdevice::

    python asv_benches/nvptx.py

`cuda_compilers.py --beside llvmlite` compiles every kernel of numfuse so (`substitute`): numba-cuda
types and lowers them, and its NVVM is not asked. `--beside numba` has neither: the CUDA target that
is in Numba itself types and lowers (`substitute_numbas_own`). docs/cuda.md, "LLVM in NVVM's place",
has the findings.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

TRIPLE = "nvptx64-nvidia-cuda"
#: The names of kernels, as LLVM and as NVVM mark them.
_KERNEL = re.compile(r'(?<=ptx_kernel void @)\w+|(?<=@")[^"]+(?=", !"kernel")')
#: Lines that name another layout of data than LLVM's.
_TARGET = re.compile(r"^target (?:triple|datalayout) = .*$", re.M)


@functools.cache
def target() -> Any:
    """Return LLVM's target; RuntimeError where the wheel was built without it."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(TRIPLE)


@functools.cache
def libdevice() -> bytes | None:
    """Return NVIDIA's libdevice as bitcode; None where no package of NVIDIA's is installed."""
    try:
        nvidia = import_module("nvidia")
    except ImportError:
        return None
    for root in nvidia.__path__:
        for path in sorted(Path(root).rglob("libdevice*.bc")):
            return path.read_bytes()
    return None


def ptx(texts: Sequence[str], arch: str) -> str:
    """Return the PTX of modules of LLVM's text, linked, for an architecture such as "sm_90a".

    Products and sums are one instruction where the text says so and nowhere else: LLVM's default.
    """
    machine = target().create_target_machine(cpu=arch, features="", opt=3)
    texts = [_TARGET.sub("", text).replace("llvm.nvvm.shfl.sync.i32", "shuffle") for text in texts]
    whole, *others = [llvm.parse_assembly(text) for text in texts]
    for other in others:
        whole.link_in(other)
    own = {f.name for f in whole.functions if not f.is_declaration}
    missing = {f.name for f in whole.functions} - own
    if "shuffle" in missing:
        whole.link_in(llvm.parse_assembly(_SHUFFLE))
    bitcode = libdevice()
    if bitcode is not None and any(name.startswith("__nv_") for name in missing):
        whole.link_in(llvm.parse_bitcode(bitcode))
    kernels = {name for text in texts for name in _KERNEL.findall(text)}
    for f in whole.functions:
        if not f.is_declaration and f.name not in kernels:
            f.linkage = "internal"
            if f.name in own:  # as wgmma's registers need it
                f.add_function_attribute("alwaysinline")
    whole.triple, whole.data_layout = TRIPLE, str(machine.target_data)
    whole.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    return str(machine.emit_assembly(whole))


#: NVVM's one intrinsic for all ways of a shuffle, which LLVM does not have: by its own four.
_SHUFFLE = """
define {{i32, i1}} @shuffle(i32 %mask, i32 %way, i32 %x, i32 %lane, i32 %clamp) alwaysinline {{
  switch i32 %way, label %idx [i32 1, label %up i32 2, label %down i32 3, label %bfly]
{}}}
{}
""".format(
    "".join(
        f"{way}:\n  %r{way} = call {{i32, i1}} @llvm.nvvm.shfl.sync.{way}.i32p"
        f"(i32 %mask, i32 %x, i32 %lane, i32 %clamp)\n  ret {{i32, i1}} %r{way}\n"
        for way in ("idx", "up", "down", "bfly")
    ),
    "".join(
        f"declare {{i32, i1}} @llvm.nvvm.shfl.sync.{way}.i32p(i32, i32, i32, i32)\n"
        for way in ("idx", "up", "down", "bfly")
    ),
)


def substitute() -> None:
    """Put LLVM where numba-cuda calls NVVM.

    The text is printed anew: NVVM reads the pointers with types of LLVM 7, which LLVM has dropped,
    and llvmlite prints either. What else is of LLVM 7 in it (metadata that marks the kernels,
    `llvm.nvvm.barrier0`), LLVM's reader brings up to date.
    """
    nvvm, codegen = (import_module(f"numba.cuda.{x}") for x in ("cudadrv.nvvm", "codegen"))
    kinds: Any = import_module("llvmlite.ir.types")

    def llvm_strs(library: Any) -> list[str]:
        kinds.ir_layer_typed_pointers_enabled = False
        try:
            return [str(module) for module in library.modules]
        finally:
            kinds.ir_layer_typed_pointers_enabled = True

    def compile_ir(texts: Any, *, arch: str, **_: Any) -> bytes:
        return ptx(texts, arch.replace("compute_", "sm_")).encode()

    codegen.CUDACodeLibrary.llvm_strs = property(llvm_strs)
    nvvm.compile_ir = compile_ir


def substitute_numbas_own() -> None:
    """Put the CUDA target that Numba itself still has where numba-cuda's is looked for.

    With LLVM in NVVM's place neither numba-cuda nor a package of NVIDIA's but libdevice is used.
    """
    sys.meta_path[:] = [x for x in sys.meta_path if type(x).__name__ != "NumbaCudaFinder"]
    nvvm: Any = import_module("numba.cuda.cudadrv.nvvm")
    layout = str(target().create_target_machine(cpu="sm_80").target_data)
    nvvm.NVVM = lambda: SimpleNamespace(data_layout=layout)
    nvvm.add_ir_version = lambda module: None
    nvvm.get_arch_option = lambda *cc: "compute_" + "".join(map(str, cc))
    cuda, core = import_module("numba.cuda"), import_module("numba.core.extending")
    compiler: Any = import_module("numba.cuda.compiler")
    jit, mark = cuda.jit, nvvm.set_cuda_kernel
    cuda.jit = lambda device, forceinline: jit(device=device, inline=forceinline)
    kinds: Any = import_module("numba.cuda.types")
    vars(kinds).update({**vars(import_module("numba.core.types")), **vars(kinds)})
    extending: Any = import_module("numba.cuda.extending")
    extending.overload = functools.partial(core.overload, target="cuda")
    # Numba 0.68's own are functions of any number of arguments, which this target cannot compile.
    extending.overload(min)(lambda x, y: lambda x, y: x if x < y else y)
    extending.overload(max)(lambda x, y: lambda x, y: x if x > y else y)
    make = compiler.compile

    def compile_kernel(function: Any, signature: Any, *, launch_bounds: Any, **how: Any) -> Any:
        def marked(kernel: Any) -> None:
            mark(kernel)
            module = kernel.module
            for name, value in zip(("maxntidx", "minctasm"), launch_bounds, strict=False):
                text, number = ir.MetaDataString(module, name), ir.Constant(ir.IntType(32), value)
                data = module.add_metadata((kernel, text, number))
                module.get_named_metadata("nvvm.annotations").add(data)

        nvvm.set_cuda_kernel = marked
        try:
            return make(function, signature, **how)
        finally:
            nvvm.set_cuda_kernel = mark

    compiler.compile = compile_kernel
    sys.modules |= {
        "numba_cuda": cuda,
        "numba.cuda.core.config": import_module("numba.core.config"),
        "numba.cuda.np.arrayobj": kinds,  # (imported for a name of NumPy's that it takes)
    }
    substitute()


#: x[i] = exp(x[i] * x[i] + x[i]): a function of libdevice, and what may not become one fma.
_SMALLEST = """
declare double @__nv_exp(double)
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @smallest(ptr %x) {
  %i = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %p = getelementptr double, ptr %x, i32 %i
  %v = load double, ptr %p
  %m = fmul double %v, %v
  %s = fadd double %m, %v
  %e = call double @__nv_exp(double %s)
  store double %e, ptr %p
  ret void
}
"""


def main() -> None:
    version = ".".join(map(str, llvm.llvm_version_info))
    print(f"llvmlite {llvmlite.__version__}, LLVM {version}")
    try:
        print(f"target: {target()}")
    except RuntimeError as error:
        print(f"no target {TRIPLE}: {error}")
        return
    print(f"libdevice: {'found' if libdevice() else 'no package of NVIDIA has it here'}")
    for arch in ("sm_70", "sm_80", "sm_90a", "sm_100a"):
        try:
            text = ptx([_SMALLEST], arch)
        except RuntimeError as error:
            print(f"{arch}: {error}")
            continue
        lines = [line for line in text.splitlines() if line.strip().endswith(";")]
        calls = "calls __nv_exp" if "call.uni" in text else "no call is left"
        apart = "apart" if "mul.rn.f64" in text and "add.rn.f64" in text else "merged"
        print(f"{arch}: PTX of {len(lines)} instructions, {calls}, product and sum {apart}")


if __name__ == "__main__":
    main()
