"""The unreliable network knows what a request is, and does what it says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

from tests.pubsub.network import (
    UnreliableProxy,
    Weather,
    everything,
    last_http_request,
    last_produce_request,
)

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nContent-Length: 5\r\n\r\nquack"


def test_the_last_whole_http_request_is_found() -> None:
    assert last_http_request(GET + POST) == POST
    assert last_http_request(POST + GET) == GET
    assert last_http_request(GET + POST[:-1]) == GET
    assert last_http_request(GET[:-1]) == b""


def test_the_last_kafka_request_is_said_again_if_it_is_a_produce() -> None:
    produce = b"\0\0\0\x08\0\0\0\x09body"
    fetch = b"\0\0\0\x08\0\1\0\x09body"
    assert last_produce_request(fetch + produce) == produce
    assert last_produce_request(produce + fetch) == b""
    assert last_produce_request(produce + fetch[:-1]) == produce
    assert last_produce_request(produce[:3]) == b""


def test_one_seed_draws_the_same_again_and_a_calm_draws_nothing() -> None:
    shares = {"rain": 0.3, "hail": 0.3}
    one, other = Weather(1), Weather(1)
    assert {one.draw(shares) for _ in range(100)} == {""}
    one = Weather(1)
    one.rise()
    other.rise()
    drawn = [one.draw(shares) for _ in range(100)]
    assert drawn == [other.draw(shares) for _ in range(100)]
    assert set(drawn) == {"", "rain", "hail"}
    one.calm()
    assert {one.draw(shares) for _ in range(100)} == {""}
    assert sum(one.faults.values()) == sum(map(bool, drawn))


class Always(Weather):
    """One fault, whenever it can be."""

    def __init__(self, fault: str) -> None:
        super().__init__(0)
        self._fault = fault

    def draw(self, faults: Mapping[str, float]) -> str:
        return self._fault if self._fault in faults else ""

    def some(self, most: float) -> float:
        return 0.0


class Echo:
    """A server that answers with what it was sent, and counts its connections' bytes."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.came = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                data = client.recv(100)
                with self.came:
                    self.heard.append(data)
                    self.came.notify_all()
                if data:
                    client.sendall(data)


def ask(address: str, request: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as asking:
        asking.sendall(request)
        return asking.recv(100)


def test_a_lost_answer_was_heard_and_leaves_a_cut_connection() -> None:
    with Echo() as echo, UnreliableProxy(echo.address, Always("answers lost"), everything) as proxy:
        assert ask(proxy.address, b"quack") == b""
        assert echo.heard == [b"quack"]


def test_a_torn_request_is_heard_in_part() -> None:
    weather = Always("requests torn")
    with Echo() as echo, UnreliableProxy(echo.address, weather, everything) as proxy:
        assert ask(proxy.address, b"quackquack") in (b"", b"quack")
        with echo.came:
            assert echo.came.wait_for(lambda: echo.heard, 10)
        assert echo.heard == [b"quack"]


def test_a_doubled_request_is_heard_twice_and_answered_once() -> None:
    weather = Always("requests doubled")
    with Echo() as echo, UnreliableProxy(echo.address, weather, everything) as proxy:
        assert ask(proxy.address, b"quack") == b"quack"
        with echo.came:
            assert echo.came.wait_for(lambda: len(echo.heard) == 2, 10)
        assert echo.heard == [b"quack", b"quack"]
