"""A stream of bytes cut into requests, and the headers of requests and responses.

    request   | i32 size | i16 api key | i16 version | i32 correlation id | client id | … body |
    response  | i32 size | i32 correlation id | … body |

`size` counts what follows it. The client id is always a nullable string in the legacy spelling; in
flexible versions tagged fields end both headers (in the response's, but for ApiVersions).

Bytes are received into memory that `Frames.buffer` names, so nothing is copied that need not be:
all connections share one scratch buffer, in which a request that comes whole is read; only the
beginning of a request whose rest is still to come is moved to a buffer of its connection's own. An
idle connection thus holds no memory. The memory of a request grows with what has come of it, not
with what its size says; when much of it has come and more is to come, it must be admitted first
(`ReceiveMemory`), so that who claims much and says little takes nothing from anybody.

A frame is a view that is good until the next call of `settle`; one of a large request is good for
as long as anybody has it, since it lies alone in memory that was lent to it (`lending`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import ProtocolError
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
#: Buffers between these sizes are powers of two and kept for the next that is wanted; larger ones,
#: which are rare, are as large as they must be and go.
_SMALLEST_BUFFER_BYTES: Final = 4 * shared_limits.KIB
_LARGEST_POOLED_BYTES: Final = 2 * shared_limits.MIB
_new_tuple: Final = tuple.__new__


class RequestHeader(NamedTuple):
    """`position` is where the header's tagged fields begin, or the body where it has none."""

    api_key: int
    version: int
    correlation_id: int
    client_id: bytes
    position: int


def read_header(frame: memoryview) -> RequestHeader:
    """The part of the header that every version shares."""
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
    # The class's own constructor takes its arguments one by one: three times as long.
    return _new_tuple(RequestHeader, (api_key, version, correlation_id, client_id, position))


def body(frame: memoryview, header: RequestHeader, flexible: bool) -> memoryview:
    """What follows the header."""
    if not flexible:
        return frame[header.position :]
    cursor = CompactCursor(frame, header.position)
    try:
        cursor.skip_tags()
    except ENDS_EARLY:
        raise malformed("request's header") from None
    return frame[cursor.position :]


def response_head(body_bytes: int, correlation_id: int, flexible: bool) -> bytes:
    """All that stands before a response's body."""
    if flexible:
        return _FLEXIBLE_RESPONSE_HEAD.pack(body_bytes + 5, correlation_id)
    return _RESPONSE_HEAD.pack(body_bytes + 4, correlation_id)


class ReceiveMemory:
    """The memory into which all connections of a door receive.

    A request of which `limits.KAFKA_UNRESERVED_BYTES` have come, and not yet all, is admitted by
    the budget, for its whole size: so whatever was admitted can also come to its end.
    """

    def __init__(self, budget: ReceiveBudget | None = None) -> None:
        self.scratch = memoryview(bytearray(limits.KAFKA_SCRATCH_BYTES))
        self.budget = budget or ReceiveBudget(limits.KAFKA_RECEIVE_BYTES)
        self.lend = BufferPool().lend
        self._pool: dict[int, list[memoryview]] = {}
        self._pooled_bytes = 0

    def take(self, least_bytes: int) -> memoryview:
        if least_bytes > _LARGEST_POOLED_BYTES:
            return memoryview(bytearray(least_bytes))
        size = max(_SMALLEST_BUFFER_BYTES, 1 << (least_bytes - 1).bit_length())
        kept = self._pool.get(size)
        if not kept:
            return memoryview(bytearray(size))
        self._pooled_bytes -= size
        return kept.pop()

    def give_back(self, buffer: memoryview) -> None:
        fits = self._pooled_bytes + len(buffer) <= limits.KAFKA_POOLED_BYTES
        if fits and len(buffer) <= _LARGEST_POOLED_BYTES:
            self._pooled_bytes += len(buffer)
            self._pool.setdefault(len(buffer), []).append(buffer)


class Frames:
    """The frames of one connection.

    In turns: `received` after bytes were put into `buffer`; then `take` as long as `is_ready` (or
    as the caller wants); then `settle`. `buffer` may be asked for when nothing is ready and the
    rest is `admitted`.
    """

    __slots__ = (
        "_claim",
        "_end",
        "_lent",
        "_memory",
        "_owns",
        "_reserved",
        "_start",
        "_view",
        "is_produce",
    )

    def __init__(self, memory: ReceiveMemory) -> None:
        self._memory = memory
        self._view = memory.scratch
        self._owns = False
        self._lent = False
        self._start = 0
        self._end = 0
        #: Size of the next frame, with its prefix; 0 while that is not known.
        self._claim = 0
        self._reserved = 0
        #: Whether the frame that is ready publishes something.
        self.is_produce = False

    def buffer(self) -> memoryview:
        if not self._owns:
            return self._memory.scratch
        # Of a frame that has begun, just the rest: what follows it may come whole again.
        return self._view[self._end : max(self._claim, _SMALLEST_BUFFER_BYTES)]

    def received(self, count: int) -> bool:
        """Whether there is anything to do now: not while the rest of a large frame, for which there
        is room, is still to come."""
        self._end += count
        return not self._lent or self._end >= self._claim

    def is_ready(self) -> bool:
        """Whether a whole frame is there. ProtocolError if there never will be one."""
        self._claim = 0
        available = self._end - self._start
        if available < _SIZE_AND_KEY.size:
            if available >= _SIZE.size:
                # Whatever kind of request it is: what no request is allowed must not be waited for.
                (size,) = _SIZE.unpack_from(self._view, self._start)
                _check_size(size, PRODUCE_KEY)
            return False
        size, api_key = _SIZE_AND_KEY.unpack_from(self._view, self._start)
        _check_size(size, api_key)
        self.is_produce = api_key == PRODUCE_KEY
        self._claim = _SIZE.size + size
        return available >= self._claim

    def take(self) -> memoryview:
        """The frame that is ready, without its size."""
        begin = self._start
        self._start = begin + self._claim
        self._claim = 0
        self._release()
        return self._view[begin + _SIZE.size : self._start]

    @property
    def hands_over(self) -> bool:
        """Whether the frame that was given last lies alone in memory that is not used again as long
        as there is a view of it. Such a frame stays good."""
        return self._lent

    @property
    def opening(self) -> bytes:
        """The first of the bytes that have not been given as a frame."""
        return bytes(
            self._view[self._start : min(self._end, self._start + serving_limits.OPENING_BYTES)]
        )

    @property
    def begun(self) -> bool:
        """Whether bytes lie here that have not been given as a frame."""
        return self._end > self._start

    @property
    def admitted(self) -> bool:
        """Whether more of the frame that has begun may be received; asks for that."""
        if not self._needs_admission():
            return True
        self.settle()
        return self._reserved > 0

    @property
    def share(self) -> float | None:
        """How much has come of the frame that memory is held for, 0 to 1; None if there is none."""
        return (self._end - self._start) / self._claim if self._reserved and self._claim else None

    def settle(self) -> None:
        """Leave the scratch buffer to others, and make room for more of the frame that has begun.

        Frames given before are no longer good.
        """
        left = self._end - self._start
        if left == 0:
            self._leave()
            return
        if self._needs_admission() and self._memory.budget.reserve(self._claim):
            self._reserved = self._claim
        ahead = left * limits.KAFKA_RECEIVE_GROWTH
        if not self._reserved:
            ahead = min(ahead, limits.KAFKA_UNRESERVED_BYTES)
        wanted = max(left, min(self._claim, ahead))
        if self._owns and self._start == 0 and wanted <= len(self._view):
            return
        is_whole = wanted == self._claim >= shared_limits.KEPT_BATCH_BYTES
        view = self._memory.lend(wanted) if is_whole else self._memory.take(wanted)
        view[:left] = self._view[self._start : self._end]
        self._leave()
        self._view = view
        self._owns = True
        self._lent = is_whole
        self._end = left

    def close(self) -> None:
        """Give everything back."""
        self._release()
        self._leave()

    def _needs_admission(self) -> bool:
        return (
            self._claim > limits.KAFKA_UNRESERVED_BYTES
            and not self._reserved
            and self._end - self._start >= limits.KAFKA_UNRESERVED_BYTES
        )

    def _leave(self) -> None:
        if self._owns and not self._lent:
            self._memory.give_back(self._view)
        self._view = self._memory.scratch
        self._owns = self._lent = False
        self._start = self._end = 0

    def _release(self) -> None:
        if self._reserved:
            self._memory.budget.release(self._reserved)
            self._reserved = 0


def _check_size(size: int, api_key: int) -> None:
    is_produce = api_key == PRODUCE_KEY
    most = limits.KAFKA_PRODUCE_BYTES if is_produce else limits.KAFKA_REQUEST_BYTES
    if size < _REQUEST_HEAD.size:
        raise ProtocolError(f"a request of {size} bytes: no request is so small")
    if size > most:
        raise ProtocolError(f"a request of {size} bytes; {most} is the most")
