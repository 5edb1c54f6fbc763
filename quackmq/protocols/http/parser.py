"""Turn one peer's bytes into requests, each complete or refused. No I/O.

httptools (llhttp, in C) parses the bytes as they arrive. This module adds:

- bounds on the size of heads and bodies, however they are split into pieces;
- the choice of the route, so that its bound on bodies holds before the body arrives;
- the check that no foreign web page made the request (see `browser_guards`).

Invalid input is refused with an HTTP status, and everything after it is ignored: the start of the
next request cannot be found. Call it only from the connection that made it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import httptools

from quackmq.broker import Broker, Caller
from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits
from quackmq.protocols.http.browser_guards import (
    OwnNames,
    host_name,
    is_foreign_site,
    may_come_from_another_page,
)
from quackmq.protocols.http.errors import HttpFailure, failure_response, response_for_error
from quackmq.protocols.http.head_cache import ParsedHead, RequestHeadCache
from quackmq.protocols.http.router import Route, RouteMatch, Router
from quackmq.protocols.http.types import Request, Response, ServerCounts
from quackmq.serving import limits as serving_limits
from quackmq.serving.budgets import ReceiveBudget
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, recognize_protocol

log = logging.getLogger(__name__)

_VERSIONS: Final = ("1.1", "1.0")
_NO_PARAMETERS: Final[Mapping[str, str]] = {}
_HEAD_END: Final = b"\r\n\r\n"
#: Bytes of a header's value that an error message shows.
_SHOWN_BYTES: Final = 100
#: Bytes of framing allowed for each byte of a chunked body: a chunk of one byte has 5.
_FRAMING_PER_BODY_BYTE: Final = 6


class ServerContext(ServerCounts, Protocol):
    """The part of the server that receivers use."""

    broker: Broker
    router: Router
    head_cache: RequestHeadCache
    names: OwnNames
    mistaken_peers: MistakenPeers
    receive_budget: ReceiveBudget


class PendingRequest:
    """A complete request for a route, or a request that was refused (`refusal`)."""

    __slots__ = (
        "closes_connection",
        "is_head",
        "is_http_1_0",
        "path",
        "refusal",
        "request",
        "reserved_bytes",
        "route",
    )

    def __init__(
        self, path: str, is_head: bool, is_http_1_0: bool, closes_connection: bool
    ) -> None:
        self.path = path
        self.is_head = is_head
        #: A response to HTTP/1.0 must say so if the connection stays open.
        self.is_http_1_0 = is_http_1_0
        #: Whether the connection closes after the response.
        self.closes_connection = closes_connection
        self.request: Request | None = None
        self.route: Route | None = None
        self.refusal: Response | None = None
        self.reserved_bytes = 0


class Receiver:
    """Parse one peer's bytes; pass each request to `deliver` during `feed`."""

    def __init__(
        self,
        server: ServerContext,
        caller: Caller,
        is_loopback: bool,
        deliver: Callable[[PendingRequest], None],
    ) -> None:
        self._server = server
        self._caller = caller
        self._is_loopback = is_loopback
        self._deliver = deliver
        self._cached_heads = server.head_cache.heads_for(is_loopback)
        #: The parsed form of the last head, if it may be cached.
        self._parsed_head: ParsedHead | None = None
        #: The number of requests that began in the bytes of the last `feed`.
        self._begun_count = 0
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        #: Whether a request has begun to arrive and is not complete.
        self.is_arriving = False
        #: Whether further bytes are parsed; False after the last request of a connection.
        self.accepts_requests = True
        #: Whether the peer waits for `100 Continue` before it sends the body.
        self.wants_continue = False
        #: The Host of the arriving request, and the last Host that was accepted.
        self._host = b""
        self._accepted_host: bytes | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        #: The body so far. It is a bytearray if it has arrived in several pieces, which may be many
        #: and tiny.
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._body_limit = 0
        self._pending: PendingRequest | None = None

    def feed(self, data: bytes | memoryview) -> None:
        """Parse the next bytes, and deliver the requests that are complete with them."""
        if not self.accepts_requests:
            return
        if self.is_arriving:
            self._parse(data)
            if self.is_arriving:
                self._bound_buffered(len(data))
        elif isinstance(data, bytes) and (end := data.find(_HEAD_END)) > 0:
            self._feed_whole(data, end + len(_HEAD_END))
        else:
            self._parse(data)

    def refuse(self, status: int, code: str, message: str) -> None:
        """Refuse the arriving request at once, and accept no further one."""
        path = "/" if self._pending is None else self._pending.path
        self._refuse(failure_response(status, code, message, path))

    def release(self, pending: PendingRequest | None) -> None:
        """Release the memory that is reserved for the body of a finished request."""
        if pending is not None and pending.reserved_bytes:
            self._server.receive_budget.release(pending.reserved_bytes)
            pending.reserved_bytes = 0

    def reserve(self, pending: PendingRequest, body_bytes: int) -> bool:
        """Reserve memory for `body_bytes` of a request's body. Return False if there is not
        enough."""
        more_bytes = body_bytes - pending.reserved_bytes
        if not self._server.receive_budget.reserve(more_bytes):
            return False
        pending.reserved_bytes += more_bytes
        return True

    def close(self) -> None:
        """Stop parsing, and release the memory of the arriving request."""
        self.accepts_requests = False
        self.wants_continue = False
        self.release(self._pending)
        self._pending = None
        self._body = b""
        # These break reference cycles: a closed connection is freed without the garbage collector.
        self._parser = None
        self._deliver = _ignore

    def _feed_whole(self, data: bytes, head_bytes: int) -> None:
        """Handle bytes that hold a whole head, and perhaps its body and further requests."""
        head = data[:head_bytes]
        cached = self._cached_heads.get(head)
        if cached is not None and len(data) - head_bytes == cached.body_bytes:
            route, method, path, path_parameters, raw_query, headers, _ = cached
            pending = PendingRequest(
                path, method == "HEAD", is_http_1_0=False, closes_connection=False
            )
            server, body = self._server, data[head_bytes:]
            pending.request = Request(
                server.broker,
                self._caller,
                method,
                path,
                path_parameters,
                raw_query,
                (),
                body,
                server,
                headers,
            )
            pending.route = route
            self._deliver(pending)
            return
        self._parsed_head = None
        self._begun_count = 0
        self._parse(data)
        # If several requests arrived together, `_parsed_head` belongs to the last one and `head` to
        # the first.
        if self._begun_count == 1:
            self._cache_head(head, len(data) - head_bytes)

    def _cache_head(self, head: bytes, rest_bytes: int) -> None:
        """Cache a parsed head if exactly its body arrived with it."""
        if self._parsed_head is not None and self._parsed_head.body_bytes == rest_bytes:
            self._server.head_cache.store(self._is_loopback, head, self._parsed_head, self._headers)

    # --- called by httptools -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Reset the state for a new request."""
        self.is_arriving = True
        self._begun_count += 1
        self._has_head = False
        self._url = b""
        self._headers = []
        self._head_bytes = self._fed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > limits.HTTP_HEAD_BYTES:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Refuse a head that is too large."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > limits.HTTP_HEAD_BYTES:
            self._refuse_head()
        elif not self._has_head:  # otherwise it is a trailer, which we ignore
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head, and find its route. An invalid request is refused at once. A request
        without a route gets its response when its body has arrived.
        """
        self._has_head = True
        parser = self._parser
        # The request was refused while its head arrived, or the connection is closed.
        if not self.accepts_requests or parser is None:
            return
        version = parser.get_http_version()
        method = parser.get_method().decode("latin-1")
        raw_path, _, raw_query = self._path_and_query().partition(b"?")
        path = raw_path.decode("latin-1")
        closes_connection = not parser.should_keep_alive() or method == "CONNECT"
        self._pending = pending = PendingRequest(
            path, method == "HEAD", version != "1.1", closes_connection
        )
        self._body_limit = limits.HTTP_BODY_BYTES
        path_parameters = _NO_PARAMETERS
        try:
            declared_body_bytes = self._check_head(version)
            match = self._server.router.find(raw_path)
            route = None if match is None else match.routes.get(method)
            if route is not None and route.is_write:
                self._check_page_origin()
        except (HttpFailure, InvalidRequest) as error:
            self._refuse(response_for_error(error, path))
            return
        if match is None or route is None:
            pending.refusal = _no_route_response(method, path, match)
        else:
            pending.route = route
            path_parameters = match.path_parameters
            self._body_limit = route.body_bytes
        if declared_body_bytes > self._body_limit:
            self._refuse_body()
            return
        server = self._server
        pending.request = Request(
            server.broker,
            self._caller,
            method,
            path,
            path_parameters,
            raw_query,
            self._headers,
            b"",
            server,
        )
        # `_feed_whole` caches this head if exactly its body has arrived with it.
        if route is not None and not closes_connection and not pending.is_http_1_0:
            self._parsed_head = ParsedHead(
                route, method, path, path_parameters, raw_query, {}, declared_body_bytes
            )

    def on_body(self, body: bytes) -> None:
        """Add a piece to the body. Refuse a body that exceeds the bound of its route or the memory
        for all bodies. The body of a request without a route is dropped.
        """
        pending = self._pending
        if not self.accepts_requests or pending is None:
            return
        self._body_bytes = received_bytes = self._body_bytes + len(body)
        if received_bytes > self._body_limit:
            self._refuse_body()
        elif pending.route is not None:
            if not self._body:
                self._body = body
            elif isinstance(self._body, bytes):
                self._body = bytearray(self._body) + body
            else:
                self._body += body
            if received_bytes > limits.HTTP_UNRESERVED_BYTES and not self.reserve(
                pending, received_bytes
            ):
                self.refuse(503, "limit_reached", "too many large bodies arrive: try again later")

    def on_message_complete(self) -> None:
        """Deliver the request, which is complete."""
        self.is_arriving = False
        pending = self._pending
        if not self.accepts_requests or pending is None:
            return
        assert pending.request is not None, "the head is complete before the message"
        self._pending = None
        self.wants_continue = False
        if self._body:
            pending.request.body = bytes(self._body)
            self._body = b""
        self._body_bytes = 0
        self.accepts_requests = not pending.closes_connection
        self._deliver(pending)

    # --- internal ----------------------------------------------------------------------------

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse bytes; httptools calls the methods above. Refuse bytes that are not HTTP."""
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The request is complete. A request for another protocol may be answered in HTTP. This
            # parser has ended, so a new one parses the following bytes.
            self._parser = httptools.HttpRequestParser(self)
            unparsed = data[upgrade.args[0] :]
            if len(unparsed) and self.accepts_requests:
                self._parse(unparsed)
        except httptools.HttpParserCallbackError as error:
            log.error("a request of %s failed", self._caller.address, exc_info=error.__context__)
            self.refuse(500, "error", "internal error: see the broker's log")
        except httptools.HttpParserInvalidMethodError:
            self._refuse_other_protocol(data, 501, "unknown_method", "unknown HTTP method")
        except httptools.HttpParserError as error:
            self._refuse_other_protocol(data, 400, "protocol_error", f"not valid HTTP: {error}")

    def _refuse_other_protocol(
        self, data: bytes | memoryview, status: int, code: str, message: str
    ) -> None:
        """Refuse bytes that are not HTTP. If they are of another known protocol, log and name
        it."""
        protocol = recognize_protocol(bytes(data[: serving_limits.OPENING_BYTES]))
        if protocol is not None and protocol is not WireProtocol.HTTP and self.accepts_requests:
            mistaken_peers = self._server.mistaken_peers
            reason = mistaken_peers.report(self._caller.address, protocol, time.monotonic())
            message = f"{message}: {reason}"
        self.refuse(status, code, message)

    def _bound_buffered(self, fed_bytes: int) -> None:
        """Refuse the request if the parser buffers too much. It buffers incomplete elements, such
        as a header's value, without a callback.
        """
        self._fed_bytes += fed_bytes
        beside_body_bytes = self._fed_bytes - self._body_bytes
        if beside_body_bytes > limits.HTTP_HEAD_BYTES + _FRAMING_PER_BODY_BYTE * self._body_bytes:
            self._refuse_head()

    def _path_and_query(self) -> bytes:
        """Return the path and query of the request; a proxy's client sends a whole URL."""
        url = self._url
        if url.startswith(b"/") or url == b"*":
            return url
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            # The empty path has no route.
            return b""
        query = b"?" + parsed.query if parsed.query else b""
        return (parsed.path or b"/") + query

    def _check_head(self, version: str) -> int:
        """Check the head; return the declared length of the body, or 0 without one. Raise
        HttpFailure for a request that this server does not accept.
        """
        if version not in _VERSIONS:
            raise HttpFailure(505, "protocol_error", "use HTTP/1.1 or HTTP/1.0")
        host: bytes | None = None
        origin: bytes | None = None
        declared_body_bytes = 0
        for name, value in self._headers:
            if name == b"host":
                if host is not None:
                    raise HttpFailure(400, "protocol_error", "the request has two Host headers")
                host = value
            elif name == b"content-length":
                declared_body_bytes = int(value)  # the parser has checked that it is a number
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    raise HttpFailure(417, "invalid_request", "Expect must be 100-continue")
                self.wants_continue = version == "1.1"
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site" and is_foreign_site(value):
                raise _foreign_page("another site", f"Sec-Fetch-Site is {_printable(value)}")
        if host is None and version == "1.1":
            raise HttpFailure(400, "protocol_error", "the request has no Host header")
        self._host = host or b""
        if host is not None and host != self._accepted_host:
            self._check_host(host)
        if origin is not None and not self._server.names.is_own_origin(origin, self._host):
            raise _foreign_page("another origin", f"Origin is {_printable(origin)}")
        return declared_body_bytes

    def _check_host(self, host: bytes) -> None:
        """Raise HttpFailure if requests may not name this host."""
        if not self._server.names.allows_host(host, self._is_loopback):
            raise _host_not_allowed(host)
        self._accepted_host = host

    def _check_page_origin(self) -> None:
        """Raise HttpFailure if a page of another origin may have made a request that changes
        something.
        """
        if may_come_from_another_page(self._headers, self._host, self._server.names):
            referer = dict(self._headers).get(b"referer")
            evidence = (
                "no header says which" if referer is None else f"Referer is {_printable(referer)}"
            )
            raise _foreign_page("another origin", evidence)

    def _refuse_head(self) -> None:
        message = f"request line and headers exceed {limits.HTTP_HEAD_BYTES} bytes"
        self.refuse(431, "limit_reached", message)

    def _refuse_body(self) -> None:
        message = f"the body is larger than {self._body_limit} bytes"
        self.refuse(413, "record_too_large", message)

    def _refuse(self, response: Response) -> None:
        """Deliver the arriving request with this refusal as its response, and ignore the rest."""
        if not self.accepts_requests:
            return
        pending = self._pending or PendingRequest(
            "/", is_head=False, is_http_1_0=False, closes_connection=True
        )
        self.release(pending)
        self._pending = None
        self._body = b""
        self.accepts_requests = False
        self.wants_continue = False
        pending.closes_connection = True
        pending.refusal = response
        self._deliver(pending)


def _no_route_response(method: str, path: str, match: RouteMatch | None) -> Response:
    """Return the response for a path or method without a route. OPTIONS lists the methods."""
    if match is not None:
        allow = (("allow", match.allowed_methods),)
        if method == "OPTIONS":
            return Response(204, headers=allow)
        message = f"{path[:200]} supports {match.allowed_methods}, not {method}"
        return failure_response(405, "unknown_method", message, path, allow)
    if path == "*" and method == "OPTIONS":
        return Response(204)
    message = f"there is no resource at {path[:200]}; /v1/docs lists all of them"
    return failure_response(404, "unknown_route", message, path)


def _foreign_page(site: str, evidence: str) -> HttpFailure:
    """Return the failure for a request that a web page of `site` may have made. `evidence` says
    which header shows that.
    """
    message = (
        f"requests by web pages of {site} are refused ({evidence}). If the page is this broker's "
        "own under another name, add the name to the setting http_names"
    )
    return HttpFailure(403, "not_allowed", message)


def _host_not_allowed(host: bytes) -> HttpFailure:
    """Return the failure for a Host header that is not one of the broker's names."""
    name = _printable(host_name(host).encode("latin-1"))
    message = (
        f"Host {name} is not allowed: use localhost or an IP address, or add the "
        f"name to the setting http_names (--http-names {name}, or QUACKMQ_HTTP_NAMES)"
    )
    return HttpFailure(421, "not_allowed", message)


def _printable(value: bytes) -> str:
    """Return a header's value for a message: shortened, without unprintable characters."""
    text = value[:_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _ignore(pending: PendingRequest) -> None:
    """Take the place of `deliver` after the connection is closed."""
