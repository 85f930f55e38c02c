"""The language of formulas, in which activations and epilogues are written, and its printers.

- `graph`: the recorded formula, its nodes, constants and text
- `bounds`: the range of every node, by interval arithmetic
- `derivatives`: reverse, forward and Taylor mode, as rewrites of a graph
- `elementary`: the elementary operations over NumPy arrays in float64, which are their meaning
- `coefficients`: the polynomials of the elementary functions, for each dtype
- `scalar`: a formula as the text of a Python function, for Numba and CUDA
- `wgsl`: a formula as the text of a WGSL function
"""
