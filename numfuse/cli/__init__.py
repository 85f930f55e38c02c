"""The command line: ``python -m numfuse demo | info | bench``.

Each command is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``. The
modules are imported for every ``--help``, so their own imports stay light; what a command needs
(Numba, matplotlib, a peer) it imports when it runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable


def missing_extra(command: str, modules: Iterable[str], extra: str) -> bool:
    """Say in one sentence which extra ``command`` lacks; False if every module imports."""
    missing = []
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(module)
    if missing:
        print(
            f"numfuse {command} needs {', '.join(missing)}, which cannot be imported here: "
            f'python -m pip install "numfuse[{extra}]"',
            file=sys.stderr,
        )
    return bool(missing)
