"""Heads of requests that have come before, byte for byte, with what was made of them.

A client that stays sends the same head again and again, with another length at the most. To parse
it costs more than all that is done with a small request, and comes to the same each time. So what
came of a head is kept; one that comes again in one piece with its whole body is not parsed.

Only plain ones are kept: by HTTP/1.1, for a route, found to be good, the body's length said or none
there, the connection to stay. All others go through the parser, and so do those that come in
pieces or with more behind them. Who may call: the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from quackmq.protocols.http import limits
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.types import parse_headers

#: What makes a head mean more than where, how and how much.
_SPECIAL: Final = frozenset({b"transfer-encoding", b"upgrade", b"expect"})


class KnownHead(NamedTuple):
    """As `Request` has it, and how long the body is."""

    route: Route
    method: str
    path: str
    parts: Mapping[str, str]
    raw_query: bytes
    headers: Mapping[str, str]
    body_bytes: int


class RequestHeadCache:
    """Of one door. Who came to an address of this machine alone is asked by which name, so heads
    that were good enough for others are not for those."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: tuple[dict[bytes, KnownHead], dict[bytes, KnownHead]] = ({}, {})

    def of(self, is_loopback: bool) -> Mapping[bytes, KnownHead]:
        """A view that follows changes."""
        return self._heads[is_loopback]

    def learn(
        self,
        is_loopback: bool,
        head: bytes,
        made: KnownHead,
        raw_headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        if len(head) > limits.HTTP_KNOWN_HEAD_BYTES or made.body_bytes > limits.HTTP_PARSED_BYTES:
            return
        if any(name in _SPECIAL for name, _ in raw_headers):
            return
        heads = self._heads[is_loopback]
        if len(heads) >= limits.HTTP_KNOWN_HEADS:
            del heads[next(iter(heads))]
        heads[head] = made._replace(headers=parse_headers(raw_headers))
