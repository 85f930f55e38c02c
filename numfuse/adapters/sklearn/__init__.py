"""scikit-learn's multilayer perceptrons with numfuse's networks: one import is changed.

- `estimators`: `MLPClassifier` and `MLPRegressor`
- `training`: epochs, batches and stopping
- `networks`: parameters and gradients as flat vectors
- `losses`: value and gradient in one pass over rows
- `optimisers`: Adam and SGD in one pass over memory
- `repeated`: calls that are recorded once and launched again; `formulas`: how formulas are recorded
"""

from __future__ import annotations

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "numfuse.adapters.sklearn needs scikit-learn, which cannot be imported here: "
        'python -m pip install "numfuse[sklearn]"'
    ) from error

from numfuse.adapters.sklearn.estimators import MLPClassifier, MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]
