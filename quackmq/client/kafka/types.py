"""The values that the Python client takes and returns: messages, serialisers, start positions.

A message is decoded on access: most programs read only its value, and a loop over many messages
pays only for what it uses.
"""

from __future__ import annotations

import datetime
import difflib
import inspect
import reprlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import orjson
from confluent_kafka import Message as Record

from quackmq.errors import InvalidRequest
from quackmq.model.subscription import Offset, RecordPosition, Start, Time, message_id

#: Headers as the program passes them: a mapping, or pairs if a name occurs several times.
Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]
#: A start position as the program passes it: an offset is an int, a time is a `datetime` with a
#: time zone.
StartLike = Literal["beginning", "end"] | int | datetime.datetime | Offset | Time

SerialiserName = Literal["bytes", "str", "json"]


class Serialiser(Protocol):
    """Converts values to bytes and back. Its exceptions reach the caller."""

    def dumps(self, value: Any, /) -> bytes: ...

    def loads(self, data: bytes, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the cluster describes it. A topic that was deleted and created again has
    another id."""

    name: str
    id: uuid.UUID
    partitions: int


class Origin(NamedTuple):
    """The common part of all messages of a topic. `loads` is None if values stay bytes."""

    topic: TopicInfo
    loads: Callable[[bytes], Any] | None


class Message:
    """One message, as `get` and `listen` return it.

    >>> client.put("news", "rain", key="weather", headers={"lang": "en"})
    'A...'
    >>> message = client.get("news")
    >>> message.value, message.key, message.headers
    ('rain', b'weather', {'lang': b'en'})
    """

    __slots__ = ("_origin", "record")

    def __init__(self, record: Record, origin: Origin) -> None:
        #: librdkafka's message.
        self.record = record
        self._origin = origin

    @property
    def id(self) -> str:
        """The globally unique and permanent id of this message, to be passed as `after`."""
        return message_id(self._origin.topic.id, RecordPosition(self.partition, self.offset))

    @property
    def value(self) -> Any:
        """The value, decoded by the client's serialiser; None for a record without a value."""
        data = self.record.value()
        loads = self._origin.loads
        return data if loads is None or data is None else loads(data)

    @property
    def data(self) -> bytes | None:
        """The value as bytes."""
        return self.record.value()

    @property
    def key(self) -> bytes | None:
        return self.record.key()

    @property
    def headers(self) -> dict[str, bytes | None]:
        """The headers by name; the last one if a name occurs several times."""
        pairs: Any = self.record.headers() or ()
        return dict(pairs)

    @property
    def topic(self) -> str:
        return self._origin.topic.name

    @property
    def partition(self) -> int:
        return self.record.partition() or 0

    @property
    def offset(self) -> int:
        return self.record.offset() or 0

    @property
    def timestamp_ms(self) -> int:
        """The producer's time of the put."""
        _, timestamp_ms = self.record.timestamp()
        return timestamp_ms

    def __repr__(self) -> str:
        return (
            f"<Message {reprlib.repr(self.data)} at offset {self.offset} of {self.topic}, "
            f"partition {self.partition}; id {self.id}>"
        )


def make_origin(topic: TopicInfo, serialiser: Serialiser) -> Origin:
    """Return the common part of a topic's messages. The `bytes` serialiser has no `loads`: its
    values need no decoding."""
    return Origin(topic, None if isinstance(serialiser, _Bytes) else serialiser.loads)


# --- serialisers ---------------------------------------------------------------------------------


class _Bytes:
    def dumps(self, value: Any, /) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidRequest(
                f"a message is bytes, not {_type_name(value)}: give the client serialiser='str' or "
                "'json' for other values"
            )
        return bytes(value)

    def loads(self, data: bytes, /) -> bytes:
        return data


class _Text:
    def dumps(self, value: Any, /) -> bytes:
        if not isinstance(value, str):
            raise InvalidRequest(
                f"with serialiser='str' a message is a str, not {_type_name(value)}: give the "
                "client serialiser='bytes' or 'json' for other values"
            )
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text cannot be encoded as UTF-8: {error}") from None

    def loads(self, data: bytes, /) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"this message is not UTF-8 ({error}): `message.data` has its bytes"
            ) from None


class _Json:
    def dumps(self, value: Any, /) -> bytes:
        try:
            return orjson.dumps(value)
        except TypeError as error:
            raise InvalidRequest(f"the value cannot be encoded as JSON: {error}") from None

    def loads(self, data: bytes, /) -> Any:
        try:
            return orjson.loads(data)
        except ValueError as error:
            raise InvalidRequest(
                f"this message is not JSON ({error}): `message.data` has its bytes"
            ) from None


_SERIALISERS: Final[Mapping[str, Serialiser]] = {"bytes": _Bytes(), "str": _Text(), "json": _Json()}


def find_serialiser(serialiser: SerialiserName | Serialiser) -> Serialiser:
    """Return the serialiser with this name, or the given object. Raises InvalidRequest for an
    unknown name, and for an object without the methods of a serialiser."""
    if isinstance(serialiser, str):
        if serialiser not in _SERIALISERS:
            raise InvalidRequest(
                f"there is no serialiser {serialiser!r}: use one of {', '.join(_SERIALISERS)}, or "
                "an object with dumps and loads"
            )
        return _SERIALISERS[serialiser]
    if not all(callable(getattr(serialiser, name, None)) for name in ("dumps", "loads")):
        raise InvalidRequest(
            f"{serialiser!r} is not a serialiser: use one of {', '.join(_SERIALISERS)}, or an "
            "object with dumps and loads"
        )
    return serialiser


# --- arguments -------------------------------------------------------------------------------


def describe_unknown_argument(name: str, constructor: Callable[..., None]) -> str:
    """Return an error about an argument that the constructor of a client does not have. Suggest a
    similar one, for example `serialiser` for `serializer`."""
    known_names = list(inspect.signature(constructor).parameters)
    similar_names = difflib.get_close_matches(name, known_names, n=1)
    suggestion = f": did you mean {similar_names[0]!r}?" if similar_names else ""
    return f"a client has no argument {name!r}{suggestion}"


def key_bytes(key: str | bytes | None) -> bytes | None:
    """Return a key as bytes; a str is encoded as UTF-8. Raises InvalidRequest for other types."""
    if isinstance(key, str):
        return key.encode()
    if key is None or isinstance(key, bytes):
        return key
    raise InvalidRequest(f"a key is str or bytes, not {_type_name(key)}")


def header_pairs(headers: Headers | None) -> list[tuple[str, bytes | None]] | None:
    """Return headers as librdkafka takes them: pairs of name and bytes. Raises InvalidRequest."""
    if headers is None:
        return None
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        return [(_header_name(name), _header_bytes(name, value)) for name, value in pairs]
    except (TypeError, ValueError):  # it cannot be iterated, or an item is not a pair
        raise InvalidRequest(
            f"headers are a dict, as in {{'source': 'web'}}, or pairs of name and value, "
            f"not {headers!r}"
        ) from None


def _header_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidRequest(f"the name of a header is a str, not {_type_name(name)}: {name!r}")
    return name


def _header_bytes(name: str, value: object) -> bytes | None:
    """Return the value of a header as bytes or None. Raises InvalidRequest for other types."""
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    raise InvalidRequest(
        f"header {name!r} is {value!r}, {_type_name(value)}: a header's value is str or bytes, so "
        f"give str({value!r}) or encode it yourself"
    )


def parse_start(start: StartLike) -> Start:
    """Convert a start position. Raises InvalidRequest."""
    if isinstance(start, datetime.datetime):
        if start.tzinfo is None:
            raise InvalidRequest(
                f"{start} has no time zone: give a datetime with tzinfo, such as datetime.now(UTC)"
            )
        return Time(int(start.timestamp() * 1000))
    # In Python, a bool is an int, but True is not an offset.
    if isinstance(start, int) and not isinstance(start, bool):
        return Offset(start)
    if isinstance(start, Offset | Time) or start in ("beginning", "end"):
        return start
    raise InvalidRequest(
        f"{start!r} is not a start position: use 'beginning', 'end', an offset or a datetime"
    )


def _type_name(value: object) -> str:
    return type(value).__name__
