"""The ZeroMQ door's language: one text frame a request, one an answer. No sockets here.

Words are parted by one space; the content is the rest of the frame, spaces and newlines included.

    request                               answer
    PUT client topic content              PUT client topic content
    GET client topic last-id              GET client topic id content
    SUB client topic                      SUB client topic | RESUB client topic
    UNSUB client topic                    UNSUB client topic
    PUTN client topic sequence content    PUTN client topic sequence
    LAST client topic                     LAST client topic sequence
                                          ERR code text

A last id of -1 says that there is none yet, and so does a sequence of -1. Without a content, the
space before it may be left out: the content is empty. A request is UTF-8 from end to end; in the
answer to GET the content is whatever bytes somebody put, by this door or another. The code in ERR
is that of the error (`quackmq.errors`), or `empty` where a GET has waited for nothing.

Promised: `parse_request` of any bytes gives a request or raises an InvalidRequest, and
`read_answer` what was asked for, or an error of ours. Whether names make sense is the broker's to
say, but no word is longer than they may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from quackmq.errors import ProtocolError
from quackmq.protocols.zmq.codec.words import (
    client_name,
    error_of,
    short_word,
    shown,
    split_words,
    topic_name,
    whole_number,
)

NONE_YET: Final = "-1"
#: The code of a GET that has waited for nothing.
EMPTY: Final = "empty"
#: Requests of the reliable proxy, which has a port of its own.
_PROXY_VERBS: Final = (b"hello", b"goodbye", b"ack_received", b"publish", b"last_published")


class Put(NamedTuple):
    """With a sequence, a repeat is known as one: `client` is a publisher that numbers its puts."""

    client: str
    topic: str
    content: bytes
    sequence: int | None = None


class Get(NamedTuple):
    client: str
    topic: str
    last_id: str | None


class Subscribe(NamedTuple):
    client: str
    topic: str


class Unsubscribe(NamedTuple):
    client: str
    topic: str


class LastSequence(NamedTuple):
    client: str
    topic: str


Request = Put | Get | Subscribe | Unsubscribe | LastSequence


# --- requests -------------------------------------------------------------------------------


def parse_request(frame: bytes) -> Request:
    """InvalidRequest, mostly as ProtocolError, for what is no request."""
    if not frame.isascii():
        _check_utf8(frame)
    verb, *words = frame.split(b" ", _PUT_SPACES)
    if verb == b"PUT":
        if len(words) < _PUT_SPACES:
            words = split_words(frame, _PUT_WORDS, has_content=True)[1:]
        client, topic, content = words
        # The class's own constructor takes three times as long.
        return _new_tuple(Put, (client_name(client), topic_name(topic), content, None))
    if verb == b"GET":
        _, client, topic, last_id = split_words(frame, _GET_WORDS)
        last = short_word("last-id", last_id)
        return Get(client_name(client), topic_name(topic), None if last == NONE_YET else last)
    if verb == b"PUTN":
        _, client, topic, number, content = split_words(frame, _PUTN_WORDS, has_content=True)
        return Put(
            client_name(client), topic_name(topic), content, whole_number("sequence", number)
        )
    plain = _PLAIN.get(verb)
    if plain is None:
        raise ProtocolError(_no_verb(verb))
    _, client, topic = split_words(frame, _PLAIN_WORDS)
    return plain(client_name(client), topic_name(topic))


def encode_request(request: Request) -> bytes:
    head = f"{_verb(request)} {request.client} {request.topic}"
    if isinstance(request, Get):
        return f"{head} {NONE_YET if request.last_id is None else request.last_id}".encode()
    if not isinstance(request, Put):
        return head.encode()
    if request.sequence is not None:
        head += f" {request.sequence}"
    return b"%b %b" % (head.encode(), request.content)


# --- answers --------------------------------------------------------------------------------


def got(request: Get, message_id: str, content: bytes | None) -> tuple[bytes, bytes]:
    """The answer with a message, as what stands before the content, and the content."""
    head = f"GET {request.client} {request.topic} {message_id} "
    return head.encode(), content or b""


def subscribed(request: Subscribe, is_new: bool) -> bytes:
    return f"{'SUB' if is_new else 'RESUB'} {request.client} {request.topic}".encode()


def done(request: Unsubscribe | Put) -> bytes:
    """Of a put, the one with a sequence: without one, the answer is the request."""
    number = f" {request.sequence}" if isinstance(request, Put) else ""
    return f"{_verb(request)} {request.client} {request.topic}{number}".encode()


def last_sequence(request: LastSequence, sequence: int | None) -> bytes:
    number = NONE_YET if sequence is None else sequence
    return f"LAST {request.client} {request.topic} {number}".encode()


class Got(NamedTuple):
    """A message as its subscriber gets it."""

    id: str
    content: bytes


def read_answer(request: Request, frame: bytes) -> Got | bool | int | None:
    """What came of a request: the message for Get, None if there is none; whether it is new for
    Subscribe; the number or None for LastSequence; None for the others. The error that the answer
    tells of, or ProtocolError for one that does not fit the request."""
    verb, _, rest = frame.partition(b" ")
    if verb == b"ERR":
        code, _, text = rest.decode(errors="replace").partition(" ")
        if code == EMPTY and isinstance(request, Get):
            return None
        raise error_of(code, text)
    head = f" {request.client} {request.topic}".encode()
    if isinstance(request, Subscribe) and frame in (b"SUB" + head, b"RESUB" + head):
        return verb == b"SUB"
    expected = _verb(request).encode() + head
    if isinstance(request, Put):
        expected = encode_request(request) if request.sequence is None else done(request)
    if frame == expected and isinstance(request, Put | Unsubscribe):
        return None
    if frame.startswith(expected + b" "):
        word, _, content = frame[len(expected) + 1 :].partition(b" ")
        if isinstance(request, Get):
            return Got(short_word("id", word), content)
        if isinstance(request, LastSequence):
            return None if word == NONE_YET.encode() else whole_number("sequence", word)
    raise ProtocolError(f"{shown(frame)} is no answer to {shown(encode_request(request))}")


# --- helpers --------------------------------------------------------------------------------

_PLAIN: Final[Mapping[bytes, type[Subscribe] | type[Unsubscribe] | type[LastSequence]]] = {
    b"SUB": Subscribe,
    b"UNSUB": Unsubscribe,
    b"LAST": LastSequence,
}
_PUT_WORDS: Final = ("PUT", "client", "topic", "content")
_PUT_SPACES: Final = len(_PUT_WORDS) - 1
_new_tuple: Final = tuple.__new__
_PUTN_WORDS: Final = ("PUTN", "client", "topic", "sequence", "content")
_GET_WORDS: Final = ("GET", "client", "topic", "last-id")
_PLAIN_WORDS: Final = ("SUB, UNSUB or LAST", "client", "topic")


def _verb(request: Request) -> str:
    if isinstance(request, Put):
        return "PUT" if request.sequence is None else "PUTN"
    if isinstance(request, Get):
        return "GET"
    return next(verb.decode() for verb, kind in _PLAIN.items() if isinstance(request, kind))


def _check_utf8(frame: bytes) -> None:
    try:
        frame.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a request is UTF-8, which ends at byte {error.start}") from None


def _no_verb(verb: bytes) -> str:
    if not verb:
        return "a request begins with PUT, GET, SUB, UNSUB, PUTN or LAST; this one is empty"
    if verb in _PROXY_VERBS:
        return (
            f"{verb.decode()} is asked of the proxy port; here are PUT, GET, SUB, UNSUB, PUTN, LAST"
        )
    return f"there is no request {shown(verb)}, but PUT, GET, SUB, UNSUB, PUTN and LAST"
