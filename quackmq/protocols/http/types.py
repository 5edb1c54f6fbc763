"""The types that handlers receive and return: a complete request, a response, a stream of chunks.

Handlers do not see sockets. A request's query and headers are parsed on first use, because most
requests need at most one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
import orjson

from quackmq.broker import Broker, Caller
from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits
from quackmq.protocols.http.body_errors import explained

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
T = TypeVar("T")


class DoorFacts(Protocol):
    """The facts about the server that handlers may use."""

    @property
    def connection_count(self) -> int: ...

    @property
    def stream_count(self) -> int:
        """The number of streams that are being sent."""


class Request:
    """One complete request. `parts` are the values of the path's named segments, percent-decoded.
    `headers` have lower-case names; the values of a repeated header are joined by commas.
    """

    __slots__ = (
        "_headers",
        "_query",
        "_raw_headers",
        "_raw_query",
        "body",
        "broker",
        "caller",
        "door",
        "method",
        "parts",
        "path",
    )

    def __init__(
        self,
        broker: Broker,
        caller: Caller,
        method: str,
        path: str,
        parts: Mapping[str, str],
        raw_query: bytes,
        raw_headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        door: DoorFacts,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Pass `headers` if they are already parsed."""
        self.broker = broker
        self.caller = caller
        self.method = method
        self.path = path
        self.parts = parts
        self.body = body
        self.door = door
        self._raw_query = raw_query
        self._raw_headers = raw_headers
        self._query: Mapping[str, str] | None = None
        self._headers = headers

    @property
    def query(self) -> Mapping[str, str]:
        """The query's parameters; raise InvalidRequest if a name is repeated or the query is not
        UTF-8.
        """
        if self._query is None:
            self._query = parse_query(self._raw_query)
        return self._query

    @property
    def headers(self) -> Mapping[str, str]:
        if self._headers is None:
            self._headers = parse_headers(self._raw_headers)
        return self._headers


class Response(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class Stream(NamedTuple):
    """A response in chunks, of `length` bytes in total if that is known. The iterator does not run
    ahead of the peer's reading. When the peer disconnects, a started iterator is closed.
    """

    content_type: str
    chunks: AsyncIterator[bytes]
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200
    length: int | None = None


class DeferredResponse(NamedTuple):
    """A pending write and the function that renders its response. It serves frequent requests, for
    which a task would cost more than the work itself.
    """

    change: asyncio.Future[Any]
    answer: Callable[[Any], Response]


#: Most handlers are coroutines. Other handlers may raise at once or return a DeferredResponse.
Handler = Callable[[Request], Awaitable[Response | Stream] | DeferredResponse]


def json_response(
    status: int, value: object, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    return Response(status, orjson.dumps(value), JSON, headers)


def decoded(data: bytes, decoder: msgspec.json.Decoder[T], where: str = "the body") -> T:
    """Decode a JSON text; raise InvalidRequest with the mistake and its place."""
    try:
        data.decode()  # the decoder does not validate the UTF-8 of every string
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8: {error.reason} at {error.start}") from None
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply") from None
    except msgspec.ValidationError as error:
        reason = explained(str(error), decoder.type)
        raise InvalidRequest(f"{where} is not as it should be: {reason}") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from None


def parse_query(raw: bytes) -> Mapping[str, str]:
    if not raw:
        return {}
    pairs = raw.split(b"&", limits.HTTP_QUERY_PARAMETERS)
    if len(pairs) > limits.HTTP_QUERY_PARAMETERS:
        raise InvalidRequest(f"more than {limits.HTTP_QUERY_PARAMETERS} parameters in the query")
    query: dict[str, str] = {}
    for pair in pairs:
        if not pair:
            continue
        raw_name, _, raw_value = pair.partition(b"=")
        name = decode(raw_name.replace(b"+", b" "), "the query")
        if name in query:
            raise InvalidRequest(f"the query has {name[:100]!r} twice")
        query[name] = decode(raw_value.replace(b"+", b" "), "the query")
    return query


def parse_headers(raw: Sequence[tuple[bytes, bytes]]) -> Mapping[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def decode(quoted: bytes, where: str) -> str:
    """Return the percent-decoded text; raise InvalidRequest if it is not UTF-8."""
    try:
        if b"%" in quoted:
            quoted = unquote_to_bytes(quoted)
        return quoted.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{where} is not UTF-8") from None
