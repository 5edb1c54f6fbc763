"""Decode and encode the messages of PUB sockets and the subscriptions of SUB sockets, over ZMTP.

A publisher's message has one or more frames; the first is its topic. A subscriber subscribes to
prefixes of that frame. In ZMTP 3.0 it sends a message of one frame, in 3.1 a command:

    3.0   +---------------+--------+        3.1   a command SUBSCRIBE or CANCEL,
          | 1, or 0 to    | prefix |              whose data is the prefix
          | cancel it: u8 |        |
          +---------------+--------+

Both forms are accepted from peers of either version, as in libzmq. A subscriber may also send other
messages, for the program behind an XPUB socket. They have no meaning here and are skipped.

Promises, as in `zmtp`: the same bytes give the same events, however they are split, or a
ProtocolError. A message that exceeds a bound is skipped and reported as `Refused`.
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
    frame_head,
)

#: Types of sockets that may connect to an XSUB socket.
PUBLISHING_SOCKETS: Final = ("PUB", "XPUB")
#: Types of sockets that may connect to an XPUB socket.
SUBSCRIBING_SOCKETS: Final = ("SUB", "XSUB")


def encode_subscription(prefix: bytes, minor: int) -> bytes:
    """Encode the subscription that we send to a publisher of ZMTP 3.`minor`."""
    if minor >= 1:
        return command(b"SUBSCRIBE", prefix)
    return frame_head(0, 1 + len(prefix)) + b"\x01" + prefix


def encode_message(*frames: bytes) -> bytes:
    """Encode a message of one or more frames."""
    *earlier, last = frames
    pieces = [piece for frame in earlier for piece in (frame_head(MORE, len(frame)), frame)]
    return b"".join((*pieces, frame_head(0, len(last)), last))


class PublisherDecoder(FrameDecoder):
    """Decode the bytes of a publisher: `Multipart` events, or `Refused` for invalid messages."""

    __slots__ = ("_frames", "_frame_bytes")

    def __init__(self) -> None:
        super().__init__(PUBLISHING_SOCKETS)
        self._frames: list[bytes] = []
        self._frame_bytes = 0

    @property
    def announced_bytes(self) -> int:
        return self._frame_bytes + super().announced_bytes

    @property
    def received_bytes(self) -> int:
        return self._frame_bytes + super().received_bytes

    def _on_frame_begin(self, size: int) -> bool:
        """Refuse a message that has too many frames or bytes, or whose first frame is too long for
        a topic's name. Return True, because a body may be large.
        """
        if len(self._frames) >= limits.PROXY_FRAMES:
            self._refuse(ProtocolError("a message is two frames: its topic and its body"))
        elif not self._frames and size > shared_limits.TOPIC_NAME_CHARS:
            self._refuse(IllegalTopicName(f"a first frame of {size} bytes is no topic's name"))
        elif self._frame_bytes + size > limits.PROXY_MESSAGE_BYTES:
            self._refuse(
                RecordTooLarge(
                    f"a message of {self._frame_bytes + size} bytes; the limit is "
                    f"{limits.PROXY_MESSAGE_BYTES}"
                )
            )
        return True

    def _on_frame(self, body: bytes) -> None:
        self._frames.append(body)
        self._frame_bytes += len(body)

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        frames = tuple(self._frames)
        self._reset()
        return Multipart(frames) if refusal is None else Refused(None, refusal)

    def _refuse(self, error: QuackError) -> None:
        self._refusal = error
        self._reset()

    def _reset(self) -> None:
        self._frames = []
        self._frame_bytes = 0


class SubscriberDecoder(FrameDecoder):
    """Decode the bytes of a subscriber: `Subscribe` and `Cancel` events.

    A prefix that is longer than any topic name is an error: it could never match.
    """

    __slots__ = ("_first_frame",)

    def __init__(self) -> None:
        super().__init__(SUBSCRIBING_SOCKETS)
        self._first_frame: bytes | None = None

    def _on_frame_begin(self, size: int) -> bool:
        """Refuse a message that has several frames, or is longer than any subscription. Return
        False: no large frame is expected."""
        if self._is_inside_message or size > 1 + limits.PROXY_PREFIX_BYTES:
            self._first_frame = None
            self._refusal = ProtocolError("a message that is not a subscription")
        return False

    def _on_frame(self, body: bytes) -> None:
        self._first_frame = body

    def _on_message_end(self, refusal: QuackError | None) -> Event | None:
        first, self._first_frame = self._first_frame, None
        if refusal is not None or not first or first[0] > 1:
            return None
        return Subscribe(first[1:]) if first[0] else Cancel(first[1:])

    def _on_other_command(self, name: bytes, data: bytes) -> Event | None:
        """Return the event of SUBSCRIBE or CANCEL, and None for other commands. Raise ProtocolError
        if the prefix is too long.
        """
        if name not in (b"SUBSCRIBE", b"CANCEL"):
            return None
        if len(data) > limits.PROXY_PREFIX_BYTES:
            raise ProtocolError(
                f"a subscription of {len(data)} bytes; the limit is {limits.PROXY_PREFIX_BYTES}"
            )
        return Subscribe(data) if name == b"SUBSCRIBE" else Cancel(data)
