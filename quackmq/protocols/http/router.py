"""Which handler answers what: a table of routes, and finding one by method and path.

A pattern is a path whose segments are literal, or a name in braces that stands for one segment,
whatever it holds: a slash that is percent-encoded stays inside its segment. A literal segment goes
before a named one. HEAD is answered where GET is, unless a route says that looking changes
something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Handler, decode

_NO_PARTS: Final[Mapping[str, str]] = {}


class Route(NamedTuple):
    """`body_bytes` is the largest body that is taken. `safe` tells of a GET that HEAD may be asked
    too; `waits`, that the handler may wait for something to come, and is cancelled where the door
    closes. A Stream ends then in any case. `get_changes` tells of a GET that it changes something,
    as the document of the queue has it."""

    method: str
    pattern: str
    handler: Handler
    body_bytes: int = limits.HTTP_BODY_BYTES
    safe: bool = True
    waits: bool = False
    get_changes: bool = False

    @property
    def changes(self) -> bool:
        """Whether a request to this route changes something."""
        return self.method != "GET" or self.get_changes


class Found(NamedTuple):
    """Everything at a path: its routes by method, and the named parts of the path."""

    routes: Mapping[str, Route]
    parts: Mapping[str, str]

    @property
    def allowed(self) -> str:
        """As the header Allow has it."""
        return ", ".join(sorted({*self.routes, "OPTIONS"}))


class Router:
    """Made once of all routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[bytes, Found] = {}
        self._root = _Node()
        for route in routes:
            self._add(route)

    def find(self, raw_path: bytes) -> Found | None:
        """What is at a path, given as it came; InvalidRequest for one that is not UTF-8."""
        found = self._exact.get(raw_path)
        if found is not None:
            return found
        if not raw_path.startswith(b"/"):
            return None
        segments = [decode(segment, "the path") for segment in raw_path[1:].split(b"/")]
        values: list[str] = []
        node = _walk(self._root, segments, values)
        if node is None:
            return None
        return Found(node.routes, dict(zip(node.names, values, strict=True)))

    def _add(self, route: Route) -> None:
        node = self._root
        names: list[str] = []
        for segment in route.pattern[1:].split("/"):
            if segment.startswith("{"):
                names.append(segment[1:-1])
                node.named = node.named or _Node()
                node = node.named
            else:
                node = node.literal.setdefault(segment, _Node())
        assert not node.routes or node.names == names, f"two names at one place: {route.pattern}"
        assert route.method not in node.routes, f"{route.method} {route.pattern} is there twice"
        node.names = names
        node.routes[route.method] = route
        if route.method == "GET" and route.safe:
            node.routes["HEAD"] = route
        if not names:
            self._exact[route.pattern.encode()] = Found(node.routes, _NO_PARTS)


class _Node:
    __slots__ = ("literal", "named", "names", "routes")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.named: _Node | None = None
        self.names: list[str] = []
        self.routes: dict[str, Route] = {}


def _walk(node: _Node, segments: list[str], values: list[str]) -> _Node | None:
    """The node with routes that these segments lead to; the named ones are added to `values`."""
    if not segments:
        return node if node.routes else None
    first, rest = segments[0], segments[1:]
    literal = node.literal.get(first)
    if literal is not None:
        found = _walk(literal, rest, values)
        if found is not None:
            return found
    if node.named is None or not first:
        return None
    values.append(first)
    found = _walk(node.named, rest, values)
    if found is None:
        values.pop()
    return found
