"""The operations of a formula by name."""

from __future__ import annotations

__all__ = ["ARITY", "TRUTH", "UFUNCS"]

#: Number of operands of every operation but the leaves `x`, `input` and `const`, and of `call`.
ARITY = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "abs": 1, "sqrt": 1,
    "lt": 2, "le": 2, "eq": 2, "ne": 2, "both": 2, "either": 2, "negation": 1,
    "where": 3, "maximum": 2, "minimum": 2, "copysign": 2,
    "fma": 3, "product": 2, "product_low": 2,
    "exp": 1, "log": 1, "log1p": 1, "tanh": 1, "sigmoid": 1, "erf": 1, "scaled_normal_cdf": 2,
    "scaled_exp": 3, "scaled_sigmoid": 3, "scaled_bell": 3, "finite": 1,
}  # fmt: skip
#: Operations whose result is a truth value.
TRUTH = frozenset({"lt", "le", "eq", "ne", "both", "either", "negation"})
#: {ufunc of NumPy or SciPy: the operation that means the same}.
UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg",
    "less": "lt", "less_equal": "le", "equal": "eq", "not_equal": "ne", "logical_and": "both",
    "logical_or": "either", "logical_not": "negation", "absolute": "abs", "fabs": "abs",
    "sqrt": "sqrt", "exp": "exp", "log": "log", "log1p": "log1p", "tanh": "tanh",
    "maximum": "maximum", "minimum": "minimum", "copysign": "copysign", "erf": "erf",
    "expit": "sigmoid",
}  # fmt: skip
