"""Split a stream of bytes into requests; decode request headers and encode response headers.

    request   | i32 size | i16 api key | i16 version | i32 correlation id | client id | … body |
    response  | i32 size | i32 correlation id | … body |

`size` counts the bytes after it. The client id is always a nullable string in the legacy encoding.
In flexible versions both headers end with tagged fields, except the response header of ApiVersions.

Bytes are received into the buffer that `Frames.buffer` returns, so that few bytes are copied. All
connections share one scratch buffer, and a request that arrives whole is decoded there. Only the
start of an incomplete request is copied into a buffer of its own connection. So an idle connection
holds no memory. The memory of a request grows with the bytes that have arrived, not with its
declared size. When many bytes of an incomplete request have arrived, it must be admitted
(`ReceiveMemory`). So a peer that declares a large size and sends little takes no memory from
others.

A frame is a view that is valid until the next call of `compact`. The frame of a large request stays
valid as long as a view of it exists, because it has its own buffer (`buffer_pool`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import ProtocolError
from quackmq.fast_tuples import new_tuple
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.codec.buffer_pool import BufferPool
from quackmq.protocols.kafka.codec.primitives import ENDS_EARLY, CompactCursor, malformed
from quackmq.serving import limits as serving_limits
from quackmq.serving.budgets import ReceiveBudget

PRODUCE_KEY: Final = 0

_SIZE: Final = struct.Struct(">i")
_SIZE_AND_KEY: Final = struct.Struct(">ih")
_REQUEST_HEAD: Final = struct.Struct(">hhih")
_RESPONSE_HEAD: Final = struct.Struct(">ii")
_FLEXIBLE_RESPONSE_HEAD: Final = struct.Struct(">iix")
#: Buffers between these sizes are powers of two and are reused. Larger ones are rare; they have the
#: exact size and are dropped.
_SMALLEST_BUFFER_BYTES: Final = 4 * shared_limits.KIB
_LARGEST_POOLED_BYTES: Final = 2 * shared_limits.MIB


class RequestHeader(NamedTuple):
    """A decoded header. `position` is where its tagged fields begin, or the body if there are
    none."""

    api_key: int
    version: int
    correlation_id: int
    client_id: bytes
    position: int


def read_header(frame: memoryview) -> RequestHeader:
    """Decode the part of the header that all versions share."""
    try:
        api_key, version, correlation_id, client_bytes = _REQUEST_HEAD.unpack_from(frame)
    except struct.error:
        raise malformed("request's header") from None
    position, client_id = _REQUEST_HEAD.size, b""
    if client_bytes > 0:
        position += client_bytes
        if position > len(frame):
            raise malformed("request's header")
        client_id = bytes(frame[_REQUEST_HEAD.size : position])
    return new_tuple(RequestHeader, (api_key, version, correlation_id, client_id, position))


def request_body(frame: memoryview, header: RequestHeader, is_flexible: bool) -> memoryview:
    """Return the bytes after the header."""
    if not is_flexible:
        return frame[header.position :]
    cursor = CompactCursor(frame, header.position)
    try:
        cursor.skip_tags()
    except ENDS_EARLY:
        raise malformed("request's header") from None
    return frame[cursor.position :]


def response_head(body_bytes: int, correlation_id: int, is_flexible: bool) -> bytes:
    """Return everything before a response's body."""
    if is_flexible:
        return _FLEXIBLE_RESPONSE_HEAD.pack(body_bytes + 5, correlation_id)
    return _RESPONSE_HEAD.pack(body_bytes + 4, correlation_id)


class ReceiveMemory:
    """The memory into which all connections of a server receive.

    When `limits.KAFKA_UNRESERVED_BYTES` of an incomplete request have arrived, the budget must
    admit its whole size. So every admitted request can be received completely.
    """

    def __init__(self, budget: ReceiveBudget | None = None) -> None:
        self.scratch = memoryview(bytearray(limits.KAFKA_SCRATCH_BYTES))
        self.budget = budget or ReceiveBudget(limits.KAFKA_RECEIVE_BYTES)
        self.acquire_exclusive = BufferPool().acquire
        self._pool: dict[int, list[memoryview]] = {}
        self._pooled_bytes = 0

    def acquire(self, least_bytes: int) -> memoryview:
        """Return a buffer of at least `least_bytes`, from the pool if there is one."""
        if least_bytes > _LARGEST_POOLED_BYTES:
            return memoryview(bytearray(least_bytes))
        size = max(_SMALLEST_BUFFER_BYTES, 1 << (least_bytes - 1).bit_length())
        idle_buffers = self._pool.get(size)
        if not idle_buffers:
            return memoryview(bytearray(size))
        self._pooled_bytes -= size
        return idle_buffers.pop()

    def release(self, buffer: memoryview) -> None:
        """Put a buffer into the pool, or drop it if the pool is full."""
        has_room = self._pooled_bytes + len(buffer) <= limits.KAFKA_POOLED_BYTES
        if has_room and len(buffer) <= _LARGEST_POOLED_BYTES:
            self._pooled_bytes += len(buffer)
            self._pool.setdefault(len(buffer), []).append(buffer)


class Frames:
    """The frames of one connection.

    The order of calls: `received` after bytes were put into `buffer`; then `next_frame` while
    `find_frame` returns true; then `compact`. The caller may leave ready frames for later. Call
    `buffer` only when no frame is ready and `reserve_memory` has returned true.
    """

    __slots__ = (
        "_frame_bytes",
        "_end",
        "_is_exclusive",
        "_memory",
        "_has_own_buffer",
        "_reserved_bytes",
        "_start",
        "_view",
        "is_produce",
    )

    def __init__(self, memory: ReceiveMemory) -> None:
        self._memory = memory
        self._view = memory.scratch
        #: Whether `_view` is a buffer of this connection, not the shared scratch buffer.
        self._has_own_buffer = False
        #: Whether `_view` holds exactly one large frame, which may keep the buffer.
        self._is_exclusive = False
        self._start = 0
        self._end = 0
        #: Size of the next frame with its prefix; 0 while it is unknown.
        self._frame_bytes = 0
        self._reserved_bytes = 0
        #: Whether the frame that is ready is a Produce request.
        self.is_produce = False

    def buffer(self) -> memoryview:
        """Return the memory into which the next bytes are to be received."""
        if not self._has_own_buffer:
            return self._memory.scratch
        # Only the rest of the incomplete frame: the following frame may then arrive whole.
        return self._view[self._end : max(self._frame_bytes, _SMALLEST_BUFFER_BYTES)]

    def received(self, count: int) -> bool:
        """Count received bytes; return whether there may be work. There is none while the rest of a
        large frame, whose memory is allocated, is still arriving.
        """
        self._end += count
        return not self._is_exclusive or self._end >= self._frame_bytes

    def find_frame(self) -> bool:
        """Find the next frame, which `next_frame` then returns, and set `is_produce` for it. Return
        whether it has arrived whole. Raise ProtocolError if its size is not allowed."""
        self._frame_bytes = 0
        available = self._end - self._start
        if available < _SIZE_AND_KEY.size:
            if available >= _SIZE.size:
                # The API is unknown yet. A size that no API allows must be refused now.
                (size,) = _SIZE.unpack_from(self._view, self._start)
                _check_size(size, PRODUCE_KEY)
            return False
        size, api_key = _SIZE_AND_KEY.unpack_from(self._view, self._start)
        _check_size(size, api_key)
        self.is_produce = api_key == PRODUCE_KEY
        self._frame_bytes = _SIZE.size + size
        return available >= self._frame_bytes

    def next_frame(self) -> memoryview:
        """Return the frame that is ready, without its size prefix."""
        begin = self._start
        self._start = begin + self._frame_bytes
        self._frame_bytes = 0
        self._release_reserved()
        return self._view[begin + _SIZE.size : self._start]

    @property
    def owns_last_frame(self) -> bool:
        """Whether the frame returned last has its buffer alone. Such a frame stays valid as long as
        a view of it exists.
        """
        return self._is_exclusive

    @property
    def opening(self) -> bytes:
        """The first bytes that have not been returned as a frame."""
        return bytes(
            self._view[self._start : min(self._end, self._start + serving_limits.OPENING_BYTES)]
        )

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes that have not been returned as a frame."""
        return self._end > self._start

    def reserve_memory(self) -> bool:
        """Reserve memory for the incomplete frame, if it needs any. Return whether more of the
        frame may be received: it needs no reservation, or has one now."""
        if not self._needs_admission():
            return True
        self.compact()
        return self._reserved_bytes > 0

    @property
    def received_share(self) -> float | None:
        """The received part of the frame that memory is reserved for, 0 to 1; None without one."""
        if not self._reserved_bytes or not self._frame_bytes:
            return None
        return (self._end - self._start) / self._frame_bytes

    def compact(self) -> None:
        """Free the shared scratch buffer, and make room for more of the incomplete frame. Frames
        returned before become invalid.
        """
        received_bytes = self._end - self._start
        if received_bytes == 0:
            self._drop_buffer()
            return
        if self._needs_admission() and self._memory.budget.reserve(self._frame_bytes):
            self._reserved_bytes = self._frame_bytes
        allowed_bytes = received_bytes * limits.KAFKA_RECEIVE_GROWTH
        if not self._reserved_bytes:
            allowed_bytes = min(allowed_bytes, limits.KAFKA_UNRESERVED_BYTES)
        needed_bytes = max(received_bytes, min(self._frame_bytes, allowed_bytes))
        if self._has_own_buffer and self._start == 0 and needed_bytes <= len(self._view):
            return
        is_exclusive = needed_bytes == self._frame_bytes >= shared_limits.KEPT_BATCH_BYTES
        acquire = self._memory.acquire_exclusive if is_exclusive else self._memory.acquire
        view = acquire(needed_bytes)
        view[:received_bytes] = self._view[self._start : self._end]
        self._drop_buffer()
        self._view = view
        self._has_own_buffer = True
        self._is_exclusive = is_exclusive
        self._end = received_bytes

    def close(self) -> None:
        """Release all memory."""
        self._release_reserved()
        self._drop_buffer()

    def _needs_admission(self) -> bool:
        """Return whether the budget must admit the frame before more of it is received."""
        return (
            self._frame_bytes > limits.KAFKA_UNRESERVED_BYTES
            and not self._reserved_bytes
            and self._end - self._start >= limits.KAFKA_UNRESERVED_BYTES
        )

    def _drop_buffer(self) -> None:
        """Continue with the empty scratch buffer; return an own buffer to the pool."""
        if self._has_own_buffer and not self._is_exclusive:
            self._memory.release(self._view)
        self._view = self._memory.scratch
        self._has_own_buffer = self._is_exclusive = False
        self._start = self._end = 0

    def _release_reserved(self) -> None:
        """Return the frame's reserved bytes to the budget, if there are any."""
        if self._reserved_bytes:
            self._memory.budget.release(self._reserved_bytes)
            self._reserved_bytes = 0


def _check_size(size: int, api_key: int) -> None:
    """Raise ProtocolError if no request of this API may have this size. Produce may be larger than
    others."""
    is_produce = api_key == PRODUCE_KEY
    most_bytes = limits.KAFKA_PRODUCE_BYTES if is_produce else limits.KAFKA_REQUEST_BYTES
    if size < _REQUEST_HEAD.size:
        raise ProtocolError(f"a request of {size} bytes: that is too small for a header")
    if size > most_bytes:
        raise ProtocolError(f"a request of {size} bytes; the limit is {most_bytes}")
