"""The language of the ZeroMQ listener: requests and answers, as text and as values."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq import errors, limits
from quackmq.errors import (
    IllegalTopicName,
    InvalidRequest,
    ProtocolError,
    QuackError,
    UnknownTopic,
)
from quackmq.protocols.zmq.codec.queue_language import (
    Get,
    LastSequence,
    Put,
    ReceivedMessage,
    Request,
    Subscribe,
    Unsubscribe,
    encode_done_reply,
    encode_get_reply,
    encode_last_reply,
    encode_request,
    encode_subscribe_reply,
    parse_request,
    read_reply,
)
from quackmq.protocols.zmq.codec.words import encode_error
from tests.kit.tables import each

#: Requests of the document (R1) and ours, in both forms.
REQUESTS = [
    (b"PUT donald ducks quack", Put("donald", "ducks", b"quack")),
    (b"PUT donald ducks a  b\nc ", Put("donald", "ducks", b"a  b\nc ")),
    (b"PUT donald ducks ", Put("donald", "ducks", b"")),
    ("PUT donald ducks grün".encode(), Put("donald", "ducks", "grün".encode())),
    ("PUT dönald ducks x".encode(), Put("dönald", "ducks", b"x")),
    (b"GET donald ducks -1", Get("donald", "ducks", None)),
    (b"GET donald ducks an-id_", Get("donald", "ducks", "an-id_")),
    (b"SUB donald ducks", Subscribe("donald", "ducks")),
    (b"UNSUB donald ducks", Unsubscribe("donald", "ducks")),
    (b"PUTN donald ducks 7 quack quack", Put("donald", "ducks", b"quack quack", 7)),
    (b"PUTN donald ducks 0 ", Put("donald", "ducks", b"", 0)),
    (b"LAST donald ducks", LastSequence("donald", "ducks")),
]

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
topics = st.text("abcXYZ019._-", min_size=1, max_size=20)
contents = st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(Put, names, topics, contents, st.none() | st.integers(0, 2**63 - 2)),
    st.builds(Get, names, topics, st.none() | st.text("abcXYZ019_", min_size=1, max_size=39)),
    st.builds(Subscribe, names, topics),
    st.builds(Unsubscribe, names, topics),
    st.builds(LastSequence, names, topics),
)


@each(("frame", "request_"), REQUESTS)
def test_r1_requests_are_words_parted_by_one_space(frame: bytes, request_: Request) -> None:
    assert parse_request(frame) == request_
    assert encode_request(request_) == frame


@pytest.mark.parametrize("frame", [b"PUT donald ducks", b"PUTN donald ducks 7"])
def test_without_a_content_the_space_before_it_may_be_left_out(frame: bytes) -> None:
    assert parse_request(frame) == parse_request(frame + b" ")


@settings(deadline=None)
@given(requests)
def test_what_is_encoded_is_parsed_as_it_was(request_: Request) -> None:
    assert parse_request(encode_request(request_)) == request_


@each(
    ("frame", "text"),
    [
        (b"", "this one is empty"),
        (b" ", "this one is empty"),
        (b"put donald ducks x", "unknown request 'put'"),
        (b"x" * 10_000, "unknown request 'xxx"),
        (b"PUT", "there is no client: write PUT client topic content"),
        (b"PUT donald", "there is no topic: write PUT client topic content"),
        (b"GET donald ducks", "there is no last-id: write GET client topic last-id"),
        (b"SUB donald", "there is no topic"),
        (b"SUB donald ducks more", "something after the topic"),
        (b"GET donald ducks -1 more", "something after the last-id"),
        (b"SUB  donald ducks", "with one space between words"),
        (b"PUTN donald ducks  1 quack", "not 0; words are separated by one space"),
        (b"GET donald ducks ", "a last-id takes 1 to 100 bytes, not 0"),
        (b"GET donald ducks " + b"x" * 101, "a last-id takes 1 to 100 bytes, not 101"),
        (b"PUTN donald ducks", "there is no sequence"),
        (b"PUTN donald ducks -1 x", "invalid sequence '-1'"),
        (b"PUTN donald ducks seven x", "invalid sequence 'seven'"),
        ("PUTN donald ducks ７ x".encode(), "invalid sequence"),
        (b"PUT donald ducks \xff", "the request is not valid UTF-8 at byte 17"),
        (b"PUT \xc3 ducks x", "the request is not valid UTF-8"),
    ],
)
def test_what_is_no_request_is_said_in_words(frame: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        parse_request(frame)


@pytest.mark.parametrize(
    "frame",
    [b"SUB  ducks", b"SUB %b ducks" % (b"x" * (limits.NAME_BYTES + 1)), b"PUT a\tb ducks x"],
)
def test_a_name_that_is_none_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidRequest, match="client's name"):
        parse_request(frame)


@pytest.mark.parametrize("topic", [b"", b"x" * (limits.TOPIC_NAME_CHARS + 1)])
def test_a_topic_that_is_none_or_enormous_is_refused(topic: bytes) -> None:
    with pytest.raises(IllegalTopicName):
        parse_request(b"SUB donald " + topic)


@settings(deadline=None)
@given(st.binary() | requests.map(encode_request).flatmap(lambda frame: mutations(frame)))
def test_any_bytes_are_a_request_or_an_invalid_one_and_nothing_else(frame: bytes) -> None:
    try:
        parsed = parse_request(frame)
    except InvalidRequest as error:
        assert len(str(error)) < 1_000
        return
    assert parse_request(encode_request(parsed)) == parsed


def mutations(frame: bytes) -> st.SearchStrategy[bytes]:
    place = st.integers(0, len(frame))
    return st.builds(
        lambda at, put, cut: frame[:at] + put + frame[at + cut :],
        place,
        st.binary(max_size=3),
        st.integers(0, 5),
    )


# --- answers ---------------------------------------------------------------------------------


def test_r1_answers_are_those_of_the_document() -> None:
    get = Get("donald", "ducks", None)
    assert (
        b"".join(encode_get_reply(get, "the-id", b"quack quack"))
        == b"GET donald ducks the-id quack quack"
    )
    assert encode_subscribe_reply(Subscribe("donald", "ducks"), True) == b"SUB donald ducks"
    assert encode_subscribe_reply(Subscribe("donald", "ducks"), False) == b"RESUB donald ducks"
    assert encode_done_reply(Unsubscribe("donald", "ducks")) == b"UNSUB donald ducks"
    assert encode_done_reply(Put("donald", "ducks", b"quack", 7)) == b"PUTN donald ducks 7"
    assert encode_last_reply(LastSequence("donald", "ducks"), 7) == b"LAST donald ducks 7"
    assert encode_last_reply(LastSequence("donald", "ducks"), None) == b"LAST donald ducks -1"
    assert encode_error("unknown_topic", "there is no x") == b"ERR unknown_topic there is no x"


@settings(deadline=None)
@given(requests, st.binary(), st.booleans(), st.none() | st.integers(0, 2**63))
def test_an_answer_is_read_as_it_was_meant(
    request_: Request, content: bytes, is_new: bool, number: int | None
) -> None:
    match request_:
        case Get():
            assert read_reply(
                request_, b"".join(encode_get_reply(request_, "id", content))
            ) == ReceivedMessage("id", content)
            assert read_reply(request_, encode_error("empty", "no message")) is None
        case Subscribe():
            assert read_reply(request_, encode_subscribe_reply(request_, is_new)) is is_new
        case LastSequence():
            assert read_reply(request_, encode_last_reply(request_, number)) == number
        case Put(sequence=None):
            assert read_reply(request_, encode_request(request_)) is None
        case _:
            assert read_reply(request_, encode_done_reply(request_)) is None


def test_an_error_comes_back_as_what_it_was() -> None:
    put = Put("donald", "ducks", b"quack")
    kinds: dict[str, type[QuackError]] = dict(inspect.getmembers(errors, inspect.isclass))
    assert UnknownTopic in kinds.values()
    for kind in kinds.values():
        with pytest.raises(QuackError, match="^why it was$") as raised:
            read_reply(put, encode_error(kind.code, "why it was"))
        has_more_to_say = "__init__" in kind.__dict__
        assert type(raised.value) is (QuackError if has_more_to_say else kind)


def test_an_error_that_is_not_known_is_one_of_ours_all_the_same() -> None:
    with pytest.raises(QuackError, match="newfangled: why it was"):
        read_reply(Subscribe("a", "b"), b"ERR newfangled why it was")
    with pytest.raises(QuackError):
        read_reply(Subscribe("a", "b"), b"ERR")
    with pytest.raises(QuackError, match="why it was"):
        read_reply(Subscribe("a", "b"), b"ERR member_id_required why it was")


@settings(deadline=None)
@given(requests, st.binary())
def test_any_answer_is_read_or_an_error_of_ours(request_: Request, frame: bytes) -> None:
    try:
        read_reply(request_, frame)
    except QuackError:
        return


@each(
    ("request_", "frame"),
    [
        (Put("a", "b", b"c"), b"PUT a b d"),
        (Put("a", "b", b"c", 7), b"PUTN a b 8"),
        (Get("a", "b", None), b"GET a c id content"),
        (Get("a", "b", None), b"GET a b"),
        (Subscribe("a", "b"), b"UNSUB a b"),
        (LastSequence("a", "b"), b"LAST a b x"),
    ],
)
def test_an_answer_to_another_request_is_not_taken(request_: Request, frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_reply(request_, frame)
