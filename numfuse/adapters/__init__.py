"""Arrays that are not NumPy's: a module for each kind, imported when such an array arrives.

Each has the public functions under their own names, with the same signatures, and ``to_numpy`` and
``synchronize`` for its arrays (`numfuse.runtime.dispatch` finds it).
"""
