"""ZMTP 3.x, ZeroMQ's own protocol on TCP: bytes in, events out.

This module has the parts that all of the broker's sockets share (greetings, frames, commands), and
the messages of REQ, REP, DEALER and ROUTER sockets. `pubsub` has the messages of publishers and
subscribers. Frames and bytes of a message are bounded here. libzmq bounds the number of messages
per peer and the size of a frame; we found no option that bounds the frames of a message or the
memory of all peers, and have not measured its effect. Versions before 3 (libzmq before 4.0, of
2013) and mechanisms other than NULL are refused.

Both sides begin with a greeting, and then a READY command:

     0      1          9      10      11      12          32          33          64
     +------+----------+------+-------+-------+-----------+-----------+-----------+
     | 0xFF | 8 bytes, | 0x7F | major | minor | mechanism | as server | zeros     |
     |      | not used |      | 3     |       | 20 bytes  | u8        |           |
     +------+----------+------+-------+-------+-----------+-----------+-----------+

Then come frames. The flags are 1 for "more frames follow", 2 for a size of eight bytes, and 4 for
a command:

     +-------+-----------+------+        command:  +-----------+------+------+
     | flags | size      | body |                  | name size | name | data |
     | u8    | u8 or u64 |      |                  | u8        |      |      |
     +-------+-----------+------+                  +-----------+------+------+

A request is a message of several frames: the envelope, an empty frame, and the content. A plain REQ
socket sends an empty envelope; proxies and correlating REQ sockets add ids to it. The reply has the
same envelope, so that it finds its way back.

Promises: the same bytes give the same events, however they are split, or a ProtocolError; after
that the connection is useless. Memory is bounded: an invalid or too large request is skipped, not
stored, and reported as `Refused`. Bytes stay buffered until `next_event` needs them.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final, NamedTuple

from quackmq.errors import ProtocolError, QuackError, RecordTooLarge
from quackmq.fast_tuples import new_tuple
from quackmq.protocols.zmq import limits
from quackmq.serving import limits as serving_limits

Envelope = tuple[bytes, ...]

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
_SHORT_BYTES: Final = 255
#: The empty frame between the envelope and the content of a message.
_DELIMITER: Final = b"\x01\x00"
_LONG_SIZE: Final = struct.Struct(">Q")
_VALUE_SIZE: Final = struct.Struct(">I")
_PING: Final = struct.Struct(">H")

GREETING_BYTES: Final = 64
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + _MECHANISM + bytes(32)
#: Types of sockets that may connect to a ROUTER socket.
REQUESTING_SOCKETS: Final = ("REQ", "DEALER", "ROUTER")
#: Types of sockets that a REQ socket may connect to.
REPLYING_SOCKETS: Final = ("REP", "ROUTER")
#: The first bytes of nearly every request: an empty frame, and the flags of a short last frame.
_PLAIN_REQUEST_START: Final = b"\x01\x00\x00"


class Ready(NamedTuple):
    """The peer has sent READY; messages follow."""

    socket_type: str


class Message(NamedTuple):
    envelope: Envelope
    content: bytes


class Refused(NamedTuple):
    """A complete message that is invalid or too large. `envelope` is None if it is unknown; then an
    error can be sent only to the peer itself.
    """

    envelope: Envelope | None
    error: QuackError


class Ping(NamedTuple):
    """A heartbeat; the reply is `pong(context)`. A peer whose `ttl_ms` is not 0 promises to send
    something at least that often.
    """

    ttl_ms: int
    context: bytes


class Multipart(NamedTuple):
    """A complete message of a publisher."""

    frames: tuple[bytes, ...]


class Subscribe(NamedTuple):
    """The peer subscribes to messages whose first frame begins with `prefix`."""

    prefix: bytes


class Cancel(NamedTuple):
    """The peer cancels its subscription to `prefix`."""

    prefix: bytes


Event = Ready | Message | Refused | Ping | Multipart | Subscribe | Cancel


# --- encoding -------------------------------------------------------------------------------


def ready(socket_type: str = "ROUTER") -> bytes:
    """Encode the READY command of our socket."""
    properties = _property(b"Socket-Type", socket_type.encode())
    if socket_type in ("ROUTER", "REQ"):
        properties += _property(b"Identity", b"")
    return command(b"READY", properties)


def error(reason: str) -> bytes:
    """Encode the ERROR command, which ends a failed handshake."""
    text = reason.encode("ascii", "replace")[:_SHORT_BYTES]
    return command(b"ERROR", bytes([len(text)]) + text)


def pong(context: bytes) -> bytes:
    return command(b"PONG", context)


def reply_head(envelope: Envelope | None, size: int) -> bytes:
    """Encode everything before the content of a message; the content has `size` bytes. The
    envelope None means a peer that uses neither envelope nor delimiter.
    """
    if not envelope:  # as `frame_head`, inlined: nearly all replies have no envelope frames
        last = bytes((0, size)) if size <= _SHORT_BYTES else b"\x02" + _LONG_SIZE.pack(size)
        return last if envelope is None else _DELIMITER + last
    frames = [frame_head(MORE, len(frame)) + frame for frame in envelope]
    return b"".join((*frames, _DELIMITER, frame_head(0, size)))


def frame_head(flags: int, size: int) -> bytes:
    """Encode the flags and the size of a frame."""
    if size <= _SHORT_BYTES:
        return bytes((flags, size))
    return bytes((flags | LONG,)) + _LONG_SIZE.pack(size)


def command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return frame_head(COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + _VALUE_SIZE.pack(len(value)) + value


# --- decoding -------------------------------------------------------------------------------


class FrameDecoder(ABC):
    """Decode one peer's bytes. `receive` adds bytes; `next_event` returns one event at a time.

    A subclass gives the frames their meaning. It may refuse a frame when its size is known
    (`_on_frame_begin`), gets the complete frame (`_on_frame`), and makes an event at the end of a
    message (`_on_message_end`).
    """

    __slots__ = (
        "minor",
        "refused_socket",
        "_buffer",
        "_content",
        "_flags",
        "_has_greeting",
        "_is_inside_message",
        "_remaining_bytes",
        "_allowed_sockets",
        "_position",
        "_is_ready",
        "_refusal",
        "_size",
    )

    def __init__(self, allowed_sockets: Collection[str]) -> None:
        """`allowed_sockets` are the types of sockets that may connect."""
        #: The minor version of the peer's ZMTP 3.
        self.minor = 0
        #: The type of the peer's socket, if it is not allowed.
        self.refused_socket = ""
        self._allowed_sockets = allowed_sockets
        self._buffer = b""
        self._position = 0
        self._has_greeting = False
        self._is_ready = False
        #: Whether a frame of an incomplete message has arrived.
        self._is_inside_message = False
        #: Why the incomplete message is skipped; None if it is not.
        self._refusal: QuackError | None = None
        #: The head of the incomplete frame. The size is -1 until the head has arrived.
        self._flags = 0
        self._size = -1
        #: The part of a large content that has arrived.
        self._content: bytearray | None = None
        #: The bytes of a collected or skipped frame that have not arrived.
        self._remaining_bytes = 0

    @property
    def announced_bytes(self) -> int:
        """The size of an incomplete large message, as far as it is known; otherwise 0."""
        return 0 if self._content is None else self._size

    @property
    def received_bytes(self) -> int:
        """The bytes of `announced_bytes` that have arrived."""
        return 0 if self._content is None else len(self._content)

    @property
    def opening(self) -> bytes:
        """The first bytes of a peer that has not sent a complete greeting."""
        return b"" if self._has_greeting else self._buffer[: serving_limits.OPENING_BYTES]

    @property
    def has_partial_message(self) -> bool:
        """Whether a message or the handshake has begun to arrive and is incomplete."""
        return (
            not self._is_ready
            or self._position < len(self._buffer)
            or self._size >= 0
            or self._is_inside_message
        )

    def receive(self, data: bytes) -> None:
        if self._position < len(self._buffer):
            self._buffer = self._buffer[self._position :] + data
        else:
            self._buffer = data
        self._position = 0
        if self._remaining_bytes:
            self._consume_remaining()

    def next_event(self) -> Event | None:
        """Return the next event, or None if that needs more bytes. Raise ProtocolError."""
        if not self._has_greeting and not self._read_greeting():
            return None
        while self._read_head():
            if self._flags & COMMAND:
                body = self._take_bytes(self._size)
                if body is None:
                    return None
                self._size = -1
                event = self._on_command(body)
            else:
                if not self._is_ready:
                    raise ProtocolError("a message came before the READY command")
                if not self._read_body():
                    return None
                self._size = -1
                self._is_inside_message = bool(self._flags & MORE)
                if self._is_inside_message:
                    continue
                refusal, self._refusal = self._refusal, None
                event = self._on_message_end(refusal)
            if event is not None:
                return event
        return None

    # --- implemented by subclasses ----------------------------------------------------------

    @abstractmethod
    def _on_frame_begin(self, size: int) -> bool:
        """Check a frame of `size` bytes before it arrives. Set `_refusal` to skip the message.
        Return whether the frame may be large, so that its pieces are collected as they arrive.
        """

    @abstractmethod
    def _on_frame(self, body: bytes) -> None:
        """Add a complete frame to the message."""

    @abstractmethod
    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        """Return the event for a complete message, which was skipped if there is a `refusal`."""

    def _on_other_command(self, name: bytes, data: bytes) -> Event | None:
        return None  # PONG, or a command of a later version

    # --- frames -----------------------------------------------------------------------------

    def _read_head(self) -> bool:
        """Read the flags and the size of the next frame; return False if bytes are missing."""
        if self._size >= 0:
            return True
        unread_bytes = len(self._buffer) - self._position
        if unread_bytes < 2:
            return False
        flags = self._buffer[self._position]
        if flags > (MORE | LONG | COMMAND) or flags & (COMMAND | MORE) == COMMAND | MORE:
            raise ProtocolError(f"a frame has the flags {flags:#04x}")
        if flags & LONG:
            if unread_bytes < 9:
                return False
            (size,) = _LONG_SIZE.unpack_from(self._buffer, self._position + 1)
            self._position += 9
        else:
            size = self._buffer[self._position + 1]
            self._position += 2
        if size >= 2**63:
            raise ProtocolError(f"a frame announces {size} bytes")
        if flags & COMMAND and size > limits.ZMQ_COMMAND_BYTES:
            raise ProtocolError(
                f"a command of {size} bytes; the limit is {limits.ZMQ_COMMAND_BYTES}"
            )
        self._flags, self._size = flags, size
        if not flags & COMMAND:
            self._begin_frame(size)
        return True

    def _begin_frame(self, size: int) -> None:
        """Begin to skip a frame, or to collect one that has not arrived completely."""
        is_collected = self._on_frame_begin(size) if self._refusal is None else False
        if self._refusal is not None:
            self._remaining_bytes = size
            self._consume_remaining()
        elif is_collected and size > len(self._buffer) - self._position:
            self._content = bytearray()
            self._remaining_bytes = size
            self._consume_remaining()

    def _consume_remaining(self) -> None:
        """Collect or skip the bytes of the current frame that have arrived."""
        count = min(self._remaining_bytes, len(self._buffer) - self._position)
        if self._content is not None:
            self._content += memoryview(self._buffer)[self._position : self._position + count]
        self._position += count
        self._remaining_bytes -= count

    def _read_body(self) -> bool:
        """Read or skip the body of the current frame; return False if bytes are missing."""
        if self._refusal is not None:
            return not self._remaining_bytes
        if self._content is not None:
            if self._remaining_bytes:
                return False
            self._on_frame(bytes(self._content))
            self._content = None
            return True
        body = self._take_bytes(self._size)
        if body is None:
            return False
        self._on_frame(body)
        return True

    def _take_bytes(self, size: int) -> bytes | None:
        """Return the next `size` bytes, or None if they have not all arrived."""
        end = self._position + size
        if end > len(self._buffer):
            return None
        data = self._buffer[self._position : end]
        self._position = end
        return data

    # --- greeting and commands --------------------------------------------------------------

    def _read_greeting(self) -> bool:
        """Read the greeting; return False if bytes are missing. Raise ProtocolError as soon as the
        bytes show that the greeting is invalid.
        """
        greeting = self._buffer[:GREETING_BYTES]
        if greeting[:1] not in (b"", b"\xff") or (len(greeting) >= 10 and not greeting[9] & 1):
            raise ProtocolError("it does not speak ZMTP")
        if len(greeting) >= 11 and greeting[10] < 3:
            raise ProtocolError("ZMTP 3.0 is required: upgrade to libzmq 4.0 or later")
        if len(greeting) < GREETING_BYTES:
            return False
        if greeting[12:32] != _MECHANISM:
            name = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
            raise ProtocolError(f"the security mechanism {name!r} is not supported: use NULL")
        self.minor = greeting[11]
        self._position = GREETING_BYTES
        self._has_greeting = True
        return True

    def _on_command(self, body: bytes) -> Event | None:
        """Handle a command of the peer; return its event, or None. The first command must be
        READY, from a socket type that is served here. Raise ProtocolError otherwise."""
        name_size = body[0] if body else 0
        name, data = body[1 : 1 + name_size], body[1 + name_size :]
        if not self._is_ready:
            if name != b"READY":
                raise ProtocolError(f"the first command of the peer is {name!r}, not READY")
            socket_type = (
                _parse_properties(data).get(b"socket-type", b"").decode("ascii", "replace")
            )
            if socket_type not in self._allowed_sockets:
                self.refused_socket = socket_type or "typeless"
                served = " and ".join(name for name in self._allowed_sockets if name != "ROUTER")
                raise ProtocolError(f"a {socket_type!r} socket, where {served} are served")
            self._is_ready = True
            return Ready(socket_type)
        if name == b"PING":
            if len(data) < _PING.size:
                raise ProtocolError("a PING without a time")
            (tenths,) = _PING.unpack_from(data)
            return Ping(tenths * 100, data[_PING.size : _PING.size + limits.ZMQ_PING_BYTES])
        return self._on_other_command(name, data)


class EnvelopeDecoder(FrameDecoder):
    """Decode messages with an envelope: requests of peers, or replies to our requests."""

    __slots__ = ("_envelope", "_has_delimiter", "_content_frame")

    def __init__(self, allowed_sockets: Collection[str] = REQUESTING_SOCKETS) -> None:
        super().__init__(allowed_sockets)
        #: The parts of the incomplete message. The envelope is None if it is invalid.
        self._envelope: list[bytes] | None = []
        self._has_delimiter = False
        self._content_frame: bytes | None = None

    def next_event(self) -> Event | None:
        """Return the next event, or None if that needs more bytes. Raise ProtocolError."""
        if self._is_ready and self._size < 0:
            # Fast path for the common case: a complete short request without an envelope.
            begin = self._position
            buffer = self._buffer
            if begin == len(buffer):
                return None
            if (
                not self._is_inside_message
                and buffer.startswith(_PLAIN_REQUEST_START, begin)
                and len(buffer) > begin + 3
            ):
                end = begin + 4 + buffer[begin + 3]
                if end <= len(buffer):
                    self._position = end
                    return new_tuple(Message, ((), buffer[begin + 4 : end]))
        return super().next_event()

    def _on_frame_begin(self, size: int) -> bool:
        """Check the size of a frame before its body arrives; set `_refusal` if the message is
        invalid. Return whether the body may be large: that of the content may be, those of the
        envelope may not."""
        if self._content_frame is not None:
            self._content_frame = None
            self._refusal = ProtocolError("a request is one frame; this one has several")
        elif self._has_delimiter:
            if size > limits.ZMQ_REQUEST_BYTES:
                self._refusal = RecordTooLarge(
                    f"a request of {size} bytes; the limit is {limits.ZMQ_REQUEST_BYTES}"
                )
        elif size > limits.ZMQ_ENVELOPE_FRAME_BYTES or (
            size and len(self._envelope or ()) >= limits.ZMQ_ENVELOPE_FRAMES
        ):
            self._envelope = None
            self._refusal = ProtocolError(_NO_DELIMITER)
        return self._has_delimiter

    def _on_frame(self, body: bytes) -> None:
        """Add a frame to the incomplete message: to the envelope up to the empty frame, which is
        the delimiter; after that it is the content."""
        if self._has_delimiter:
            self._content_frame = body
        elif body:
            assert self._envelope is not None, "else the message is refused"
            self._envelope.append(body)
        else:
            self._has_delimiter = True

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        """Return the complete message, or `Refused`. Start the next message."""
        envelope, content = self._envelope, self._content_frame
        had_delimiter = self._has_delimiter
        self._envelope, self._content_frame = [], None
        self._has_delimiter = False
        if refusal is not None:
            return Refused(None if envelope is None else tuple(envelope), refusal)
        if not had_delimiter:
            return Refused(None, ProtocolError(_NO_DELIMITER))
        assert envelope is not None, "else the message is refused"
        if content is None:
            return Refused(tuple(envelope), ProtocolError("there is no frame with a request"))
        return Message(tuple(envelope), content)


_NO_DELIMITER: Final = "a request begins with an empty frame, as a REQ socket sends it"


def _parse_properties(data: bytes) -> dict[bytes, bytes]:
    """Parse the metadata of READY. The names are returned in lower case."""
    properties = {}
    position = 0
    while position < len(data):
        name_end = position + 1 + data[position]
        value_begin = name_end + _VALUE_SIZE.size
        if value_begin > len(data):
            raise ProtocolError("the READY command is cut short")
        (size,) = _VALUE_SIZE.unpack_from(data, name_end)
        if value_begin + size > len(data):
            raise ProtocolError("the READY command is cut short")
        name = data[position + 1 : name_end].lower()
        properties[name] = data[value_begin : value_begin + size]
        position = value_begin + size
    return properties
