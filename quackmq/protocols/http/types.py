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
from quackmq.protocols.http.body_errors import describe_mistake

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
T = TypeVar("T")


class ServerCounts(Protocol):
    """The numbers of the server's connections and streams, for handlers."""

    @property
    def connection_count(self) -> int: ...

    @property
    def stream_count(self) -> int:
        """The number of streams that are being sent."""


class Request:
    """One complete request. `path_parameters` are the values of the path's named segments,
    percent-decoded. `headers` have lower-case names; the values of a repeated header are joined by
    commas.
    """

    __slots__ = (
        "_headers",
        "_query",
        "_raw_headers",
        "_raw_query",
        "body",
        "broker",
        "caller",
        "server",
        "method",
        "path_parameters",
        "path",
    )

    def __init__(
        self,
        broker: Broker,
        caller: Caller,
        method: str,
        path: str,
        path_parameters: Mapping[str, str],
        raw_query: bytes,
        raw_headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        server: ServerCounts,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Pass `headers` if they are already parsed."""
        self.broker = broker
        self.caller = caller
        self.method = method
        self.path = path
        self.path_parameters = path_parameters
        self.body = body
        self.server = server
        self._raw_query = raw_query
        self._raw_headers = raw_headers
        self._query: Mapping[str, str] | None = None
        self._headers = headers

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query. Raises InvalidRequest if a name is repeated or the query is
        not UTF-8.
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
    """A complete response, with its whole body."""

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

    pending_write: asyncio.Future[Any]
    render: Callable[[Any], Response]


#: Most handlers are coroutines. Others are plain functions that return a DeferredResponse.
Handler = Callable[[Request], Awaitable[Response | Stream] | DeferredResponse]


def json_response(
    status: int, value: object, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    """Return a response with `value` as JSON. Structs of msgspec are not supported here."""
    return Response(status, orjson.dumps(value), JSON, headers)


def decode_json(data: bytes, decoder: msgspec.json.Decoder[T], source: str = "the body") -> T:
    """Decode a JSON text. Raise InvalidRequest with the mistake and its path; `source` names the
    text in that message.
    """
    try:
        data.decode()  # the decoder does not validate the UTF-8 of every string
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source} is not UTF-8: {error.reason} at {error.start}") from None
    except RecursionError:
        raise InvalidRequest(f"{source} is nested too deeply") from None
    except msgspec.ValidationError as error:
        reason = describe_mistake(str(error), decoder.type, data)
        raise InvalidRequest(f"{source} is invalid: {reason}") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{source} is not valid JSON: {error}") from None


def parse_query(raw: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string or a form; raise InvalidRequest if it is invalid."""
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
        name = percent_decode(raw_name.replace(b"+", b" "), "the query")
        if name in query:
            raise InvalidRequest(f"the query has the parameter {name[:100]!r} twice")
        query[name] = percent_decode(raw_value.replace(b"+", b" "), "the query")
    return query


def parse_headers(raw: Sequence[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Decode headers; join the values of a repeated header by commas."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def percent_decode(quoted_text: bytes, source: str) -> str:
    """Return the percent-decoded text; raise InvalidRequest if it is not UTF-8."""
    try:
        if b"%" in quoted_text:
            quoted_text = unquote_to_bytes(quoted_text)
        return quoted_text.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{source} is not UTF-8") from None
