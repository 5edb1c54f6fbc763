"""The language of the reliable XPUB/XSUB proxy: one frame a request, one an answer; no sockets.

Words are parted by one space, names as in the other languages of the ZeroMQ door; a content is the
rest of the frame, whatever bytes there are. What a client asks of the proxy's REP socket:

    request                                    answer
    hello client topic address                 ack_welcome client topic new|known xpub-port
    goodbye client topic                       ack_goodbye client topic
    ack_received client topic id …             ack_noted client topic id …
    publish publisher topic number content     ack_published publisher topic number
    last_published publisher topic             ack_last publisher topic number

and what the proxy asks of the client's, at the address that it has introduced:

    data client topic id content               ack_received client topic id
                                               not_yet client topic id

Either may answer `ERR code text`. An address is `tcp://HOST:PORT` or `HOST:PORT`; with `*` as the
host, that from which the client speaks. `not_yet` says that the message is known and not done: it
is sent again later, unless it is acknowledged before. The ids in `ack_noted` are marks: of their
partition everything before is done, and never comes again but as a repeat. A number of -1 says that
there is none yet.

What the XPUB socket sends depends on how somebody subscribes:

    subscription       first frame     further frames
    any prefix         topic           body               of every topic that begins so
    ids TOPIC          ids TOPIC       body, message id   of that topic alone
    client NAME        nothing         nothing            says who subscribes: see below

No topic's name has a space in it, so the last two are no topic's prefix. A client that has said
`hello` subscribes to both, over one connection: what is sent there after that is its first
delivery, and what it does not acknowledge in time is sent to its address.

Promised: parsing any bytes gives a value or raises an InvalidRequest, mostly as ProtocolError, and
`read_answer` what was asked for, or an error of ours.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quackmq import limits
from quackmq.errors import ProtocolError
from quackmq.protocols.zmq.codec.words import (
    client_name,
    error_of,
    short_word,
    shown,
    split_words,
    topic_name,
    utf8,
    whole_number,
)

_NONE_YET: Final = -1
#: Real ids are shorter. A host's name takes 253, and there is a port.
_ID_BYTES: Final = 100
_ADDRESS_BYTES: Final = 300
_NEW: Final = "new"
#: Requests of the ZeroMQ door's other REP socket, which has a port of its own.
_QUEUE_VERBS: Final = (b"PUT", b"GET", b"SUB", b"UNSUB", b"PUTN", b"LAST")
_KNOWN: Final = "known"


class Hello(NamedTuple):
    client: str
    topic: str
    address: str


class Goodbye(NamedTuple):
    client: str
    topic: str


class Received(NamedTuple):
    """Of a client to the proxy, for what came by XPUB; or its answer to `Data`."""

    client: str
    topic: str
    ids: tuple[str, ...]


class Publish(NamedTuple):
    """`client` is the publisher; a repeat is known by its number."""

    client: str
    topic: str
    number: int
    content: bytes


class LastPublished(NamedTuple):
    client: str
    topic: str


class Data(NamedTuple):
    client: str
    topic: str
    id: str
    content: bytes


class Welcome(NamedTuple):
    """The answer to `Hello`: whether the subscription is new, and where the XPUB socket listens; 0
    if nobody knows."""

    is_new: bool
    xpub_port: int


Request = Hello | Goodbye | Received | Publish | LastPublished


# --- what a client asks ---------------------------------------------------------------------


def parse_request(frame: bytes) -> Request:
    """InvalidRequest, mostly as ProtocolError, for what is no request."""
    verb, _, _ = frame.partition(b" ")
    if verb == b"publish":
        _, client, topic, number, content = split_words(frame, _PUBLISH, has_content=True)
        return Publish(
            client_name(client), topic_name(topic), whole_number("number", number), content
        )
    if verb == b"ack_received":
        return _received(frame)
    if verb == b"hello":
        _, client, topic, address = split_words(frame, _HELLO)
        return Hello(
            client_name(client), topic_name(topic), _checked("address", address, _ADDRESS_BYTES)
        )
    if verb in _QUEUE_VERBS:
        raise ProtocolError(
            f"{verb.decode()} is asked of the zmq port; here are hello, goodbye, ack_received, "
            "publish and last_published"
        )
    if verb not in (b"goodbye", b"last_published"):
        raise ProtocolError(
            f"there is no request {shown(verb)}, but hello, goodbye, ack_received, publish and "
            "last_published"
        )
    _, client, topic = split_words(frame, _PLAIN)
    kind = Goodbye if verb == b"goodbye" else LastPublished
    return kind(client_name(client), topic_name(topic))


def encode_request(request: Request) -> bytes:
    verb = _VERBS[type(request)]
    words = f"{verb} {request.client} {request.topic}"
    if isinstance(request, Publish):
        return b"%b %d %b" % (words.encode(), request.number, request.content)
    if isinstance(request, Received):
        return " ".join((words, *request.ids)).encode()
    if isinstance(request, Hello):
        words += f" {request.address}"
    return words.encode()


# --- what the proxy answers -----------------------------------------------------------------


def welcome(request: Hello, answer: Welcome) -> bytes:
    how = _NEW if answer.is_new else _KNOWN
    return f"ack_welcome {request.client} {request.topic} {how} {answer.xpub_port}".encode()


def farewell(request: Goodbye) -> bytes:
    return f"ack_goodbye {request.client} {request.topic}".encode()


def noted(request: Received, marks: tuple[str, ...]) -> bytes:
    return " ".join(("ack_noted", request.client, request.topic, *marks)).encode()


def published(request: Publish) -> bytes:
    return f"ack_published {request.client} {request.topic} {request.number}".encode()


def last_published(request: LastPublished, number: int | None) -> bytes:
    number = _NONE_YET if number is None else number
    return f"ack_last {request.client} {request.topic} {number}".encode()


def read_answer(request: Request, frame: bytes) -> Welcome | tuple[str, ...] | int | None:
    """What came of a request: `Welcome` for Hello, the marks for Received, the number or None for
    LastPublished, None for the others. The error that the answer tells of, or ProtocolError for one
    that does not fit the request."""
    verb, _, rest = frame.partition(b" ")
    if verb == b"ERR":
        code, _, text = rest.decode(errors="replace").partition(" ")
        raise error_of(code, text)
    expected = f"{_ANSWERS[type(request)]} {request.client} {request.topic}".encode()
    if isinstance(request, Publish):
        expected += b" %d" % request.number
    if frame != expected and not frame.startswith(expected + b" "):
        raise ProtocolError(f"{shown(frame)} is no answer to {shown(encode_request(request))}")
    words = frame[len(expected) + 1 :].split(b" ") if len(frame) > len(expected) else []
    if isinstance(request, Hello) and len(words) == 2 and words[0] in (b"new", b"known"):
        return Welcome(words[0] == b"new", whole_number("port", words[1]))
    if isinstance(request, Received):
        return tuple([_checked("message id", word) for word in words])
    if isinstance(request, LastPublished) and len(words) == 1:
        return None if words[0] == b"-1" else whole_number("number", words[0])
    if isinstance(request, Goodbye | Publish) and not words:
        return None
    raise ProtocolError(f"{shown(frame)} is no answer to {shown(encode_request(request))}")


# --- what the proxy asks, and a client answers ----------------------------------------------


def encode_data(data: Data) -> bytes:
    return data_words(data) + data.content


def data_words(data: Data) -> bytes:
    """What stands before the content, which is not copied just to stand behind it."""
    return f"data {data.client} {data.topic} {data.id} ".encode()


def parse_data(frame: bytes) -> Data:
    """InvalidRequest, mostly as ProtocolError, for what is none."""
    verb, client, topic, message_id, content = split_words(frame, _DATA, has_content=True)
    if verb != b"data":
        raise ProtocolError(f"there is no request {shown(verb)}, but data")
    return Data(client_name(client), topic_name(topic), _checked("message id", message_id), content)


def received(data: Data) -> bytes:
    return f"ack_received {data.client} {data.topic} {data.id}".encode()


def not_yet(data: Data) -> bytes:
    return f"not_yet {data.client} {data.topic} {data.id}".encode()


def read_received(data: Data, frame: bytes) -> bool:
    """Whether it is done. The error that the answer tells of, or ProtocolError."""
    if frame == received(data):
        return True
    if frame == not_yet(data):
        return False
    if frame.startswith(b"ERR "):
        code, _, text = frame[4:].decode(errors="replace").partition(" ")
        raise error_of(code, text)
    raise ProtocolError(f"{shown(frame)} is no answer to data {data.client} {data.topic} {data.id}")


# --- what is subscribed to at the XPUB socket -----------------------------------------------

_IDS: Final = b"ids "
_CLIENT: Final = b"client "


def with_ids(topic: str) -> bytes:
    """The subscription, and the first frame, of a topic's messages with their ids."""
    return _IDS + topic.encode()


def subscriber(client: str) -> bytes:
    """The subscription that says who subscribes."""
    return _CLIENT + client.encode()


def topic_with_ids(prefix: bytes) -> str | None:
    """The topic whose messages a subscription wants with their ids; None if it wants others.
    InvalidRequest."""
    return topic_name(prefix.removeprefix(_IDS)) if prefix.startswith(_IDS) else None


def subscribing_client(prefix: bytes) -> str | None:
    """Who subscribes, if it is that what a subscription says. InvalidRequest."""
    return client_name(prefix.removeprefix(_CLIENT)) if prefix.startswith(_CLIENT) else None


# --- helpers --------------------------------------------------------------------------------

_PUBLISH: Final = ("publish", "publisher", "topic", "number", "content")
_HELLO: Final = ("hello", "client", "topic", "address")
_RECEIVED: Final = ("ack_received", "client", "topic", "id")
_PLAIN: Final = ("goodbye or last_published", "client", "topic")
_DATA: Final = ("data", "client", "topic", "id", "content")
_VERBS: Final[dict[type[Request], str]] = {
    Hello: "hello",
    Goodbye: "goodbye",
    Received: "ack_received",
    Publish: "publish",
    LastPublished: "last_published",
}
_ANSWERS: Final[dict[type[Request], str]] = {
    Hello: "ack_welcome",
    Goodbye: "ack_goodbye",
    Received: "ack_noted",
    Publish: "ack_published",
    LastPublished: "ack_last",
}


def _received(frame: bytes) -> Received:
    _, client, topic, ids = split_words(frame, _RECEIVED, has_content=True)
    # Not into more words than are taken: a frame has room for millions.
    tokens = ids.split(b" ", limits.PROXY_IDS)
    if len(tokens) > limits.PROXY_IDS:
        raise ProtocolError(f"more than {limits.PROXY_IDS} ids are acknowledged at once")
    checked = tuple([_checked("message id", token) for token in tokens])
    return Received(client_name(client), topic_name(topic), checked)


def _checked(name: str, word: bytes, most: int = _ID_BYTES) -> str:
    short_word(name, word, most)
    return utf8(name, word)
