"""The language of formulas, in which activations and epilogues are written, and its printers.

- `operations`: the operations by name, with meaning, bounds and derivatives; `constants`: numbers
- `graph`: the recorded formula and its nodes
- `curves`: functions that a formula calls, and putting one graph into another
- `text`, `keys`: a graph as text, and as a part of a key
- `derivatives`: reverse, forward and Taylor mode, as rewrites of a graph
- `elementary`: formulas over NumPy arrays in float64
- `coefficients`: the polynomials of the elementary functions, for each dtype
- `lines`: a line for every operation, in any language
- `python`: a formula as the text of a Python function, for Numba and CUDA
- `arithmetic`, `scalar`: the functions that the text calls, and binding them to a target
- `wgsl`, `wgsl_arithmetic`: a formula as the text of a WGSL function, and what that calls
"""
