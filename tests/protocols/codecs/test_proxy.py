"""The language of the reliable proxy: what is written is read again, anything else is an error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import (
    IllegalTopicName,
    InvalidRequest,
    ProtocolError,
    QuackError,
    Unreachable,
)
from quackmq.protocols.zmq.codec import proxy_language as proxy
from quackmq.protocols.zmq.codec.proxy_language import (
    Data,
    Goodbye,
    Hello,
    LastPublished,
    Publish,
    Received,
    Request,
    Welcome,
)
from quackmq.protocols.zmq.codec.words import encode_error
from tests.kit.tables import each

NAMES = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x17F, exclude_categories=("C", "Z")),
    min_size=1,
    max_size=40,
)
TOPICS = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)
IDS = st.from_regex(r"[A-Za-z0-9_-]{1,60}", fullmatch=True)
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.builds(
        Hello, NAMES, TOPICS, st.from_regex(r"tcp://[a-z.]{1,30}:[0-9]{1,5}", fullmatch=True)
    ),
    st.builds(Goodbye, NAMES, TOPICS),
    st.builds(Received, NAMES, TOPICS, st.lists(IDS, min_size=1, max_size=5).map(tuple)),
    st.builds(Publish, NAMES, TOPICS, st.integers(0, 2**63), st.binary(max_size=100)),
    st.builds(LastPublished, NAMES, TOPICS),
)

#: Machines can be busy.
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

HELLO = Hello("donald", "ducks", "tcp://127.0.0.1:5561")


@CALM
@given(REQUESTS)
def test_a_request_is_read_as_it_was_written(request: Request) -> None:
    assert proxy.parse_request(proxy.encode_request(request)) == request


@CALM
@given(NAMES, TOPICS, IDS, st.binary(max_size=100))
def test_data_is_read_as_it_was_written(
    client: str, topic: str, token: str, content: bytes
) -> None:
    data = Data(client, topic, token, content)
    assert proxy.parse_data(proxy.encode_data(data)) == data
    assert proxy.read_data_reply(data, proxy.encode_data_received(data)) is True
    assert proxy.read_data_reply(data, proxy.encode_not_yet(data)) is False


@CALM
@given(
    st.binary(max_size=100), st.sampled_from([b"", b"hello ", b"publish a b ", b"ack_received "])
)
def test_any_bytes_are_a_request_or_an_error_of_ours(data: bytes, begin: bytes) -> None:
    for parse in (proxy.parse_request, proxy.parse_data):
        try:
            parse(begin + data)
        except InvalidRequest:
            continue


@CALM
@given(REQUESTS, st.binary(max_size=100))
def test_any_answer_is_one_or_an_error_of_ours(request: Request, frame: bytes) -> None:
    try:
        proxy.read_reply(request, frame)
    except QuackError:
        return


def test_the_frames_are_those_of_the_table() -> None:
    received = Received("donald", "ducks", ("a", "b"))
    publish = Publish("daisy", "ducks", 7, b"quack quack")
    last = LastPublished("daisy", "ducks")
    data = Data("donald", "ducks", "a", b"quack\0quack")
    assert proxy.encode_request(HELLO) == b"hello donald ducks tcp://127.0.0.1:5561"
    assert proxy.encode_welcome(HELLO, Welcome(True, 5557)) == b"ack_welcome donald ducks new 5557"
    assert proxy.encode_request(Goodbye("donald", "ducks")) == b"goodbye donald ducks"
    assert proxy.encode_goodbye_reply(Goodbye("donald", "ducks")) == b"ack_goodbye donald ducks"
    assert proxy.encode_request(received) == b"ack_received donald ducks a b"
    assert proxy.encode_received_reply(received, ("m",)) == b"ack_noted donald ducks m"
    assert proxy.encode_request(publish) == b"publish daisy ducks 7 quack quack"
    assert proxy.encode_publish_reply(publish) == b"ack_published daisy ducks 7"
    assert proxy.encode_request(last) == b"last_published daisy ducks"
    assert proxy.encode_last_reply(last, None) == b"ack_last daisy ducks -1"
    assert proxy.encode_data(data) == b"data donald ducks a quack\0quack"
    assert proxy.encode_data_received(data) == b"ack_received donald ducks a"
    assert proxy.encode_not_yet(data) == b"not_yet donald ducks a"


def test_answers_say_what_came_of_a_request() -> None:
    received = Received("donald", "ducks", ("a",))
    last = LastPublished("daisy", "ducks")
    publish = Publish("daisy", "ducks", 7, b"quack")
    assert proxy.read_reply(HELLO, b"ack_welcome donald ducks known 5557") == Welcome(False, 5557)
    assert proxy.read_reply(received, b"ack_noted donald ducks m n") == ("m", "n")
    assert proxy.read_reply(received, b"ack_noted donald ducks") == ()
    assert proxy.read_reply(last, b"ack_last daisy ducks -1") is None
    assert proxy.read_reply(last, b"ack_last daisy ducks 12") == 12
    assert proxy.read_reply(publish, b"ack_published daisy ducks 7") is None
    assert proxy.read_reply(Goodbye("donald", "ducks"), b"ack_goodbye donald ducks") is None
    with pytest.raises(Unreachable, match="nobody there"):
        proxy.read_reply(HELLO, encode_error("unreachable", "nobody there"))


@each(
    "frame",
    [
        b"ack_welcome daisy ducks new 1",
        b"ack_welcome donald ducks old 1",
        b"ack_welcome donald ducks new",
        b"ack_welcome donald duckshoot new 1",
        b"ack_goodbye donald ducks",
        b"",
    ],
)
def test_an_answer_to_something_else_is_none(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        proxy.read_reply(HELLO, frame)


def test_a_clients_own_error_is_raised() -> None:
    data = Data("donald", "ducks", "a", b"")
    with pytest.raises(InvalidRequest, match="who is donald"):
        proxy.read_data_reply(data, encode_error("invalid_request", "who is donald"))
    with pytest.raises(ProtocolError):
        proxy.read_data_reply(data, b"ack_received donald ducks b")


@each(
    ("frame", "error", "text"),
    [
        (b"", ProtocolError, "unknown request ''"),
        (b"HELLO donald ducks x", ProtocolError, "hello, goodbye, ack_received, publish"),
        (b"hello donald ducks", ProtocolError, "there is no address: write hello client"),
        (b"hello donald ducks a b", ProtocolError, "something after the address"),
        (b"hello  ducks a", InvalidRequest, "client's name takes 1 to 255 bytes, not 0"),
        (b"hello donald " + b"d" * 250 + b" a", IllegalTopicName, "1 to 249"),
        (b"hello donald ducks " + b"a" * 301, ProtocolError, "1 to 300 bytes, not 301"),
        (b"hello don\xff ducks a", ProtocolError, "client's name is not valid UTF-8"),
        (b"hello donald ducks a\xff", ProtocolError, "address is not valid UTF-8"),
        (b"goodbye donald", ProtocolError, "there is no topic"),
        (b"goodbye donald ducks now", ProtocolError, "something after the topic"),
        (b"publish daisy ducks", ProtocolError, "there is no number"),
        (b"publish daisy ducks -1 x", ProtocolError, "invalid number '-1'"),
        (b"publish daisy ducks one x", ProtocolError, "invalid number 'one'"),
        (b"ack_received donald ducks", ProtocolError, "a message id takes 1 to 100 bytes, not 0"),
        (
            b"ack_received donald ducks a  b",
            ProtocolError,
            "a message id takes 1 to 100 bytes, not 0",
        ),
        (
            b"ack_received donald ducks" + b" a" * (limits.PROXY_IDS + 1),
            ProtocolError,
            f"more than {limits.PROXY_IDS} ids are acknowledged at once",
        ),
    ],
)
def test_what_is_no_request_is_said_in_words(
    frame: bytes, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        proxy.parse_request(frame)


def test_subscriptions_of_clients_are_no_topics_prefixes() -> None:
    assert proxy.ids_subscription("ducks") == b"ids ducks"
    assert proxy.parse_ids_subscription(b"ids ducks") == "ducks"
    assert proxy.parse_ids_subscription(b"idsducks") is None
    assert proxy.client_subscription("donald") == b"client donald"
    assert proxy.parse_client_subscription(b"client donald") == "donald"
    assert proxy.parse_client_subscription(b"client") is None
    with pytest.raises(IllegalTopicName):
        proxy.parse_ids_subscription(b"ids ")
