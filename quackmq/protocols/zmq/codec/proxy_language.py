"""The language of the reliable XPUB/XSUB proxy: encode and parse its frames. No sockets here.

Each request and each reply is one frame. Its words are separated by one space; names follow the
same rules as in `queue_language`. The content is the rest of the frame and may be any bytes.
Clients send these requests to the proxy's REP socket:

    request                                    reply
    hello client topic address                 ack_welcome client topic new|known xpub-port
    goodbye client topic                       ack_goodbye client topic
    ack_received client topic id …             ack_noted client topic id …
    publish publisher topic number content     ack_published publisher topic number
    last_published publisher topic             ack_last publisher topic number

The proxy sends this request to the client's REP socket, at the address from `hello`:

    data client topic id content               ack_received client topic id
                                               not_yet client topic id

Every reply may also be `ERR code text`. An address is `tcp://HOST:PORT` or `HOST:PORT`. The host
`*` stands for the host from which the client connects. `not_yet` means that the client has the
message but has not processed it; the proxy sends it again later, unless it is acknowledged before.
The ids in `ack_noted` are low-water marks: all earlier messages of their partition are
acknowledged, so each of them can arrive only as a repeat. The number -1 means that nothing was
published yet.

The frames that the XPUB socket sends depend on the subscription:

    subscription       first frame     further frames
    any prefix         topic           body               for every topic with this prefix
    ids TOPIC          ids TOPIC       body, message id   for exactly this topic
    client NAME        none            none               names the client; see below

A topic name contains no space, so the last two are never prefixes of topic names. A client that has
said `hello` subscribes to both, over one connection. The messages on that connection are then its
first deliveries. Messages that it does not acknowledge in time are sent to its address.

Promises: for any bytes, parsing returns a value or raises InvalidRequest, usually ProtocolError.
`read_reply` returns the result or raises a QuackError.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quackmq import limits
from quackmq.errors import ProtocolError
from quackmq.protocols.zmq.codec.words import (
    abbreviate,
    check_word,
    decode_utf8,
    error_for_code,
    parse_client_name,
    parse_topic_name,
    parse_whole_number,
    split_words,
)

_NONE_YET: Final = -1
#: Real ids are shorter.
_ID_BYTES: Final = 100
#: A host name has up to 253 characters; the port follows it.
_ADDRESS_BYTES: Final = 300
_NEW: Final = "new"
#: Requests of the queue's REP socket, which listens on another port.
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
    """A client acknowledges messages that it received from the XPUB socket."""

    client: str
    topic: str
    ids: tuple[str, ...]


class Publish(NamedTuple):
    """`client` is the publisher. The broker recognizes a repeated message by its number."""

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
    """The reply to `Hello`: whether the subscription is new, and the port of the XPUB socket (0 if
    there is none).
    """

    is_new: bool
    xpub_port: int


Request = Hello | Goodbye | Received | Publish | LastPublished


# --- requests of clients --------------------------------------------------------------------


def parse_request(frame: bytes) -> Request:
    """Parse a client's request. Raise InvalidRequest, usually ProtocolError, if it is invalid."""
    verb, _, _ = frame.partition(b" ")
    if verb == b"publish":
        _, client, topic, number, content = split_words(frame, _PUBLISH, has_content=True)
        return Publish(
            parse_client_name(client),
            parse_topic_name(topic),
            parse_whole_number("number", number),
            content,
        )
    if verb == b"ack_received":
        return _parse_received(frame)
    if verb == b"hello":
        _, client, topic, address = split_words(frame, _HELLO)
        return Hello(
            parse_client_name(client),
            parse_topic_name(topic),
            _check_text("address", address, _ADDRESS_BYTES),
        )
    if verb in _QUEUE_VERBS:
        raise ProtocolError(
            f"send {verb.decode()} to the zmq port; this port takes hello, goodbye, ack_received, "
            "publish and last_published"
        )
    if verb not in (b"goodbye", b"last_published"):
        raise ProtocolError(
            f"unknown request {abbreviate(verb)}: use hello, goodbye, ack_received, publish or "
            "last_published"
        )
    _, client, topic = split_words(frame, _PLAIN)
    request_class = Goodbye if verb == b"goodbye" else LastPublished
    return request_class(parse_client_name(client), parse_topic_name(topic))


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


# --- replies of the proxy -------------------------------------------------------------------


def encode_welcome(request: Hello, welcome: Welcome) -> bytes:
    novelty = _NEW if welcome.is_new else _KNOWN
    return f"ack_welcome {request.client} {request.topic} {novelty} {welcome.xpub_port}".encode()


def encode_goodbye_reply(request: Goodbye) -> bytes:
    return f"ack_goodbye {request.client} {request.topic}".encode()


def encode_received_reply(request: Received, marks: tuple[str, ...]) -> bytes:
    return " ".join(("ack_noted", request.client, request.topic, *marks)).encode()


def encode_publish_reply(request: Publish) -> bytes:
    return f"ack_published {request.client} {request.topic} {request.number}".encode()


def encode_last_reply(request: LastPublished, number: int | None) -> bytes:
    number = _NONE_YET if number is None else number
    return f"ack_last {request.client} {request.topic} {number}".encode()


def read_reply(request: Request, frame: bytes) -> Welcome | tuple[str, ...] | int | None:
    """Parse the reply to a request. Return

    - for Hello: the `Welcome`;
    - for Received: the ids of the low-water marks;
    - for LastPublished: the number, or None if there is none;
    - for Goodbye and Publish: None.

    Raise the error that the reply reports, or ProtocolError if the reply does not fit the request.
    """
    verb, _, rest = frame.partition(b" ")
    if verb == b"ERR":
        code, _, text = rest.decode(errors="replace").partition(" ")
        raise error_for_code(code, text)
    expected = f"{_REPLY_VERBS[type(request)]} {request.client} {request.topic}".encode()
    if isinstance(request, Publish):
        expected += b" %d" % request.number
    if frame != expected and not frame.startswith(expected + b" "):
        raise _unfit_reply(frame, encode_request(request))
    words = frame[len(expected) + 1 :].split(b" ") if len(frame) > len(expected) else []
    if isinstance(request, Hello) and len(words) == 2 and words[0] in (b"new", b"known"):
        return Welcome(words[0] == b"new", parse_whole_number("port", words[1]))
    if isinstance(request, Received):
        return tuple([_check_text("message id", word) for word in words])
    if isinstance(request, LastPublished) and len(words) == 1:
        return None if words[0] == b"-1" else parse_whole_number("number", words[0])
    if isinstance(request, Goodbye | Publish) and not words:
        return None
    raise _unfit_reply(frame, encode_request(request))


# --- requests of the proxy, and replies of clients ------------------------------------------


def encode_data(data: Data) -> bytes:
    return data_words(data) + data.content


def data_words(data: Data) -> bytes:
    """Encode the words before the content. The sender sends the content itself, without a copy."""
    return f"data {data.client} {data.topic} {data.id} ".encode()


def parse_data(frame: bytes) -> Data:
    """Parse a `data` request. Raise InvalidRequest, usually ProtocolError, if it is invalid."""
    verb, client, topic, message_id, content = split_words(frame, _DATA, has_content=True)
    if verb != b"data":
        raise ProtocolError(f"unknown request {abbreviate(verb)}: a client takes only data")
    return Data(
        parse_client_name(client),
        parse_topic_name(topic),
        _check_text("message id", message_id),
        content,
    )


def encode_data_received(data: Data) -> bytes:
    return f"ack_received {data.client} {data.topic} {data.id}".encode()


def encode_not_yet(data: Data) -> bytes:
    return f"not_yet {data.client} {data.topic} {data.id}".encode()


def read_data_reply(data: Data, frame: bytes) -> bool:
    """Parse the reply to `data`; return whether the client has processed the message. Raise the
    error that the reply reports, or ProtocolError if the reply does not fit the request.
    """
    if frame == encode_data_received(data):
        return True
    if frame == encode_not_yet(data):
        return False
    if frame.startswith(b"ERR "):
        code, _, text = frame[4:].decode(errors="replace").partition(" ")
        raise error_for_code(code, text)
    raise _unfit_reply(frame, data_words(data))


# --- subscriptions at the XPUB socket -------------------------------------------------------

_IDS: Final = b"ids "
_CLIENT: Final = b"client "


def ids_subscription(topic: str) -> bytes:
    """Encode the subscription to a topic's messages with ids. Such a message begins with the same
    bytes as its first frame."""
    return _IDS + topic.encode()


def client_subscription(client: str) -> bytes:
    """Encode the subscription that names the client."""
    return _CLIENT + client.encode()


def parse_ids_subscription(prefix: bytes) -> str | None:
    """Return the topic if this is a subscription with ids, otherwise None. Raise InvalidRequest if
    the topic's name is invalid.
    """
    return parse_topic_name(prefix.removeprefix(_IDS)) if prefix.startswith(_IDS) else None


def parse_client_subscription(prefix: bytes) -> str | None:
    """Return the client's name if this subscription names one, otherwise None. Raise
    InvalidRequest if the name is invalid.
    """
    return parse_client_name(prefix.removeprefix(_CLIENT)) if prefix.startswith(_CLIENT) else None


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
_REPLY_VERBS: Final[dict[type[Request], str]] = {
    Hello: "ack_welcome",
    Goodbye: "ack_goodbye",
    Received: "ack_noted",
    Publish: "ack_published",
    LastPublished: "ack_last",
}


def _parse_received(frame: bytes) -> Received:
    _, client, topic, ids = split_words(frame, _RECEIVED, has_content=True)
    # The split is bounded, because a frame has room for millions of words.
    tokens = ids.split(b" ", limits.PROXY_IDS)
    if len(tokens) > limits.PROXY_IDS:
        raise ProtocolError(f"more than {limits.PROXY_IDS} ids are acknowledged at once")
    message_ids = tuple([_check_text("message id", token) for token in tokens])
    return Received(parse_client_name(client), parse_topic_name(topic), message_ids)


def _check_text(name: str, word: bytes, most_bytes: int = _ID_BYTES) -> str:
    """Decode a word. Raise ProtocolError if it is empty, too long or not UTF-8."""
    check_word(name, word, most_bytes)
    return decode_utf8(name, word)


def _unfit_reply(frame: bytes, request: bytes) -> ProtocolError:
    return ProtocolError(f"the reply {abbreviate(frame)} does not fit {abbreviate(request)}")
