"""Render status lines and headers as bytes.

A header may contain a value from a published message, for example its content type. Control
characters are replaced here, so a publisher cannot add a header to a response.
"""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from quackmq.protocols.http.types import JSON, PROBLEM, Response, Stream

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

_CLOSE: Final = b"connection: close\r\n"
_KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: Responses with these statuses have neither a body nor a length.
_BODILESS_STATUSES: Final = frozenset({204, 304})
#: Responses of these types end with a newline.
_NEWLINE_TYPES: Final = frozenset({JSON, PROBLEM})


class Date:
    """The Date header. It is rendered at most once per second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        """Return the header line for the present second."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


def render_response(
    response: Response, date: bytes, closes_connection: bool, is_http_1_0: bool, is_head: bool
) -> bytes:
    """Return a whole response. With HTTP/1.0, keep-alive must be announced."""
    status, body, content_type, headers = response
    # A connection of HTTP/1.1 stays open without this header.
    stays_open = _KEEP_ALIVE if is_http_1_0 else b""
    connection = _CLOSE if closes_connection else stays_open
    extra_headers = render_headers(headers) if headers else b""
    start = _render_start(status, content_type)
    if status in _BODILESS_STATUSES:
        return b"".join((start, date, connection, extra_headers, b"\r\n"))
    # The newline keeps a terminal's prompt off the last line of JSON.
    end = b"\n" if content_type in _NEWLINE_TYPES else b""
    length = b"content-length: %d\r\n\r\n" % (len(body) + len(end))
    # The response to HEAD has the length of the body, but no body.
    if is_head:
        body = end = b""
    return b"".join((start, date, connection, extra_headers, length, body, end))


def render_stream_head(
    stream: Stream, date: bytes, closes_connection: bool, is_chunked: bool
) -> bytes:
    """Return the head of a stream. If it is not chunked and has no length, the end of the
    connection ends the body.
    """
    pieces = [
        _render_start(stream.status, stream.content_type),
        date,
        render_headers(stream.headers),
    ]
    if closes_connection:
        pieces.append(_CLOSE)
    if is_chunked:
        pieces.append(b"transfer-encoding: chunked\r\n")
    elif stream.length is not None:
        pieces.append(b"content-length: %d\r\n" % stream.length)
    return b"".join((*pieces, b"\r\n"))


def render_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def render_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    return b"".join(
        b"%b: %b\r\n" % (_encode_header_text(name), _encode_header_text(value))
        for name, value in headers
    )


@lru_cache(maxsize=256)
def _render_start(status: int, content_type: str) -> bytes:
    """Return the status line, and the content type if the response has one."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        # Python does not know this status. HTTP allows an empty phrase.
        phrase = ""
    line = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    if status in _BODILESS_STATUSES or not content_type:
        return line
    return line + b"content-type: %b\r\n" % _encode_header_text(content_type)


def _encode_header_text(text: str) -> bytes:
    return _CONTROLS.sub(b" ", text.encode("latin-1", "replace"))
