"""The language of the queue's REP socket: encode and parse requests and replies. No sockets here.

Each request and each reply is one frame. Its words are separated by one space. The content is the
rest of the frame, with its spaces and newlines.

    request                               reply
    PUT client topic content              PUT client topic content
    GET client topic last-id              GET client topic id content
    SUB client topic                      SUB client topic | RESUB client topic
    UNSUB client topic                    UNSUB client topic
    PUTN client topic sequence content    PUTN client topic sequence
    LAST client topic                     LAST client topic sequence
                                          ERR code text

The last id -1 means that the client has no message yet; the sequence -1 means that the publisher
has no sequence yet. An empty content and the space before it may be left out. A whole request is
UTF-8. In the reply to GET the content may be any bytes, because another protocol may have published
them. The code in ERR is that of the error (`quackmq.errors`), or `empty` if no message came while
a GET waited.

Promises: for any bytes, `parse_request` returns a request or raises InvalidRequest, and
`read_reply` returns the result or raises a QuackError. The length of names is checked here; all
other rules for names are the broker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from quackmq.errors import ProtocolError
from quackmq.fast_tuples import new_tuple
from quackmq.protocols.zmq.codec.words import (
    abbreviate,
    check_word,
    error_for_code,
    parse_client_name,
    parse_topic_name,
    parse_whole_number,
    split_words,
)

NONE_YET: Final = "-1"
#: The error code of a GET for which no message came.
EMPTY: Final = "empty"
#: Requests of the proxy's REP socket, which listens on another port.
_PROXY_VERBS: Final = (b"hello", b"goodbye", b"ack_received", b"publish", b"last_published")


class Put(NamedTuple):
    """Publish a message. `sequence` is the number that the publisher `client` gave it, if any; the
    broker recognizes a repeated put by it.
    """

    client: str
    topic: str
    content: bytes
    sequence: int | None = None


class Get(NamedTuple):
    """Acknowledge `last_id`, which is None before the first message; get the next message."""

    client: str
    topic: str
    last_id: str | None


class Subscribe(NamedTuple):
    """Subscribe a client to a topic."""

    client: str
    topic: str


class Unsubscribe(NamedTuple):
    """End a client's subscription to a topic."""

    client: str
    topic: str


class LastSequence(NamedTuple):
    """Ask for the last sequence of the publisher `client`."""

    client: str
    topic: str


Request = Put | Get | Subscribe | Unsubscribe | LastSequence


# --- requests -------------------------------------------------------------------------------


def parse_request(frame: bytes) -> Request:
    """Parse a request. Raise InvalidRequest, usually ProtocolError, if it is invalid."""
    if not frame.isascii():
        _check_utf8(frame)
    verb, *words = frame.split(b" ", _PUT_SPACES)
    if verb == b"PUT":
        if len(words) < _PUT_SPACES:
            words = split_words(frame, _PUT_WORDS, has_content=True)[1:]
        client, topic, content = words
        return new_tuple(Put, (parse_client_name(client), parse_topic_name(topic), content, None))
    if verb == b"GET":
        _, client, topic, last_id = split_words(frame, _GET_WORDS)
        last = check_word("last-id", last_id)
        return Get(
            parse_client_name(client), parse_topic_name(topic), None if last == NONE_YET else last
        )
    if verb == b"PUTN":
        _, client, topic, number, content = split_words(frame, _PUTN_WORDS, has_content=True)
        return Put(
            parse_client_name(client),
            parse_topic_name(topic),
            content,
            parse_whole_number("sequence", number),
        )
    request_class = _CLASS_BY_VERB.get(verb)
    if request_class is None:
        raise ProtocolError(_unknown_verb_text(verb))
    _, client, topic = split_words(frame, _PLAIN_WORDS)
    return request_class(parse_client_name(client), parse_topic_name(topic))


def encode_request(request: Request) -> bytes:
    """Encode a request as a frame. Clients and `read_reply` use it."""
    head = f"{_verb_for(request)} {request.client} {request.topic}"
    if isinstance(request, Get):
        return f"{head} {NONE_YET if request.last_id is None else request.last_id}".encode()
    if not isinstance(request, Put):
        return head.encode()
    if request.sequence is not None:
        head += f" {request.sequence}"
    return b"%b %b" % (head.encode(), request.content)


# --- replies --------------------------------------------------------------------------------


def encode_get_reply(request: Get, message_id: str, content: bytes | None) -> tuple[bytes, bytes]:
    """Return the words before the content, and the content."""
    head = f"GET {request.client} {request.topic} {message_id} "
    return head.encode(), content or b""


def encode_subscribe_reply(request: Subscribe, is_new: bool) -> bytes:
    return f"{'SUB' if is_new else 'RESUB'} {request.client} {request.topic}".encode()


def encode_done_reply(request: Unsubscribe | Put) -> bytes:
    """Encode the reply to UNSUB or PUTN. (The reply to PUT is the request itself.)"""
    number = f" {request.sequence}" if isinstance(request, Put) else ""
    return f"{_verb_for(request)} {request.client} {request.topic}{number}".encode()


def encode_last_reply(request: LastSequence, sequence: int | None) -> bytes:
    number = NONE_YET if sequence is None else sequence
    return f"LAST {request.client} {request.topic} {number}".encode()


class ReceivedMessage(NamedTuple):
    """The message in a reply to GET."""

    id: str
    content: bytes


def read_reply(request: Request, frame: bytes) -> ReceivedMessage | bool | int | None:
    """Parse the reply to a request. Return

    - for Get: the message, or None if there is none;
    - for Subscribe: whether the subscription is new;
    - for LastSequence: the sequence, or None if there is none;
    - for Put and Unsubscribe: None.

    Raise the error that the reply reports, or ProtocolError if the reply does not fit the request.
    """
    verb, _, rest = frame.partition(b" ")
    if verb == b"ERR":
        code, _, text = rest.decode(errors="replace").partition(" ")
        if code == EMPTY and isinstance(request, Get):
            return None
        raise error_for_code(code, text)
    head = f" {request.client} {request.topic}".encode()
    if isinstance(request, Subscribe) and frame in (b"SUB" + head, b"RESUB" + head):
        return verb == b"SUB"
    expected = _verb_for(request).encode() + head
    if isinstance(request, Put):
        expected = (
            encode_request(request) if request.sequence is None else encode_done_reply(request)
        )
    if frame == expected and isinstance(request, Put | Unsubscribe):
        return None
    if frame.startswith(expected + b" "):
        word, _, content = frame[len(expected) + 1 :].partition(b" ")
        if isinstance(request, Get):
            return ReceivedMessage(check_word("id", word), content)
        if isinstance(request, LastSequence):
            return None if word == NONE_YET.encode() else parse_whole_number("sequence", word)
    raise ProtocolError(
        f"the reply {abbreviate(frame)} does not fit {abbreviate(encode_request(request))}"
    )


# --- helpers --------------------------------------------------------------------------------

_CLASS_BY_VERB: Final[Mapping[bytes, type[Subscribe] | type[Unsubscribe] | type[LastSequence]]] = {
    b"SUB": Subscribe,
    b"UNSUB": Unsubscribe,
    b"LAST": LastSequence,
}
_PUT_WORDS: Final = ("PUT", "client", "topic", "content")
_PUT_SPACES: Final = len(_PUT_WORDS) - 1
_PUTN_WORDS: Final = ("PUTN", "client", "topic", "sequence", "content")
_GET_WORDS: Final = ("GET", "client", "topic", "last-id")
_PLAIN_WORDS: Final = ("SUB, UNSUB or LAST", "client", "topic")


def _verb_for(request: Request) -> str:
    """Return the first word of a request."""
    if isinstance(request, Put):
        return "PUT" if request.sequence is None else "PUTN"
    if isinstance(request, Get):
        return "GET"
    return next(
        verb.decode()
        for verb, request_class in _CLASS_BY_VERB.items()
        if isinstance(request, request_class)
    )


def _check_utf8(frame: bytes) -> None:
    try:
        frame.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the request is not valid UTF-8 at byte {error.start}") from None


def _unknown_verb_text(verb: bytes) -> str:
    """Return the error message for a first word that this port does not accept."""
    if not verb:
        return "a request begins with PUT, GET, SUB, UNSUB, PUTN or LAST; this one is empty"
    if verb in _PROXY_VERBS:
        return (
            f"send {verb.decode()} to the proxy port; this port takes PUT, GET, SUB, UNSUB, PUTN "
            "and LAST"
        )
    return f"unknown request {abbreviate(verb)}: use PUT, GET, SUB, UNSUB, PUTN or LAST"
