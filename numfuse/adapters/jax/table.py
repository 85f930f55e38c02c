"""The words of this process that machine code reads: what a key of a call leads to.

An entry is the address of a record (`numfuse.adapters.jax.frame`). It goes when the program of the
record goes from the replay, and comes again when a call asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax

from numfuse.backends import load
from numfuse.runtime.replay import Replay

#: Places of the table, a power of two; keys that lead nowhere go when it is half full.
PLACES = 1 << 14

#: See `frame.ROOT`; its address is in machine code, so it never grows.
_root = array("q")
#: The mask of the places, then for each a key and the address of its record; see `frame.look_up`.
_table = array("q", [PLACES - 1] + [0] * (2 * PLACES))
_lock = threading.Lock()
#: What was in the table.
_leaving: deque[Any] = deque()
#: By text, for good: there are few.
_messages: dict[str, Any] = {}


def message(text: str) -> int:
    """Return the address of a text of C."""
    made = _messages.setdefault(text, ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(made)


def root(words: Mapping[str, int]) -> int:
    """Return the address of the words of this process, after writing these."""
    from numfuse.adapters.jax.frame import ROOT, SLOT, SLOTS

    if not _root:
        _root.extend([0] * (len(ROOT) + len(SLOT) * SLOTS))
    for name, word in words.items():
        _root[ROOT[name]] = word
    return _root.buffer_info()[0]


def register(target: str, handler: Any, platform: str, **words: int) -> None:
    """Let XLA call machine code, which gets the words of this process; some are the platform's."""
    own = array("q", [-1, root({"R_TABLE": _table.buffer_info()[0], **words})])
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(handler.address)(own.buffer_info()[0])
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler.address))
    jax.ffi.register_ffi_target(target, capsule, platform=platform)


# --- entries --------------------------------------------------------------------------------------
class _Record:
    """The token that keeps a program, and the words by which machine code runs it, in the table."""


@functools.cache
def records() -> Replay[_Record]:
    """The records by key, as many as the CPU backend keeps programs."""
    cpu: Any = load("cpu")
    return Replay(*cpu.replay.limits)


def keep(key: int, words: array[int], formulas: Any, nbytes: int, *held: Any) -> _Record:
    """Let a key lead to a record, and keep what that holds."""
    record, at = _Record(), words.buffer_info()[0]
    weakref.finalize(record, _remove, key, at, words, held).atexit = False
    with _lock:
        insert(key, at)
    return records().keep(key, record, formulas, nbytes)


def _place(key: int) -> int:
    """Return the number of the word that has a key in the table, or has none yet."""
    at = key & (PLACES - 1)
    while _table[1 + 2 * at] not in (0, key):
        at = (at + 1) & (PLACES - 1)
    return 1 + 2 * at


def insert(key: int, at: int) -> None:
    """Let a key lead to the record at this address."""
    place = _place(key)
    _table[place + 1] = at
    _table[place] = key


def _remove(key: int, at: int, *parts: Any) -> None:
    """Let a key lead nowhere; a call that is under way may still be at its record's parts."""
    place = _place(key)
    if _table[place + 1] == at:
        _table[place + 1] = 0
    _leaving.append(parts)


def sweep() -> None:
    """Drop what nobody can be at any more; take the keys out of the table that lead nowhere."""
    global _table
    left = len(_leaving)
    if _root[0] == 0:  # (R_INSIDE) who comes from now on does not find them
        for _ in range(left):
            _leaving.popleft()
    if len(_table) - _table.count(0) > PLACES:
        with _lock:
            kept = [(_table[at], _table[at + 1]) for at in range(1, len(_table), 2)]
            _leaving.append(_table)
            _table = array("q", [PLACES - 1] + [0] * (2 * PLACES))
            for key, record in kept:
                if record:
                    insert(key, record)
            root({"R_TABLE": _table.buffer_info()[0]})
