"""Bytes become the same requests however they are cut into pieces. Pure: no socket."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.broker import Broker, Caller
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.parser import PendingRequest, Receiver
from quackmq.protocols.http.server import HttpServer
from quackmq.stores.memory import MemoryStore
from tests.protocols.http.handlers import Handlers
from tests.protocols.http.peers import request

SENT = (
    request("POST", "/echo?a=b", b"quack"),
    request("GET", "/nowhere"),
    request("POST", "/echo", transfer_encoding="chunked") + b"3\r\nqua\r\n2\r\nck\r\n0\r\n\r\n",
    request("POST", "/small", b"x" * 1_000),
    request("DELETE", "/echo", b"ignored"),
    request("GET", "/echo", connection="upgrade", upgrade="h2c"),
    request("GET", "/echo", version="1.0", connection="keep-alive"),
)
LAST = (
    request("GET", "/echo", connection="close") + b"what comes behind is nobody's",
    request("POST", "/small", b"x" * 1_001),
    request("GET", "/echo", host=""),
    b"nonsense\r\n",
)


class Got(NamedTuple):
    path: str
    query: dict[str, str]
    body: bytes
    status: int | None
    closes: bool
    is_http_1_0: bool


def new_listener() -> HttpServer:
    return HttpServer(Broker(MemoryStore()), "127.0.0.1", 0, routes=Handlers().routes())


def received(data: bytes, cuts: list[int], listener: HttpServer | None = None) -> list[Got]:
    """What comes of bytes that are cut at these places."""
    got: list[Got] = []

    def deliver(asked: PendingRequest) -> None:
        request = asked.request
        got.append(
            Got(
                asked.path,
                {} if request is None else dict(request.query),
                b"" if request is None else request.body,
                None if asked.refusal is None else asked.refusal.status,
                asked.closes_connection,
                asked.is_http_1_0,
            )
        )

    listener = listener or new_listener()
    receiver = Receiver(listener, Caller(), True, deliver)
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    for begin, end in zip(places, places[1:], strict=False):
        receiver.feed(data[begin:end])
    receiver.close()
    assert listener.receive_budget.used_bytes == 0
    return got


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(SENT), max_size=6),
    st.sampled_from((b"", *LAST)),
    st.lists(st.integers(min_value=0, max_value=10_000), max_size=30),
)
def test_the_same_bytes_are_the_same_requests_however_they_are_cut(
    sent: list[bytes], last: bytes, cuts: list[int]
) -> None:
    data = b"".join(sent) + last
    whole = received(data, [])
    assert received(data, cuts) == whole
    assert len(whole) == len(sent) + bool(last)
    assert [got.closes for got in whole] == [False] * len(sent) + [True] * bool(last)


def test_every_cut_into_two_pieces_gives_the_same() -> None:
    data = b"".join(SENT) + LAST[0]
    whole = received(data, [])
    assert [got.status for got in whole] == [None, 404, None, None, 405, None, None, None]
    for cut in range(len(data)):
        assert received(data, [cut]) == whole


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(min_value=0, max_value=300), max_size=5))
def test_any_bytes_are_requests_or_refused_once(data: bytes, cuts: list[int]) -> None:
    got = received(data, cuts)
    assert [one.closes for one in got[:-1]] == [False] * len(got[:-1])


@settings(deadline=None)
@given(
    st.sampled_from(SENT),
    st.integers(min_value=0, max_value=200),
    st.binary(min_size=1, max_size=3),
    st.lists(st.integers(min_value=0, max_value=300), max_size=5),
)
def test_a_spoilt_request_is_a_request_or_refused_once(
    sound: bytes, place: int, spoilt: bytes, cuts: list[int]
) -> None:
    at = place % len(sound)
    got = received(sound[:at] + spoilt + sound[at + len(spoilt) :], cuts)
    assert len([one for one in got if one.closes]) <= 1


def known(listener: HttpServer) -> int:
    return len(listener.head_cache.heads_for(is_loopback=True))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(SENT), min_size=1, max_size=8),
    st.sampled_from((b"", *LAST)),
    st.lists(st.integers(min_value=0, max_value=10_000), max_size=5),
)
def test_a_head_that_is_known_makes_the_same_request(
    sent: list[bytes], last: bytes, cuts: list[int]
) -> None:
    """Each comes in one piece, as clients send them, or cut; to a listener that has seen them
    all."""
    listener = new_listener()
    for each in SENT:
        received(each, [], listener)
    assert known(listener) == 2, "the only plain ones that are for a route"
    data = b"".join(sent) + last
    ends = [len(b"".join(sent[: number + 1])) for number in range(len(sent))]
    assert received(data, ends, listener) == received(data, [])
    assert received(data, ends + cuts, listener) == received(data, [])


def test_a_body_of_another_length_does_not_belong_to_a_known_head() -> None:
    listener = new_listener()
    whole = request("POST", "/echo", b"quack")
    received(whole, [], listener)
    assert known(listener) == 1
    assert [got.body for got in received(whole[:-1], [], listener)] == []
    assert [got.body for got in received(whole * 2, [len(whole) - 1], listener)] == [b"quack"] * 2
    assert [got.status for got in received(whole + b"xx", [], listener)] == [None, 501]


def test_what_a_loopback_asks_is_not_known_from_elsewhere() -> None:
    listener = new_listener()
    foreign = request("POST", "/echo", b"quack", host="elsewhere")
    receiver = Receiver(listener, Caller(), False, lambda asked: None)
    receiver.feed(foreign)
    receiver.close()
    assert len(listener.head_cache.heads_for(is_loopback=False)) == 1
    assert [got.status for got in received(foreign, [], listener)] == [421]


def test_no_more_heads_are_known_than_there_is_room_for() -> None:
    listener = new_listener()
    for number in range(http_limits.HTTP_CACHED_HEADS + 10):
        received(request("GET", f"/echo?n={number}"), [], listener)
    assert known(listener) == http_limits.HTTP_CACHED_HEADS
    received(request("GET", "/echo?n=" + "9" * http_limits.HTTP_CACHED_HEAD_BYTES), [], listener)
    assert all(
        len(head) <= http_limits.HTTP_CACHED_HEAD_BYTES
        for head in listener.head_cache.heads_for(is_loopback=True)
    )


def test_of_two_that_come_together_the_second_is_not_known_by_the_head_of_the_first() -> None:
    """Not even where the second's head is as long as the body that it has yet to send."""
    listener = new_listener()
    first = request("GET", "/echo?first=1")
    head = (
        request("POST", "/echo?second=" + "1" * 99, b"x" * 100).partition(b"\r\n\r\n")[0]
        + b"\r\n\r\n"
    )
    body = b"x" * len(head)
    head = head.replace(b"100", str(len(body)).encode())
    assert len(head) == len(body)
    together = first + head + body
    assert [each.body for each in received(together, [len(first + head)], listener)] == [b"", body]
    assert [each.query for each in received(first + head, [], listener)] == [{"first": "1"}]
