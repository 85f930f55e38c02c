"""Print the WGSL text of the whole table: the golden text, and the way to renew it.

    python tests/golden/regenerate.py > tests/golden/activations.wgsl

Look at the difference before you keep it.
"""

from numfuse import wgsl
from numfuse.activations import activations

print(wgsl.table(activations()), end="")
