"""Turn one peer's bytes into requests, each complete or refused. No I/O.

httptools (llhttp, in C) parses the bytes as they arrive. This module adds:

- bounds on the size of heads and bodies, however they are split into pieces;
- the choice of the route, so that its bound on bodies holds before the body arrives;
- the check that no foreign web page made the request (see `browser_guards`).

Invalid input is answered with its HTTP status, and everything after it is ignored: the start of the
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
    is_made_by_another_page,
)
from quackmq.protocols.http.errors import HttpFailure, failure, failure_of
from quackmq.protocols.http.head_cache import KnownHead, RequestHeadCache
from quackmq.protocols.http.router import Found, Route, Router
from quackmq.protocols.http.types import DoorFacts, Request, Response
from quackmq.serving import limits as serving_limits
from quackmq.serving.budgets import ReceiveBudget
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, protocol_of

log = logging.getLogger(__name__)

_VERSIONS: Final = ("1.1", "1.0")
_NO_PARTS: Final[Mapping[str, str]] = {}
_HEAD_END: Final = b"\r\n\r\n"
#: Bytes of a header's value that an error message shows.
_SHOWN_BYTES: Final = 100
#: Bytes of framing allowed for each byte of a chunked body: a chunk of one byte has 5.
_FRAMING: Final = 6


class ServerContext(DoorFacts, Protocol):
    """The part of the server that receivers use."""

    broker: Broker
    router: Router
    known_heads: RequestHeadCache
    names: OwnNames
    mistaken: MistakenPeers
    receive_budget: ReceiveBudget


class PendingRequest:
    """A complete request for a route, or a request that was refused (`refusal`)."""

    __slots__ = (
        "closes",
        "is_head",
        "is_old",
        "path",
        "refusal",
        "request",
        "reserved_bytes",
        "route",
    )

    def __init__(self, path: str, is_head: bool, is_old: bool, closes: bool) -> None:
        self.path = path
        self.is_head = is_head
        #: HTTP/1.0: the response must say so if the connection stays open.
        self.is_old = is_old
        #: Whether the connection closes after the response.
        self.closes = closes
        self.request: Request | None = None
        self.route: Route | None = None
        self.refusal: Response | None = None
        self.reserved_bytes = 0


class Receiver:
    """Parse one peer's bytes; pass each request to `deliver` during `feed`."""

    def __init__(
        self,
        place: ServerContext,
        caller: Caller,
        is_loopback: bool,
        deliver: Callable[[PendingRequest], None],
    ) -> None:
        self._place = place
        self._caller = caller
        self._is_loopback = is_loopback
        self._deliver = deliver
        self._known = place.known_heads.of(is_loopback)
        #: The parsed form of the last head, if it may be cached.
        self._made: KnownHead | None = None
        #: Requests that began in the bytes of the last `feed`.
        self._begun = 0
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        #: Whether a request has begun to arrive and is not complete.
        self.is_coming = False
        #: Whether further bytes are parsed; False after the last request of a connection.
        self.takes_requests = True
        #: Whether the peer waits for `100 Continue` before it sends the body.
        self.wants_continue = False
        #: The Host of the arriving request, and the last Host that was accepted.
        self._host = b""
        self._known_host: bytes | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._head_bytes = 0
        self._fed_bytes = 0
        #: One piece as it arrived; a bytearray once there are more, because pieces may be many and
        #: tiny.
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._body_limit = 0
        self._asked: PendingRequest | None = None

    def feed(self, data: bytes | memoryview) -> None:
        if not self.takes_requests:
            return
        if self.is_coming:
            self._parse(data)
            if self.is_coming:
                self._count(len(data))
        elif isinstance(data, bytes) and (end := data.find(_HEAD_END)) > 0:
            self._feed_whole(data, end + len(_HEAD_END))
        else:
            self._parse(data)

    def refuse(self, status: int, code: str, message: str) -> None:
        """Refuse the arriving request at once, and accept no further one."""
        path = "/" if self._asked is None else self._asked.path
        self._refuse(failure(status, code, message, path))

    def release(self, asked: PendingRequest | None) -> None:
        """Release the memory that is reserved for the body of a finished request."""
        if asked is not None and asked.reserved_bytes:
            self._place.receive_budget.release(asked.reserved_bytes)
            asked.reserved_bytes = 0

    def reserve(self, asked: PendingRequest, body_bytes: int) -> bool:
        """Reserve memory for `body_bytes` of a request's body; return False if there is not
        enough."""
        more_bytes = body_bytes - asked.reserved_bytes
        if not self._place.receive_budget.reserve(more_bytes):
            return False
        asked.reserved_bytes += more_bytes
        return True

    def close(self) -> None:
        self.takes_requests = False
        self.wants_continue = False
        self.release(self._asked)
        self._asked = None
        self._body = b""
        self._parser = None  # breaks a reference cycle

    def _feed_whole(self, data: bytes, head_bytes: int) -> None:
        """Handle bytes that hold a whole head, and perhaps its body and further requests."""
        head = data[:head_bytes]
        known = self._known.get(head)
        if known is not None and len(data) - head_bytes == known.body_bytes:
            route, method, path, parts, raw_query, headers, _ = known
            asked = PendingRequest(path, method == "HEAD", is_old=False, closes=False)
            place, body = self._place, data[head_bytes:]
            asked.request = Request(
                *(place.broker, self._caller, method, path, parts, raw_query, (), body, place),
                headers,
            )
            asked.route = route
            self._deliver(asked)
            return
        self._made = None
        self._begun = 0
        self._parse(data)
        # If several requests arrived together, `_made` belongs to the last one and `head` to the
        # first.
        if self._begun == 1:
            self._learn(head, len(data) - head_bytes)

    def _learn(self, head: bytes, rest_bytes: int) -> None:
        """Cache a parsed head if exactly its body arrived with it."""
        if self._made is not None and self._made.body_bytes == rest_bytes:
            self._place.known_heads.learn(self._is_loopback, head, self._made, self._headers)

    # --- called by httptools -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.is_coming = True
        self._begun += 1
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
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > limits.HTTP_HEAD_BYTES:
            self._refuse_head()
        elif not self._has_head:  # otherwise it is a trailer, which we ignore
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True
        parser = self._parser
        if not self.takes_requests or parser is None:
            return
        version = parser.get_http_version()
        method = parser.get_method().decode("latin-1")
        raw_path, _, raw_query = self._target().partition(b"?")
        path = raw_path.decode("latin-1")
        closes = not parser.should_keep_alive() or method == "CONNECT"
        self._asked = asked = PendingRequest(path, method == "HEAD", version != "1.1", closes)
        self._body_limit = limits.HTTP_BODY_BYTES
        parts = _NO_PARTS
        try:
            declared_bytes = self._check_head(version)
            found = self._place.router.find(raw_path)
            route = None if found is None else found.routes.get(method)
            if route is not None and route.changes:
                self._check_maker()
        except (HttpFailure, InvalidRequest) as error:
            self._refuse(failure_of(error, path))
            return
        if found is None or route is None:
            asked.refusal = _without_route(method, path, found)
        else:
            asked.route = route
            parts = found.parts
            self._body_limit = route.body_bytes
        if declared_bytes > self._body_limit:
            self._refuse_body()
            return
        place = self._place
        asked.request = Request(
            place.broker, self._caller, method, path, parts, raw_query, self._headers, b"", place
        )
        if route is not None and not closes and not asked.is_old:
            self._made = KnownHead(route, method, path, parts, raw_query, {}, declared_bytes)

    def on_body(self, body: bytes) -> None:
        asked = self._asked
        if not self.takes_requests or asked is None:
            return
        self._body_bytes = so_far = self._body_bytes + len(body)
        if so_far > self._body_limit:
            self._refuse_body()
        elif asked.route is not None:
            if not self._body:
                self._body = body
            elif isinstance(self._body, bytes):
                self._body = bytearray(self._body) + body
            else:
                self._body += body
            if so_far > limits.HTTP_UNRESERVED_BYTES and not self.reserve(asked, so_far):
                self.refuse(503, "limit_reached", "too many large bodies are on their way")

    def on_message_complete(self) -> None:
        self.is_coming = False
        asked = self._asked
        if not self.takes_requests or asked is None:
            return
        assert asked.request is not None, "a head comes before its end"
        self._asked = None
        self.wants_continue = False
        if self._body:
            asked.request.body = bytes(self._body)
            self._body = b""
        self._body_bytes = 0
        self.takes_requests = not asked.closes
        self._deliver(asked)

    # --- internal ----------------------------------------------------------------------------

    def _parse(self, data: bytes | memoryview) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The request is complete. A request for another protocol may be answered in HTTP. This
            # parser has ended, so a new one parses the following bytes.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[upgrade.args[0] :]
            if len(rest) and self.takes_requests:
                self._parse(rest)
        except httptools.HttpParserCallbackError as error:
            log.error("a request of %s failed", self._caller.address, exc_info=error.__context__)
            self.refuse(500, "error", "the broker has failed at this: see its log")
        except httptools.HttpParserInvalidMethodError:
            self._refuse_nonsense(data, 501, "unknown_method", "no method of HTTP begins so")
        except httptools.HttpParserError as error:
            self._refuse_nonsense(data, 400, "protocol_error", f"this is no HTTP: {error}")

    def _refuse_nonsense(
        self, data: bytes | memoryview, status: int, code: str, message: str
    ) -> None:
        """Refuse bytes that are not HTTP; log the protocol if it is another known one."""
        protocol = protocol_of(bytes(data[: serving_limits.OPENING_BYTES]))
        if protocol is not None and protocol is not WireProtocol.HTTP and self.takes_requests:
            mistaken = self._place.mistaken
            reason = mistaken.report(self._caller.address, protocol, time.monotonic())
            message = f"{message}: {reason}"
        self.refuse(status, code, message)

    def _count(self, fed_bytes: int) -> None:
        """Bound the incomplete parts, such as a header's value, that the parser buffers without a
        callback.
        """
        self._fed_bytes += fed_bytes
        beside_body_bytes = self._fed_bytes - self._body_bytes
        if beside_body_bytes > limits.HTTP_HEAD_BYTES + _FRAMING * self._body_bytes:
            self._refuse_head()

    def _target(self) -> bytes:
        """Return the path and query of the request; a proxy's client sends a whole URL."""
        url = self._url
        if url.startswith(b"/") or url == b"*":
            return url
        try:
            parsed = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            return b""
        query = b"?" + parsed.query if parsed.query else b""
        return (parsed.path or b"/") + query

    def _check_head(self, version: str) -> int:
        """Check the head; return the declared length of the body, or 0 without one. Raise
        HttpFailure for a request that this server does not accept.
        """
        if version not in _VERSIONS:
            raise HttpFailure(505, "protocol_error", "HTTP/1.1 and HTTP/1.0 are spoken here")
        host: bytes | None = None
        origin: bytes | None = None
        declared_bytes = 0
        for name, value in self._headers:
            if name == b"host":
                if host is not None:
                    raise HttpFailure(400, "protocol_error", "the request has two Host headers")
                host = value
            elif name == b"content-length":
                declared_bytes = int(value)  # the parser has refused what is no number
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    raise HttpFailure(417, "invalid_request", "only 100-continue can be expected")
                self.wants_continue = version == "1.1"
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site" and is_foreign_site(value):
                raise _foreign("another site", f"Sec-Fetch-Site is {_shown(value)}")
        if host is None and version == "1.1":
            raise HttpFailure(400, "protocol_error", "the request has no Host header")
        self._host = host or b""
        if host is not None and host != self._known_host:
            self._check_host(host)
        if origin is not None and not self._place.names.is_own_origin(origin, self._host):
            raise _foreign("another origin", f"Origin is {_shown(origin)}")
        return declared_bytes

    def _check_host(self, host: bytes) -> None:
        if not self._place.names.serves(host, self._is_loopback):
            raise _misdirected(host)
        self._known_host = host

    def _check_maker(self) -> None:
        """Raise HttpFailure if a page of another origin may have made a request that changes
        something.
        """
        if is_made_by_another_page(self._headers, self._host, self._place.names):
            referer = dict(self._headers).get(b"referer")
            shown = "nothing says which" if referer is None else f"Referer is {_shown(referer)}"
            raise _foreign("another origin", shown)

    def _refuse_head(self) -> None:
        message = f"line and headers of a request may have {limits.HTTP_HEAD_BYTES} bytes"
        self.refuse(431, "limit_reached", message)

    def _refuse_body(self) -> None:
        message = f"the body is larger than {self._body_limit} bytes"
        self.refuse(413, "record_too_large", message)

    def _refuse(self, response: Response) -> None:
        if not self.takes_requests:
            return
        asked = self._asked or PendingRequest("/", is_head=False, is_old=False, closes=True)
        self.release(asked)
        self._asked = None
        self._body = b""
        self.takes_requests = False
        self.wants_continue = False
        asked.closes = True
        asked.refusal = response
        self._deliver(asked)


def _without_route(method: str, path: str, found: Found | None) -> Response:
    """Return the response for a path or method without a route. OPTIONS lists the methods."""
    if found is not None:
        allow = (("allow", found.allowed),)
        if method == "OPTIONS":
            return Response(204, headers=allow)
        message = f"{path[:200]} answers {found.allowed}, not {method}"
        return failure(405, "unknown_method", message, path, allow)
    if path == "*" and method == "OPTIONS":
        return Response(204)
    message = f"there is nothing at {path[:200]}; /v1/docs lists what there is"
    return failure(404, "unknown_route", message, path)


def _foreign(where: str, shown: str) -> HttpFailure:
    message = (
        f"a web page of {where} made this request ({shown}): that is refused. If the page is this "
        "broker's own under another name, add the name to the setting http_names"
    )
    return HttpFailure(403, "not_allowed", message)


def _misdirected(host: bytes) -> HttpFailure:
    name = _shown(host_name(host).encode("latin-1"))
    message = (
        f"this broker does not go by the name {name}: use localhost or an IP address, or add the "
        f"name to the setting http_names (--http-names {name}, or QUACKMQ_HTTP_NAMES)"
    )
    return HttpFailure(421, "not_allowed", message)


def _shown(value: bytes) -> str:
    """Return a header's value for a message: shortened, without unprintable characters."""
    text = value[:_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return "".join(char if char.isprintable() else "?" for char in text)
