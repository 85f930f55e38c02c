"""Schemas: the one place that knows the order of the words of a launch.

Guards: a kernel never reads one argument as another.
"""

from __future__ import annotations

import pytest

from numfuse.backends.cpu.kernels import protocol
from numfuse.backends.cpu.kernels.protocol import Schema


def test_words_stand_in_the_order_of_their_schema():
    schema = Schema("A_ONE A_TWO  # a comment\n A_THREE", first=5)
    assert schema == {"A_ONE": 5, "A_TWO": 6, "A_THREE": 7} and schema.end == 8
    assert schema.words({"A_THREE": 3, "A_ONE": -1}) == [-1, 0, 3]
    assert Schema("").words({}) == [] and Schema("", 4).end == 4


def test_a_name_that_a_schema_lacks_or_has_twice_is_an_error():
    with pytest.raises(KeyError, match="words must be of the schema"):
        protocol.DESCRIPTOR.words({"D_M": 1, "D_MM": 2})
    with pytest.raises(ValueError, match="names must be different"):
        Schema("X Y X")


def test_the_schemas_of_a_context_follow_each_other():
    starts = [min(words.values()) for words in (protocol.SCRATCH, protocol.AHEAD)]
    assert starts == [3 * len(protocol.SLOTS), protocol.SCRATCH.end]
    assert protocol.STREAM_TABLE == protocol.AHEAD.end
