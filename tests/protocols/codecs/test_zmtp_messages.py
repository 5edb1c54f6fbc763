"""What publishers and subscribers say on ZMTP: the same events however the bytes come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import IllegalTopicName, ProtocolError, RecordTooLarge
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.codec.pubsub import (
    PublisherDecoder,
    SubscriberDecoder,
    encode_message,
    encode_subscription,
)
from quackmq.protocols.zmq.codec.zmtp import (
    Cancel,
    EnvelopeDecoder,
    Event,
    FrameDecoder,
    Message,
    Multipart,
    Ping,
    Ready,
    Refused,
    Subscribe,
    reply_head,
)
from quackmq.protocols.zmq.codec.zmtp import ready as our_ready
from tests.kit import effort
from tests.protocols.codecs import zmtp_frames
from tests.protocols.codecs.zmtp_frames import MORE, command, frame, greeting, ready

LARGE = b"x" * 3_000
#: Machines can be busy.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PUBLISHED = (
    greeting()
    + ready(b"PUB")
    + zmtp_frames.message(b"ducks", b"quack")
    + zmtp_frames.message(b"ducks", b"")
    + zmtp_frames.message(b"alone")
    + command(b"PING", b"\0\x0aabc")
    + zmtp_frames.message(b"geese", LARGE)
    + zmtp_frames.message(b"ducks", b"one", b"too many")
    + zmtp_frames.message(b"n" * (limits.TOPIC_NAME_CHARS + 1), b"body")
    + frame(b"ducks", MORE, long=True)
    + frame(b"the end", long=True)
)
SUBSCRIBED = (
    greeting(minor=0)
    + ready(b"SUB")
    + frame(b"\x01ducks")
    + frame(b"\x01")
    + frame(b"\x00ducks")
    + command(b"SUBSCRIBE", b"geese")
    + command(b"CANCEL", b"geese")
    + command(b"NEWER", b"whatever")
    + frame(b"the program's own talk")
    + frame(b"")
    + zmtp_frames.message(b"\x01several", b"frames")
    + frame(b"\x01" + b"p" * (zmq_limits.PROXY_PREFIX_BYTES + 1))
    + command(b"PING", b"\0\0")
    + frame(b"\x01swans")
)


def events_of(decoder: FrameDecoder, *pieces: bytes) -> list[Event]:
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


def test_a_publishers_messages_are_their_frames() -> None:
    *events, several, long_topic, last = events_of(PublisherDecoder(), PUBLISHED)
    assert events == [
        Ready("PUB"),
        Multipart((b"ducks", b"quack")),
        Multipart((b"ducks", b"")),
        Multipart((b"alone",)),
        Ping(1_000, b"abc"),
        Multipart((b"geese", LARGE)),
    ]
    assert isinstance(several, Refused) and isinstance(several.error, ProtocolError)
    assert isinstance(long_topic, Refused) and isinstance(long_topic.error, IllegalTopicName)
    assert last == Multipart((b"ducks", b"the end"))


def test_a_subscribers_wishes_are_read_in_either_version_and_its_talk_is_not() -> None:
    decoder = SubscriberDecoder()
    assert events_of(decoder, SUBSCRIBED) == [
        Ready("SUB"),
        Subscribe(b"ducks"),
        Subscribe(b""),
        Cancel(b"ducks"),
        Subscribe(b"geese"),
        Cancel(b"geese"),
        Ping(0, b""),
        Subscribe(b"swans"),
    ]
    assert decoder.minor == 0
    assert not decoder.has_partial_message


@pytest.mark.parametrize(
    ("make", "stream"), [(PublisherDecoder, PUBLISHED), (SubscriberDecoder, SUBSCRIBED)]
)
def test_bytes_that_come_one_by_one_mean_the_same(
    make: Callable[[], FrameDecoder], stream: bytes
) -> None:
    whole = events_of(make(), stream)
    pieces = [stream[index : index + 1] for index in range(len(stream))]
    assert [*map(plain, events_of(make(), *pieces))] == [*map(plain, whole)]


@pytest.mark.parametrize(
    ("make", "stream"), [(PublisherDecoder, PUBLISHED), (SubscriberDecoder, SUBSCRIBED)]
)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=20))
@settings(CALM, max_examples=effort.of(50))
def test_bytes_however_they_are_cut_mean_the_same(
    make: Callable[[], FrameDecoder], stream: bytes, cuts: list[int]
) -> None:
    places = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [stream[begin:end] for begin, end in zip(places, places[1:], strict=False)]
    assert [*map(plain, events_of(make(), *pieces))] == [*map(plain, events_of(make(), stream))]


@pytest.mark.parametrize(
    ("make", "kind"), [(PublisherDecoder, b"XPUB"), (SubscriberDecoder, b"XSUB")]
)
@given(data=st.binary(max_size=300))
@settings(CALM, max_examples=effort.of(200))
def test_any_bytes_give_events_or_a_protocol_error(
    make: Callable[[], FrameDecoder], kind: bytes, data: bytes
) -> None:
    decoder = make()
    try:
        events_of(decoder, greeting() + ready(kind) + data)
    except ProtocolError:
        return
    assert decoder.received_bytes <= len(data)


@CALM
@given(frames=st.lists(st.binary(max_size=600), min_size=1, max_size=2))
def test_what_is_sent_is_what_a_publisher_would_send(frames: list[bytes]) -> None:
    assert encode_message(*frames) == zmtp_frames.message(*frames)


def test_a_subscription_is_said_in_the_peers_version() -> None:
    assert encode_subscription(b"ducks", 0) == frame(b"\x01ducks")
    assert encode_subscription(b"ducks", 1) == command(b"SUBSCRIBE", b"ducks")


def test_a_message_that_is_too_large_is_read_past_and_costs_nothing() -> None:
    decoder = PublisherDecoder()
    events_of(decoder, greeting() + ready(b"PUB"))
    head = frame(b"ducks", MORE) + b"\x02" + (zmq_limits.PROXY_MESSAGE_BYTES).to_bytes(8, "big")
    assert events_of(decoder, head) == []
    assert (decoder.announced_bytes, decoder.received_bytes) == (0, 0)
    left = zmq_limits.PROXY_MESSAGE_BYTES
    while left:
        piece = b"x" * min(left, limits.MIB)
        left -= len(piece)
        events = events_of(decoder, piece)
        assert decoder.received_bytes == 0
    assert isinstance(events[0], Refused) and isinstance(events[0].error, RecordTooLarge)
    (event,) = events_of(decoder, zmtp_frames.message(b"ducks", b"quack"))
    assert event == Multipart((b"ducks", b"quack"))


def test_a_large_message_says_how_large_it_will_be() -> None:
    decoder = PublisherDecoder()
    whole = zmtp_frames.message(b"ducks", LARGE)
    events_of(decoder, greeting() + ready(b"PUB"), whole[:1_000])
    assert decoder.announced_bytes == len(b"ducks") + len(LARGE)
    assert 0 < decoder.received_bytes < decoder.announced_bytes
    assert decoder.has_partial_message


@pytest.mark.parametrize("kind", [b"SUB", b"REQ", b"PULL", b""])
def test_other_sockets_are_no_publishers(kind: bytes) -> None:
    with pytest.raises(ProtocolError, match="PUB and XPUB are served"):
        events_of(PublisherDecoder(), greeting() + ready(kind))


def test_a_subscription_of_ours_that_is_too_long_for_a_command_is_refused() -> None:
    start = greeting() + ready(b"SUB")
    with pytest.raises(ProtocolError, match="the limit is 1024"):
        events_of(
            SubscriberDecoder(),
            start + command(b"SUBSCRIBE", b"p" * (zmq_limits.PROXY_PREFIX_BYTES + 1)),
        )


def test_a_req_socket_of_ours_takes_the_answers_of_a_rep() -> None:
    decoder = EnvelopeDecoder(("REP", "ROUTER"))
    stream = greeting() + ready(b"REP") + zmtp_frames.request(b"an answer")
    assert events_of(decoder, stream) == [Ready("REP"), Message((), b"an answer")]
    assert reply_head((), 5) + b"hello" == zmtp_frames.request(b"hello")
    assert our_ready("REQ") == ready(b"REQ", Identity=b"")
    assert our_ready("XSUB") == ready(b"XSUB")
