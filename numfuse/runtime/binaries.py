"""Compiled code on disk: each file says whether it is whole, and none is needed.

A file that is damaged, cannot be read or cannot be written costs a compilation and is told of once
in a process; the call goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

_REMEDY = "set NUMBA_CACHE_DIR to a directory of your own with room in it"
_TOLD: set[str] = set()
_UNSAID: list[str] = []


def tell(kind: str, text: str) -> None:
    """Let the thread that waits for the code warn of this, once for each `kind` in a process."""
    if kind not in _TOLD:
        _TOLD.add(kind)
        _UNSAID.append(f"numfuse: {text}")


def unsaid() -> list[str]:
    """Return the warnings that are due, and clear them."""
    texts = _UNSAID[:]
    del _UNSAID[: len(texts)]
    return texts


def damaged(path: Path, why: str) -> None:
    """Tell that a file is of no use."""
    tell(
        "damaged",
        f"the compiled kernel {path} is damaged ({why}): it is compiled anew and the file "
        "replaced; delete the directory if this comes again",
    )


def _digest(path: Path, body: bytes) -> bytes:
    # With its name: a file that is whole and another's is damaged too.
    return hashlib.sha256(path.name.encode() + b"\0" + body).hexdigest().encode()


def read(path: Path) -> bytes | None:
    """Return what `write` has written there; None where nothing is, or nothing whole."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        tell("read", f"{path} cannot be read ({error.strerror}): it is compiled anew; {_REMEDY}")
        return None
    digest, _, body = raw.partition(b"\n")
    if digest != _digest(path, body):
        damaged(path, "its checksum is not that of its contents")
        return None
    return body


def write(path: Path, body: bytes) -> None:
    """Write a file, or replace it, in one step."""
    # (not tempfile.mkstemp, whose files none but their owner may read)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(_digest(path, body) + b"\n" + body)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        if os.name == "nt" and isinstance(error, PermissionError) and path.exists():
            return  # another process is reading it, or has just written the same
        tell(
            "write",
            f"{path} cannot be written ({error.strerror}): every process compiles its kernels anew "
            f"(seconds); {_REMEDY}",
        )
