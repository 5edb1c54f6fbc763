"""A pool of buffers that return by themselves when their last view is garbage-collected.

A large batch stays in the buffer in which it was received. The store keeps it there for its
readers, whose responses may be unsent when the store releases the batch. Only Python knows when the
last view is gone. Buffers are reused because a new one must be zeroed, and each of its pages costs
the operating system work. This saves a quarter of the loop's time for a produced megabyte (see
benchmarks/README.md).

Call it only from the loop's thread. The last view may be released in any thread.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import cache
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.protocols.kafka import limits

#: Sizes are multiples of this, so that returned buffers fit later requests without much waste.
_STEP_BYTES: Final = 16 * shared_limits.KIB


class BufferPool:
    """The idle buffers. Buffers in use are known only to the views of them."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        # If there are too many, the oldest is dropped. Appending is thread-safe.
        self._idle: deque[bytearray] = deque(maxlen=limits.KAFKA_IDLE_LENT)

    def acquire(self, least_bytes: int) -> memoryview:
        """Return a view of at least `least_bytes`, with undefined content."""
        size = -(-least_bytes // _STEP_BYTES) * _STEP_BYTES
        if size > limits.KAFKA_LENT_BYTES:
            return memoryview(bytearray(least_bytes))
        memory = self._take_idle(size) or bytearray(size)
        # Every view holds a reference to `array`, so the buffer returns only after the last view.
        array = _array_type(size).from_buffer(memory)
        weakref.finalize(array, self._idle.append, memory).atexit = False
        return memoryview(array).cast("B")

    def _take_idle(self, size: int) -> bytearray | None:
        """Return an idle buffer of exactly this size, or None."""
        idle = self._idle
        for _ in range(len(idle)):
            memory = idle.pop()
            if len(memory) == size:
                return memory
            idle.appendleft(memory)
        return None


@cache
def _array_type(size: int) -> Any:
    """Return the array type of this size, cached: making a type is slower than making a view."""
    return ctypes.c_char * size
