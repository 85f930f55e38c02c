"""Python frames of numfuse that a call opens, for tests that bound them."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numfuse as nf

PACKAGE = Path(nf.__file__).parent
#: Compiled functions report themselves as calls too, under a name with a digest.
_NATIVE = re.compile(r"_[0-9a-f]{20}$")
#: The functions of an adapter that are compiled from text.
_COMPILED = "of an adapter>"


def frames(call: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]]]:
    """Return the result of a call, and (file, function) of each Python frame of numfuse it opens.

    The result is held until the count is over: what ends with it is no part of the call. Nor is
    what the garbage collector ends by the way, of tests before this one.
    """
    found: list[tuple[str, str]] = []

    def opened(frame: Any, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or _NATIVE.search(name):
            return
        if file.endswith(_COMPILED):
            found.append((file, name))
        elif Path(file).is_relative_to(PACKAGE):
            found.append((Path(file).relative_to(PACKAGE).as_posix(), name))

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(opened)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return result, found
