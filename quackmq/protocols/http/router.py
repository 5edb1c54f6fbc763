"""Find the handler of a request by its method and path.

A pattern is a path of segments. A segment is literal, or a name in braces that matches any one
segment. A percent-encoded slash stays inside its segment. A literal segment is preferred to a named
one. A GET route also answers HEAD, unless the GET changes something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Handler, percent_decode

_NO_PARAMETERS: Final[Mapping[str, str]] = {}


class Route(NamedTuple):
    """A handler with its method, its pattern and its options.

    - `body_bytes`: the largest accepted body.
    - `answers_head`: HEAD may use this GET route too.
    - `may_wait`: the handler may wait for new data, so it is cancelled when the server closes. A
      Stream is always ended then.
    - `is_writing_get`: this GET changes something, as the queue's document demands.
    """

    method: str
    pattern: str
    handler: Handler
    body_bytes: int = limits.HTTP_BODY_BYTES
    answers_head: bool = True
    may_wait: bool = False
    is_writing_get: bool = False

    @property
    def is_write(self) -> bool:
        """Whether a request to this route changes something."""
        return self.method != "GET" or self.is_writing_get


class RouteMatch(NamedTuple):
    """The routes at a path by method, and the values of the path's named segments."""

    routes: Mapping[str, Route]
    path_parameters: Mapping[str, str]

    @property
    def allowed_methods(self) -> str:
        """The value of the Allow header."""
        return ", ".join(sorted({*self.routes, "OPTIONS"}))


class Router:
    """A fixed table of routes, built once."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[bytes, RouteMatch] = {}
        self._root = _Node()
        for route in routes:
            self._add(route)

    def find(self, raw_path: bytes) -> RouteMatch | None:
        """Return the routes at a raw path, or None; raise InvalidRequest if it is not UTF-8."""
        match = self._exact.get(raw_path)
        if match is not None:
            return match
        if not raw_path.startswith(b"/"):
            return None
        segments = [percent_decode(segment, "the path") for segment in raw_path[1:].split(b"/")]
        values: list[str] = []
        node = _walk(self._root, segments, values)
        if node is None:
            return None
        return RouteMatch(node.routes, dict(zip(node.names, values, strict=True)))

    def _add(self, route: Route) -> None:
        """Add a route to the tree. A pattern without named segments also goes into `_exact`."""
        node = self._root
        names: list[str] = []
        for segment in route.pattern[1:].split("/"):
            if segment.startswith("{"):
                names.append(segment[1:-1])
                node.named = node.named or _Node()
                node = node.named
            else:
                node = node.literal.setdefault(segment, _Node())
        assert not node.routes or node.names == names, f"two names for a segment: {route.pattern}"
        assert route.method not in node.routes, f"{route.method} {route.pattern} is a duplicate"
        node.names = names
        node.routes[route.method] = route
        if route.method == "GET" and route.answers_head:
            node.routes["HEAD"] = route
        if not names:
            self._exact[route.pattern.encode()] = RouteMatch(node.routes, _NO_PARAMETERS)


class _Node:
    """A position in the tree of patterns: the routes that end here, and the next segments."""

    __slots__ = ("literal", "named", "names", "routes")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.named: _Node | None = None
        self.names: list[str] = []
        self.routes: dict[str, Route] = {}


def _walk(node: _Node, segments: list[str], values: list[str]) -> _Node | None:
    """Return the node with routes at these segments, or None; add named ones to `values`."""
    if not segments:
        return node if node.routes else None
    first, rest = segments[0], segments[1:]
    # Prefer the literal segment. If no route is found behind it, try the named one.
    literal = node.literal.get(first)
    if literal is not None:
        match = _walk(literal, rest, values)
        if match is not None:
            return match
    if node.named is None or not first:
        return None
    values.append(first)
    match = _walk(node.named, rest, values)
    if match is None:
        # This way leads to no route, so its value does not count.
        values.pop()
    return match
