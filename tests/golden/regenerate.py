"""Print the WGSL text of the whole table: the golden texts, and the way to renew them.

    python tests/golden/regenerate.py float32 > tests/golden/activations.wgsl
    python tests/golden/regenerate.py float64 > tests/golden/activations_f64.wgsl

Look at the difference before you keep it.
"""

import sys

from numfuse.activations import activations
from numfuse.language import wgsl

print(wgsl.table(activations(), sys.argv[1]), end="")
