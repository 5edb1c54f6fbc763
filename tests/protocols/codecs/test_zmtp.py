"""ZMTP from the side of a ROUTER: the same events however the bytes come, and bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quackmq.errors import ProtocolError, RecordTooLarge
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.codec.zmtp import EnvelopeDecoder, Event, Message, Ping, Ready, Refused
from tests.kit.tables import each
from tests.protocols.codecs.zmtp_frames import (
    COMMAND,
    HELLO,
    LONG,
    MORE,
    command,
    frame,
    greeting,
    message,
    ready,
    request,
)

LARGE = b"x" * 3_000


def events_of(*pieces: bytes) -> list[Event]:
    decoder = EnvelopeDecoder()
    events = []
    for piece in pieces:
        decoder.receive(piece)
        while (event := decoder.next_event()) is not None:
            events.append(event)
    return events


def plain(event: Event) -> object:
    """Errors are equal to themselves alone; their kind and text are what counts."""
    if isinstance(event, Refused):
        return event.envelope, type(event.error), str(event.error)
    return event


STREAM = (
    HELLO
    + request(b"SUB donald ducks")
    + request(b"")
    + message(b"\0\1\2\3\4", b"", b"with an envelope")
    + message(b"proxy", b"\0\0\0\7", b"", LARGE)
    + command(b"PING", b"\0\x0aabc")
    + command(b"PONG", b"abc")
    + command(b"NEWER", b"whatever")
    + message(b"", b"a", b"b", b"c")
    + message(b"no delimiter")
    + message(b"an", b"envelope", b"")
    + frame(b"", MORE, long=True)
    + frame(b"a short one with a long size", long=True)
)


def test_a_peers_bytes_are_read_as_what_they_mean() -> None:
    events = events_of(STREAM)
    assert events[:6] == [
        Ready("REQ"),
        Message((), b"SUB donald ducks"),
        Message((), b""),
        Message((b"\0\1\2\3\4",), b"with an envelope"),
        Message((b"proxy", b"\0\0\0\7"), LARGE),
        Ping(1_000, b"abc"),
    ]
    several, undelimited, empty, long = events[6:]
    assert isinstance(several, Refused) and several.envelope == ()
    assert "one frame" in str(several.error)
    assert isinstance(undelimited, Refused) and undelimited.envelope is None
    assert "begins with an empty frame" in str(undelimited.error)
    assert isinstance(empty, Refused) and empty.envelope == (b"an", b"envelope")
    assert long == Message((), b"a short one with a long size")


def test_bytes_one_by_one_mean_the_same() -> None:
    whole = [plain(event) for event in events_of(STREAM)]
    single = events_of(*(STREAM[at : at + 1] for at in range(len(STREAM))))
    assert [plain(event) for event in single] == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_bytes_mean_the_same_however_they_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    whole = [plain(event) for event in events_of(STREAM)]
    assert [plain(event) for event in events_of(*pieces)] == whole


@settings(deadline=None)
@given(st.binary(max_size=2_000), st.integers(0, len(STREAM)), st.booleans())
@example(b"\xff" * 64, 0, False)
def test_any_bytes_give_events_or_a_protocol_error(
    garbage: bytes, after: int, one_by_one: bool
) -> None:
    data = STREAM[:after] + garbage
    pieces = [data[at : at + 1] for at in range(len(data))] if one_by_one else [data]
    try:
        events = events_of(*pieces)
    except ProtocolError as error:
        assert len(str(error)) < 1_000
        return
    assert all(isinstance(event, Event) for event in events)


# --- what is refused ---------------------------------------------------------------------------


@each(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\0", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "ZMTP 3.0 is required"),
        (greeting(mechanism=b"CURVE"), "'CURVE'"),
        (greeting() + request(b"too early"), "before the READY command"),
        (greeting() + command(b"HELLO"), "not READY"),
        (greeting() + frame(b"", COMMAND), "not READY"),
        (greeting() + ready(b"SUB"), "REQ and DEALER are served"),
        (greeting() + command(b"READY", b"\x0bSocket-Type\0\0"), "cut short"),
        (greeting() + command(b"READY", b"\x0bSocket-Type\0\0\0\x09REQ"), "cut short"),
        (HELLO + frame(b"x", 8), "flags 0x08"),
        (HELLO + frame(b"x", COMMAND | MORE), "flags 0x05"),
        (HELLO + bytes([LONG]) + b"\xff" * 8, "a frame announces"),
        (HELLO + frame(bytes(zmq_limits.ZMQ_COMMAND_BYTES + 1), COMMAND), "a command of"),
        (HELLO + command(b"PING", b"\0"), "without a time"),
    ],
)
def test_what_makes_no_sense_is_said_in_words(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        events_of(data)


def test_what_is_wrong_with_a_greeting_is_said_before_it_is_whole() -> None:
    with pytest.raises(ProtocolError):
        events_of(b"G")


@pytest.mark.parametrize("socket_type", [b"REQ", b"DEALER", b"ROUTER"])
def test_sockets_that_talk_to_a_router_are_let_in(socket_type: bytes) -> None:
    hello = greeting(minor=0) + ready(socket_type, Identity=b"me", **{"X-Note": b"hi"})
    assert events_of(hello) == [Ready(socket_type.decode())]


# --- bounds ------------------------------------------------------------------------------------


def test_a_request_over_the_limit_is_read_past_and_told_of() -> None:
    size = zmq_limits.ZMQ_REQUEST_BYTES + 1
    decoder = EnvelopeDecoder()
    decoder.receive(HELLO + frame(b"", MORE) + bytes([LONG]) + size.to_bytes(8, "big"))
    assert decoder.next_event() == Ready("REQ")
    piece = bytes(2**20)
    for _ in range(size // len(piece)):
        decoder.receive(piece)
        assert decoder.next_event() is None
        assert decoder.announced_bytes == 0, "nothing of it is kept"
    decoder.receive(bytes(size % len(piece)) + request(b"next"))
    refused = decoder.next_event()
    assert isinstance(refused, Refused) and refused.envelope == ()
    assert isinstance(refused.error, RecordTooLarge)
    assert decoder.next_event() == Message((), b"next")


def test_a_message_of_very_many_frames_costs_no_memory() -> None:
    decoder = EnvelopeDecoder()
    decoder.receive(HELLO + frame(b"", MORE) + frame(b"content", MORE))
    assert decoder.next_event() == Ready("REQ")
    for _ in range(1_000):
        decoder.receive(frame(b"y" * 255, MORE) * 10)
        assert decoder.next_event() is None
        assert decoder.announced_bytes == 0
    assert decoder.has_partial_message
    decoder.receive(frame(b"the last one"))
    assert isinstance(decoder.next_event(), Refused)
    assert not decoder.has_partial_message


def test_an_envelope_is_bounded() -> None:
    whole = [b"x" * zmq_limits.ZMQ_ENVELOPE_FRAME_BYTES] * zmq_limits.ZMQ_ENVELOPE_FRAMES
    _, accepted = events_of(HELLO, message(*whole, b"", b"content"))
    assert accepted == Message(tuple(whole), b"content")
    for envelope in ([*whole, b"x"], [b"x" * (zmq_limits.ZMQ_ENVELOPE_FRAME_BYTES + 1)]):
        _, refused, after = events_of(HELLO, message(*envelope, b"", b"content"), request(b"next"))
        assert isinstance(refused, Refused) and refused.envelope is None
        assert after == Message((), b"next")


def test_what_is_not_asked_for_stays_where_it_is() -> None:
    decoder = EnvelopeDecoder()
    decoder.receive(HELLO + request(b"1") + request(b"2"))
    assert decoder.next_event() == Ready("REQ")
    decoder.receive(request(b"3"))
    assert [decoder.next_event() for _ in range(4)] == [
        Message((), b"1"),
        Message((), b"2"),
        Message((), b"3"),
        None,
    ]


def test_it_is_known_how_much_of_a_large_request_is_here() -> None:
    decoder = EnvelopeDecoder()
    data = request(LARGE)
    decoder.receive(HELLO + data[:1_000])
    assert decoder.next_event() == Ready("REQ")
    assert decoder.next_event() is None
    assert decoder.announced_bytes == len(LARGE)
    assert 0 < decoder.received_bytes < 1_000
    decoder.receive(data[1_000:])
    assert decoder.next_event() == Message((), LARGE)
    assert (decoder.announced_bytes, decoder.received_bytes, decoder.has_partial_message) == (
        0,
        0,
        False,
    )


# --- what is sent ------------------------------------------------------------------------------


@each("content", [b"", b"x" * 255, b"x" * 256, LARGE])
@each("envelope", [(), (b"one",), (b"one", b"two" * 80)])
def test_an_answer_has_the_envelope_of_its_request(
    envelope: tuple[bytes, ...], content: bytes
) -> None:
    answer = zmtp.reply_head(envelope, len(content)) + content
    assert events_of(HELLO, answer)[1:] == [Message(envelope, content)]
    assert answer == message(*envelope, b"", content)


def test_an_answer_to_what_has_no_envelope_is_one_frame() -> None:
    assert zmtp.reply_head(None, 3) + b"ERR" == message(b"ERR")


def test_commands_are_written_as_they_are_read() -> None:
    assert zmtp.pong(b"abc") == command(b"PONG", b"abc")
    assert zmtp.error("no") == command(b"ERROR", b"\x02no")
    assert zmtp.ready() == ready(b"ROUTER", Identity=b"")
    assert len(zmtp.GREETING) == zmtp.GREETING_BYTES
