"""Memory that is lent out and comes back by itself when nobody looks at it any more.

A large batch stays where it was received: the store keeps it there for its readers, whose answers
may still be on their way when the store has let go of it. Nobody could say when the memory is free
but Python itself, which knows when the last view is gone. Memory that comes back is used again,
since new memory must be filled with zeros first and costs the system work page by page: with both
saved, a megabyte of produce took a quarter less of the loop's time (see benchmarks/README.md).

Who may call: the loop's thread. The last view may go in any thread.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import cache
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.protocols.kafka import limits

#: Sizes are multiples of this, so that memory that comes back fits the next one and is not much
#: larger than what it holds.
_STEP_BYTES: Final = 16 * shared_limits.KIB


class BufferPool:
    __slots__ = ("_idle",)

    def __init__(self) -> None:
        # The oldest goes when there are more. Appending to it is safe in any thread.
        self._idle: deque[bytearray] = deque(maxlen=limits.KAFKA_IDLE_LENT)

    def lend(self, least_bytes: int) -> memoryview:
        """A view of this size or a little more, whose content is anything."""
        size = -(-least_bytes // _STEP_BYTES) * _STEP_BYTES
        if size > limits.KAFKA_LENT_BYTES:
            return memoryview(bytearray(least_bytes))
        memory = self._idle_of(size) or bytearray(size)
        # Every view of `lent` holds it, and so keeps the memory from coming back.
        lent = _array(size).from_buffer(memory)
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return memoryview(lent).cast("B")

    def _idle_of(self, size: int) -> bytearray | None:
        idle = self._idle
        for _ in range(len(idle)):
            memory = idle.pop()
            if len(memory) == size:
                return memory
            idle.appendleft(memory)
        return None


@cache
def _array(size: int) -> Any:
    """Kept, because making a type takes longer than making a view."""
    return ctypes.c_char * size
