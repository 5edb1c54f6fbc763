"""Cache of request heads, byte for byte, with their parsed form.

A client sends the same head again and again; at most the length changes. Parsing a head costs more
than all other work for a small request, and gives the same result each time. So parsed heads are
cached. A cached head is not parsed again if it arrives in one piece with its whole body.

Only simple heads are cached: HTTP/1.1, a known route, accepted, a declared length or no body, and a
connection that stays open. All other heads go through the parser. So do heads that arrive in pieces
or with further bytes behind the body. Call it only from the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from quackmq.protocols.http import limits
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.types import parse_headers

#: Headers that change the meaning of a request beyond its route and its length.
_SPECIAL: Final = frozenset({b"transfer-encoding", b"upgrade", b"expect"})


class ParsedHead(NamedTuple):
    """A parsed head: the fields of `Request`, and the length of the body."""

    route: Route
    method: str
    path: str
    path_parameters: Mapping[str, str]
    raw_query: bytes
    headers: Mapping[str, str]
    body_bytes: int


class RequestHeadCache:
    """Cache parsed heads per server, separately for loopback connections. The allowed Host names
    differ there, so a head that is accepted elsewhere may be refused on loopback.
    """

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: tuple[dict[bytes, ParsedHead], dict[bytes, ParsedHead]] = ({}, {})

    def heads_for(self, is_loopback: bool) -> Mapping[bytes, ParsedHead]:
        """Return a live view of the cached heads of loopback, or of other connections."""
        return self._heads[is_loopback]

    def store(
        self,
        is_loopback: bool,
        head: bytes,
        parsed: ParsedHead,
        raw_headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Cache a parsed head if it is simple and small; drop the oldest if the cache is full."""
        if len(head) > limits.HTTP_CACHED_HEAD_BYTES:
            return
        # A connection parses more bytes than this in pieces, so this head would never be found.
        if parsed.body_bytes > limits.HTTP_PARSED_BYTES:
            return
        if any(name in _SPECIAL for name, _ in raw_headers):
            return
        heads = self._heads[is_loopback]
        if len(heads) >= limits.HTTP_CACHED_HEADS:
            # A dict keeps the order of insertion, so the first head is the oldest.
            del heads[next(iter(heads))]
        heads[head] = parsed._replace(headers=parse_headers(raw_headers))
