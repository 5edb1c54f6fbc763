"""ZMTP 3.x, ZeroMQ's own protocol on TCP: bytes in, events out.

Just what the broker's sockets take: here what all of them share (greetings, frames, commands) and
requests, from either side, as a ROUTER takes them from REQ and DEALER sockets and a REQ socket its
answers from a REP; what publishers and subscribers send is in `pubsub`. All of it is under
bounds of our own: on the frames and the bytes of a message, of one peer and of all together.
libzmq's options bound how many messages wait for a peer and how large a frame is; we found none for
a message's frames or for all peers, and have not tried how much memory that comes to. Versions
before 3 (libzmq before 4.0, of 2013) and mechanisms other than NULL are refused.

Both sides begin with a greeting, and then a READY command:

     0      1          9      10      11      12          32          33          64
     +------+----------+------+-------+-------+-----------+-----------+-----------+
     | 0xFF | 8 bytes, | 0x7F | major | minor | mechanism | as server | zeros     |
     |      | not used |      | 3     |       | 20 bytes  | u8        |           |
     +------+----------+------+-------+-------+-----------+-----------+-----------+

Then there are frames, whose flags are 1 for "more follow", 2 for a size of eight bytes and 4 for a
command:

     +-------+-----------+------+        command:  +-----------+------+------+
     | flags | size      | body |                  | name size | name | data |
     | u8    | u8 or u64 |      |                  | u8        |      |      |
     +-------+-----------+------+                  +-----------+------+------+

A request is a message of frames: the envelope (empty for a REQ socket, the ids that proxies and
correlating REQ sockets add otherwise), an empty frame, the content. Its answer has the same
envelope, so that it finds its way back.

Promised: any bytes, however they are cut, give the same events or a ProtocolError, after which the
connection makes no sense. Memory is bounded: a request that cannot be taken is read past, not kept,
and told of as `Refused`. Bytes not yet asked for by `next_event` stay as they are.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final, NamedTuple

from quackmq.errors import ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.zmq import limits
from quackmq.serving import limits as serving_limits

Envelope = tuple[bytes, ...]

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
_SHORT_BYTES: Final = 255
_LONG_SIZE: Final = struct.Struct(">Q")
_VALUE_SIZE: Final = struct.Struct(">I")
_PING: Final = struct.Struct(">H")

GREETING_BYTES: Final = 64
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + _MECHANISM + bytes(32)
#: Sockets that talk to a ROUTER, and those that a REQ socket talks to.
ASKING: Final = ("REQ", "DEALER", "ROUTER")
ANSWERING: Final = ("REP", "ROUTER")
#: What nearly every request of a REQ socket begins with: the empty frame, then a short last one.
_PLAIN: Final = b"\x01\x00\x00"
_new_tuple: Final = tuple.__new__


class Ready(NamedTuple):
    """The peer has introduced itself; from now on there are requests."""

    socket_type: str


class Message(NamedTuple):
    envelope: Envelope
    content: bytes


class Refused(NamedTuple):
    """A message that is whole and cannot be taken. Without an envelope there is no way back but the
    connection itself."""

    envelope: Envelope | None
    error: QuackError


class Ping(NamedTuple):
    """To be answered with `pong(context)`. A peer that says a time will be heard within it."""

    ttl_ms: int
    context: bytes


class Multipart(NamedTuple):
    """A message of a publisher, whole."""

    frames: tuple[bytes, ...]


class Subscribe(NamedTuple):
    """The peer wants messages whose first frame begins so."""

    prefix: bytes


class Cancel(NamedTuple):
    """It wants them no more."""

    prefix: bytes


Event = Ready | Message | Refused | Ping | Multipart | Subscribe | Cancel


# --- what is sent ---------------------------------------------------------------------------


def ready(socket_type: str = "ROUTER") -> bytes:
    """How a socket of ours introduces itself."""
    properties = _property(b"Socket-Type", socket_type.encode())
    if socket_type in ("ROUTER", "REQ"):
        properties += _property(b"Identity", b"")
    return command(b"READY", properties)


def error(reason: str) -> bytes:
    """The last thing that a peer hears whose handshake fails."""
    text = reason.encode("ascii", "replace")[:_SHORT_BYTES]
    return command(b"ERROR", bytes([len(text)]) + text)


def pong(context: bytes) -> bytes:
    return command(b"PONG", context)


def answer_head(envelope: Envelope | None, size: int) -> bytes:
    """What stands before the content of an answer, which has so many bytes."""
    if not envelope:
        last = bytes((0, size)) if size <= _SHORT_BYTES else b"\x02" + _LONG_SIZE.pack(size)
        return last if envelope is None else b"\x01\x00" + last
    frames = [head(MORE, len(frame)) + frame for frame in envelope]
    return b"".join((*frames, b"\x01\x00", head(0, size)))


def head(flags: int, size: int) -> bytes:
    if size <= _SHORT_BYTES:
        return bytes((flags, size))
    return bytes((flags | LONG,)) + _LONG_SIZE.pack(size)


def command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return head(COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + _VALUE_SIZE.pack(len(value)) + value


# --- what is received -----------------------------------------------------------------------


class FrameDecoder(ABC):
    """One peer's bytes. `receive` takes them, `next_event` gives what they mean, one at a time.

    What a frame is in its message, those below say: a frame is worth keeping or left out as soon as
    its size is known (`_on_frame_begin`), is there (`_on_frame`), and ends its message or does not
    (`_on_message_end`)."""

    __slots__ = (
        "minor",
        "refused_socket",
        "_buffer",
        "_content",
        "_flags",
        "_greeted",
        "_is_within",
        "_left_bytes",
        "_peers",
        "_position",
        "_ready",
        "_refusal",
        "_size",
    )

    def __init__(self, peers: Collection[str]) -> None:
        """`peers` are the types of sockets that may introduce themselves."""
        #: Of the peer's version 3.
        self.minor = 0
        #: The type of the peer's socket, if it is none of those that are served.
        self.refused_socket = ""
        self._peers = peers
        self._buffer = b""
        self._position = 0
        self._greeted = False
        self._ready = False
        #: Of the message that is coming: whether a frame of it has come, and why it is left out.
        self._is_within = False
        self._refusal: QuackError | None = None
        #: Of the frame that is coming; a size of -1 before its head has come.
        self._flags = 0
        self._size = -1
        #: What has come of a large content, and how much is still to come of it or to be left out.
        self._content: bytearray | None = None
        self._left_bytes = 0

    @property
    def claimed_bytes(self) -> int:
        """The size of a message that has begun to come and is not yet whole, as far as it is known,
        if it is worth speaking of; else 0."""
        return 0 if self._content is None else self._size

    @property
    def received_bytes(self) -> int:
        """How much of it is here."""
        return 0 if self._content is None else len(self._content)

    @property
    def opening(self) -> bytes:
        """The first bytes of a peer that has not sent a greeting."""
        return b"" if self._greeted else self._buffer[: serving_limits.OPENING_BYTES]

    @property
    def is_amid(self) -> bool:
        """Whether something has begun to come and is not yet whole, a handshake included."""
        return (
            not self._ready
            or self._position < len(self._buffer)
            or self._size >= 0
            or self._is_within
        )

    def receive(self, data: bytes) -> None:
        if self._position < len(self._buffer):
            self._buffer = self._buffer[self._position :] + data
        else:
            self._buffer = data
        self._position = 0
        if self._left_bytes:
            self._go_on()

    def next_event(self) -> Event | None:
        """None until more has come. ProtocolError."""
        if not self._greeted and not self._read_greeting():
            return None
        while self._read_head():
            if self._flags & COMMAND:
                body = self._take(self._size)
                if body is None:
                    return None
                self._size = -1
                event = self._on_command(body)
            else:
                if not self._ready:
                    raise ProtocolError("a message came before the READY command")
                if not self._read_body():
                    return None
                self._size = -1
                self._is_within = bool(self._flags & MORE)
                if self._is_within:
                    continue
                refusal, self._refusal = self._refusal, None
                event = self._on_message_end(refusal)
            if event is not None:
                return event
        return None

    # --- what messages are made of ----------------------------------------------------------

    @abstractmethod
    def _on_frame_begin(self, size: int) -> bool:
        """Whether a frame of so many bytes may be large, and is to be collected as it comes. Sets
        `_refusal` for a message that cannot be taken."""

    @abstractmethod
    def _on_frame(self, body: bytes) -> None: ...

    @abstractmethod
    def _on_message_end(self, refusal: QuackError | None) -> Event | None: ...

    def _on_other_command(self, name: bytes, data: bytes) -> Event | None:
        return None  # PONG, and whatever later versions have

    # --- frames -----------------------------------------------------------------------------

    def _read_head(self) -> bool:
        """The flags and the size of the next frame, unless they are here already."""
        if self._size >= 0:
            return True
        there = len(self._buffer) - self._position
        if there < 2:
            return False
        flags = self._buffer[self._position]
        if flags > (MORE | LONG | COMMAND) or flags & (COMMAND | MORE) == COMMAND | MORE:
            raise ProtocolError(f"a frame has the flags {flags:#04x}")
        if flags & LONG:
            if there < 9:
                return False
            (size,) = _LONG_SIZE.unpack_from(self._buffer, self._position + 1)
            self._position += 9
        else:
            size = self._buffer[self._position + 1]
            self._position += 2
        if size >= 2**63:
            raise ProtocolError(f"a frame says that it has {size} bytes")
        if flags & COMMAND and size > limits.ZMQ_COMMAND_BYTES:
            raise ProtocolError(f"a command of {size} bytes; {limits.ZMQ_COMMAND_BYTES} are enough")
        self._flags, self._size = flags, size
        if not flags & COMMAND:
            self._begin_frame(size)
        return True

    def _begin_frame(self, size: int) -> None:
        is_collected = self._on_frame_begin(size) if self._refusal is None else False
        if self._refusal is not None:
            self._left_bytes = size
            self._go_on()
        elif is_collected and size > len(self._buffer) - self._position:
            self._content = bytearray()
            self._left_bytes = size
            self._go_on()

    def _go_on(self) -> None:
        """With a frame that is collected or left out as it comes."""
        some = min(self._left_bytes, len(self._buffer) - self._position)
        if self._content is not None:
            self._content += memoryview(self._buffer)[self._position : self._position + some]
        self._position += some
        self._left_bytes -= some

    def _read_body(self) -> bool:
        """Whether the frame is here: taken, or left out."""
        if self._refusal is not None:
            return not self._left_bytes
        if self._content is not None:
            if self._left_bytes:
                return False
            self._on_frame(bytes(self._content))
            self._content = None
            return True
        body = self._take(self._size)
        if body is None:
            return False
        self._on_frame(body)
        return True

    def _take(self, size: int) -> bytes | None:
        end = self._position + size
        if end > len(self._buffer):
            return None
        taken = self._buffer[self._position : end]
        self._position = end
        return taken

    # --- greeting and commands --------------------------------------------------------------

    def _read_greeting(self) -> bool:
        """Whether it is here; what is wrong with it is said as soon as it can be."""
        greeting = self._buffer[:GREETING_BYTES]
        if greeting[:1] not in (b"", b"\xff") or (len(greeting) >= 10 and not greeting[9] & 1):
            raise ProtocolError("it does not speak ZMTP")
        if len(greeting) >= 11 and greeting[10] < 3:
            raise ProtocolError("it speaks ZMTP before version 3.0: libzmq 4.0 and later do better")
        if len(greeting) < GREETING_BYTES:
            return False
        if greeting[12:32] != _MECHANISM:
            name = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
            raise ProtocolError(f"it wants the security mechanism {name!r}; here is NULL alone")
        self.minor = greeting[11]
        self._position = GREETING_BYTES
        self._greeted = True
        return True

    def _on_command(self, body: bytes) -> Event | None:
        name_size = body[0] if body else 0
        name, data = body[1 : 1 + name_size], body[1 + name_size :]
        if not self._ready:
            if name != b"READY":
                raise ProtocolError(f"its first command is {name!r}, not READY")
            socket_type = _properties(data).get(b"socket-type", b"").decode("ascii", "replace")
            if socket_type not in self._peers:
                self.refused_socket = socket_type or "typeless"
                served = " and ".join(each for each in self._peers if each != "ROUTER")
                raise ProtocolError(f"a {socket_type!r} socket, where {served} are served")
            self._ready = True
            return Ready(socket_type)
        if name == b"PING":
            if len(data) < _PING.size:
                raise ProtocolError("a PING without a time")
            (tenths,) = _PING.unpack_from(data)
            return Ping(tenths * 100, data[_PING.size : _PING.size + limits.ZMQ_PING_BYTES])
        return self._on_other_command(name, data)


class Decoder(FrameDecoder):
    """Of a peer that sends requests, or the answers to ours."""

    __slots__ = ("_envelope", "_has_delimiter", "_whole")

    def __init__(self, peers: Collection[str] = ASKING) -> None:
        super().__init__(peers)
        #: Of the message that is coming.
        self._envelope: list[bytes] | None = []
        self._has_delimiter = False
        self._whole: bytes | None = None

    def next_event(self) -> Event | None:
        """None until more has come. ProtocolError."""
        if self._ready and self._size < 0:
            # The common case, all in one: a short request, whole, without an envelope.
            begin = self._position
            buffer = self._buffer
            if begin == len(buffer):
                return None
            if not self._is_within and buffer.startswith(_PLAIN, begin) and len(buffer) > begin + 3:
                end = begin + 4 + buffer[begin + 3]
                if end <= len(buffer):
                    self._position = end
                    # The class's own constructor takes three times as long.
                    return _new_tuple(Message, ((), buffer[begin + 4 : end]))
        return super().next_event()

    def _on_frame_begin(self, size: int) -> bool:
        if self._whole is not None:
            self._whole = None
            self._refusal = ProtocolError("a request is one frame; this one has several")
        elif self._has_delimiter:
            if size > limits.ZMQ_REQUEST_BYTES:
                self._refusal = RecordTooLarge(
                    f"a request of {size} bytes; {limits.ZMQ_REQUEST_BYTES} are taken"
                )
        elif size > limits.ZMQ_ENVELOPE_FRAME_BYTES or (
            size and len(self._envelope or ()) >= limits.ZMQ_ENVELOPE_FRAMES
        ):
            self._envelope = None
            self._refusal = ProtocolError(_NO_DELIMITER)
        return self._has_delimiter

    def _on_frame(self, body: bytes) -> None:
        if self._has_delimiter:
            self._whole = body
        elif body:
            assert self._envelope is not None, "else the message is refused"
            self._envelope.append(body)
        else:
            self._has_delimiter = True

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        envelope, whole = self._envelope, self._whole
        had_delimiter = self._has_delimiter
        self._envelope, self._whole = [], None
        self._has_delimiter = False
        if refusal is not None:
            return Refused(None if envelope is None else tuple(envelope), refusal)
        if not had_delimiter:
            return Refused(None, ProtocolError(_NO_DELIMITER))
        assert envelope is not None, "else the message is refused"
        if whole is None:
            return Refused(tuple(envelope), ProtocolError("there is no frame with a request"))
        return Message(tuple(envelope), whole)


_NO_DELIMITER: Final = "a request begins with an empty frame, as a REQ socket sends it"


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The metadata of READY. Names are the same in upper and lower case."""
    found = {}
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
        found[name] = data[value_begin : value_begin + size]
        position = value_begin + size
    return found
