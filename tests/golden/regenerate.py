"""Print the WGSL text of the whole table: the golden texts, and the way to renew them.

    python tests/golden/regenerate.py float32 > tests/golden/activations.wgsl
    python tests/golden/regenerate.py float64 > tests/golden/activations_f64.wgsl

Look at the difference before you keep it.
"""

import sys

from numfuse.activations import activations
from numfuse.language import wgsl


def table(activations, dtype="float32"):
    """Return one module: of each activation ``name``, ``name_prime`` and so on."""
    text = "\n\n".join(
        wgsl.function(act.trace(order), name + ending, dtype)
        for name, act in activations.items()
        for order, ending in enumerate(("", "_prime", "_second", "_third"))
    )
    return f"{wgsl.prelude(text, dtype)}\n\n{text}\n"


if __name__ == "__main__":
    print(table(activations(), sys.argv[1]), end="")
