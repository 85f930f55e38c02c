"""A process that times one version, stretch by stretch, as it is told by `turns`.

It is started as ``python worker.py TREE WORD ...``, with the version's tree before everything else
on the path; the words choose cases whose names hold one of them. Lines of JSON go both ways:
{"cases": ...} when it is ready; then {"case": ..., "repeats": n} in, {"seconds": ...} of one call
out, until the input ends.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any


def load(name: str) -> Any:
    """Return a module beside this file: the guard is that of one tree, the version of another."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    tree = Path(sys.argv[1]).resolve()
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the lines
    import numfuse

    if not Path(numfuse.__file__).resolve().is_relative_to(tree):
        raise SystemExit(f"numfuse must come from {tree}, got {numfuse.__file__}")

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    calls, missing = {}, {}
    words = sys.argv[2:]
    for name, make in load("cases").every():
        if words and not any(word in name for word in words):
            continue
        try:
            calls[name] = make()
            calls[name]()
        except Exception as error:  # another version may lack what a case needs
            calls.pop(name, None)
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    answer(cases=list(calls), missing=missing)
    for line in sys.stdin:
        told = json.loads(line)
        call, loop = calls[told["case"]], range(told["repeats"])
        call()  # untimed: takes the caches and the threads back from the other processes
        start = time.perf_counter()
        for _ in loop:
            call()
        answer(seconds=(time.perf_counter() - start) / len(loop))
    return 0


if __name__ == "__main__":
    sys.exit(main())
