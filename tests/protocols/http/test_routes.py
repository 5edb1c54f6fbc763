"""Routes are found by their patterns, parameters taken apart: pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.errors import InvalidRequest
from quackmq.protocols.http import queue_api as queue
from quackmq.protocols.http import v1
from quackmq.protocols.http.router import Route, Router
from quackmq.protocols.http.types import Request, Response, parse_headers, parse_query
from tests.kit.tables import each


async def handler(request: Request) -> Response:
    return Response(200)


ROUTER = Router(
    Route(method, pattern, handler)
    for method, pattern in [
        ("GET", "/topics"),
        ("POST", "/topics"),
        ("GET", "/topics/{topic}"),
        ("GET", "/topics/all"),
        ("GET", "/topics/{topic}/messages/{id}"),
        ("DELETE", "/topics/{topic}/messages"),
    ]
)


@each(
    ("path", "parts"),
    [
        (b"/topics", {}),
        (b"/topics/all", {}),
        (b"/topics/ducks", {"topic": "ducks"}),
        (b"/topics/a%2Fb", {"topic": "a/b"}),
        (b"/topics/gr%C3%BCn", {"topic": "grün"}),
        (b"/topics/a+b", {"topic": "a+b"}),
        (b"/topics/all/messages/7", {"topic": "all", "id": "7"}),
        (b"/topics/all/messages", {"topic": "all"}),
    ],
)
def test_a_path_is_found_with_its_parts(path: bytes, parts: dict[str, str]) -> None:
    found = ROUTER.find(path)
    assert found is not None
    assert found.path_parameters == parts


@each(
    "path", [b"", b"/", b"topics", b"*", b"/topics/", b"//", b"/topics//messages/1", b"/topics/a/b"]
)
def test_what_is_no_route_is_not_found(path: bytes) -> None:
    assert ROUTER.find(path) is None


def test_what_is_allowed_is_told_with_head_and_options() -> None:
    found = ROUTER.find(b"/topics")
    assert found is not None
    assert found.allowed_methods == "GET, HEAD, OPTIONS, POST"
    deleting = ROUTER.find(b"/topics/x/messages")
    assert deleting is not None
    assert deleting.allowed_methods == "DELETE, OPTIONS"


def test_two_routes_for_one_thing_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        Router([Route("GET", "/a", handler), Route("GET", "/a", handler)])
    with pytest.raises(AssertionError):
        Router([Route("GET", "/{a}", handler), Route("POST", "/{b}", handler)])


def test_the_listeners_own_routes_agree_with_each_other() -> None:
    assert Router((*queue.routes(), *v1.ROUTES)).find(b"/topics") is not None


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_path_is_found_or_not_or_refused(path: bytes) -> None:
    try:
        ROUTER.find(path)
    except InvalidRequest:
        return


def test_a_query_is_taken_apart_as_browsers_put_it_together() -> None:
    assert parse_query(b"") == {}
    assert parse_query(b"a=1&b=&c&&d=x%3Dy+z") == {"a": "1", "b": "", "c": "", "d": "x=y z"}
    with pytest.raises(InvalidRequest):
        parse_query(b"a=1&a=1")


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_query_is_parsed_or_refused(query: bytes) -> None:
    try:
        parse_query(query)
    except InvalidRequest:
        return


def test_headers_that_come_twice_are_joined() -> None:
    assert parse_headers([(b"accept", b"a"), (b"accept", b"b")]) == {"accept": "a, b"}
