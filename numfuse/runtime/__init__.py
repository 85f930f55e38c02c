"""Dispatch, compilation, caches and threads: the parts that every backend shares.

- `dispatch`: which adapter serves a kind of array
- `specialise`: kernels as clones of a template with bound names, for Numba
- `compilation`, `call_types`, `machine_code`, `binaries`: one compilation at a time, with types of
  operators that are found once, an engine for each kernel, and a disk cache whose files say whether
  they are whole
- `lifetimes`: keys that go with the formulas that they name
- `interrupts`: work that an interrupt does not reach
- `pool`: free blocks of memory, kept for the next call
- `slabs`: the same on the host, for what a call holds between its operations
- `views`: views of device memory, without the device
- `dlpack`: arrays from and to other libraries without a copy
- `strided`: strided parts of buffers of a device
- `fingerprint`, `array_objects`: the form of a call's operands as one key, read natively
- `replay`: recorded calls by what they depend on
- `threads`: how many threads a call may use
"""
