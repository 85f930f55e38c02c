"""numfuse beside its peers on this machine: the same as ``python -m numfuse bench``.

python asv_benches/compare.py --full --json bench.json --markdown docs/performance/tables.md
"""

import sys

from numfuse.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
