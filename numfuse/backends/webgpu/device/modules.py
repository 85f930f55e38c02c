"""Shader modules: with wgpu's run-time checks, or without those that a shader needs not.

wgpu bounds every index, which takes an instruction or two for each access of memory and keeps
compilers from addresses with constant offsets, and counts the rounds of every loop, which keeps
them from unrolling it. A shader may say that its indices are in range and its loops end
(`Shader.trusted`). wgpu's C library takes such a module; its Python interface has no word for it.
"""

from __future__ import annotations

import contextlib
from typing import Any

#: What makes such a module; None where this wgpu is built otherwise.
_NATIVE: tuple[Any, ...] | None = None
with contextlib.suppress(ImportError, AttributeError):
    from wgpu.backends.wgpu_native import ffi, lib
    from wgpu.backends.wgpu_native._api import GPUShaderModule, libf

    _NATIVE = (
        libf.wgpuDeviceCreateShaderModuleTrusted,
        lib.WGPUSType_ShaderSourceWGSL,
        lib.WGPUShaderRuntimeChecks_None,
    )


def module(device: Any, label: str, code: str, trusted: bool) -> Any:
    """Return the module of a WGSL text on a wgpu device, without checks if it is `trusted`."""
    if not trusted or _NATIVE is None:
        return device.create_shader_module(label=label, code=code)
    make, kind, checks = _NATIVE
    texts = [ffi.new("char[]", text.encode()) for text in (code, label)]
    source = ffi.new("WGPUShaderSourceWGSL *")
    source.chain.sType = kind
    source.code.data, source.code.length = texts[0], len(texts[0]) - 1
    described = ffi.new("WGPUShaderModuleDescriptor *")
    described.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    described.label.data, described.label.length = texts[1], len(texts[1]) - 1
    made = make(device._internal, described, checks)
    if made == ffi.NULL:
        raise RuntimeError("no shader module was made")
    return GPUShaderModule(label, made, device)
