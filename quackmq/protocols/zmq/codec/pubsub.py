"""What ZeroMQ's publishers and subscribers say, on ZMTP: messages, and what somebody wants of them.

A publisher's message is one or more frames, of which the first is its topic. A subscriber says what
it wants as prefixes of that frame: in ZMTP 3.0 by a message of one frame, in 3.1 by a command.

    3.0   +---------------+--------+        3.1   a command SUBSCRIBE or CANCEL,
          | 1, or 0 to    | prefix |              whose data is the prefix
          | cancel it: u8 |        |
          +---------------+--------+

Both are read from peers of either version, as libzmq reads them. Other messages of a subscriber are
its own talk to an XPUB socket's program; there is none here, and they are read past.

Promised as in `zmtp`: the same events however the bytes come, or a ProtocolError; a message beyond
the bounds is read past and told of as `Refused`.
"""

from __future__ import annotations

from typing import Final

from quackmq import limits as shared_limits
from quackmq.errors import IllegalTopicName, ProtocolError, QuackError, RecordTooLarge
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec.zmtp import (
    MORE,
    Cancel,
    Event,
    FrameDecoder,
    Multipart,
    Refused,
    Subscribe,
    command,
    head,
)

#: Sockets that talk to an XSUB, and to an XPUB.
PUBLISHING: Final = ("PUB", "XPUB")
SUBSCRIBING: Final = ("SUB", "XSUB")


def subscription(prefix: bytes, minor: int) -> bytes:
    """What a socket of ours says to a publisher of ZMTP 3.`minor`."""
    if minor >= 1:
        return command(b"SUBSCRIBE", prefix)
    return head(0, 1 + len(prefix)) + b"\x01" + prefix


def message(*frames: bytes) -> bytes:
    """Frames as they are sent."""
    *first, last = frames
    pieces = [piece for frame in first for piece in (head(MORE, len(frame)), frame)]
    return b"".join((*pieces, head(0, len(last)), last))


class PublisherDecoder(FrameDecoder):
    """Of a peer that publishes: `Multipart`, or `Refused` for one that is too large."""

    __slots__ = ("_frames", "_kept_bytes")

    def __init__(self) -> None:
        super().__init__(PUBLISHING)
        self._frames: list[bytes] = []
        self._kept_bytes = 0

    @property
    def claimed_bytes(self) -> int:
        return self._kept_bytes + super().claimed_bytes

    @property
    def received_bytes(self) -> int:
        return self._kept_bytes + super().received_bytes

    def _on_frame_begin(self, size: int) -> bool:
        if len(self._frames) >= limits.PROXY_FRAMES:
            self._refuse(ProtocolError("a message is two frames: its topic and its body"))
        elif not self._frames and size > shared_limits.TOPIC_NAME_CHARS:
            self._refuse(IllegalTopicName(f"a first frame of {size} bytes is no topic's name"))
        elif self._kept_bytes + size > limits.PROXY_MESSAGE_BYTES:
            self._refuse(
                RecordTooLarge(
                    f"a message of {self._kept_bytes + size} bytes; {limits.PROXY_MESSAGE_BYTES} "
                    "are taken"
                )
            )
        return True

    def _on_frame(self, body: bytes) -> None:
        self._frames.append(body)
        self._kept_bytes += len(body)

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        frames = tuple(self._frames)
        self._forget()
        return Multipart(frames) if refusal is None else Refused(None, refusal)

    def _refuse(self, error: QuackError) -> None:
        self._refusal = error
        self._forget()

    def _forget(self) -> None:
        self._frames = []
        self._kept_bytes = 0


class SubscriberDecoder(FrameDecoder):
    """Of a peer that subscribes. A prefix that no topic is as long as is an error: it would be
    kept for nothing."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        super().__init__(SUBSCRIBING)
        self._first: bytes | None = None

    def _on_frame_begin(self, size: int) -> bool:
        # Of a longer message, or of several frames, it is the program's own talk.
        if self._is_within or size > 1 + limits.PROXY_PREFIX_BYTES:
            self._first = None
            self._refusal = ProtocolError("no subscription")
        return False

    def _on_frame(self, body: bytes) -> None:
        self._first = body

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        first, self._first = self._first, None
        if refusal is not None or not first or first[0] > 1:
            return None
        return Subscribe(first[1:]) if first[0] else Cancel(first[1:])

    def _on_other_command(self, name: bytes, data: bytes) -> Event | None:
        if name not in (b"SUBSCRIBE", b"CANCEL"):
            return None
        if len(data) > limits.PROXY_PREFIX_BYTES:
            raise ProtocolError(
                f"a subscription of {len(data)} bytes; {limits.PROXY_PREFIX_BYTES} are enough"
            )
        return Subscribe(data) if name == b"SUBSCRIBE" else Cancel(data)
