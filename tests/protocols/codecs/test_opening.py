"""The first bytes of a connection tell which protocol it speaks, and who comes to the wrong port is
told the right one, once a minute."""

from __future__ import annotations

import logging
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.protocols.zmq.codec.pubsub import PUBLISHING_SOCKETS, SUBSCRIBING_SOCKETS
from quackmq.protocols.zmq.codec.zmtp import GREETING, REQUESTING_SOCKETS
from quackmq.serving import limits as serving_limits
from quackmq.serving.first_bytes import (
    SERVED_BY,
    SOCKETS_SERVED_BY,
    MistakenPeers,
    WireProtocol,
    recognize_protocol,
)
from tests.kit.tables import each

LISTENERS = {
    "kafka": ("127.0.0.1", 9092),
    "http": ("127.0.0.1", 8002),
    "zmq": ("127.0.0.1", 5555),
    "xpub": ("127.0.0.1", 5557),
    "proxy": ("127.0.0.1", 5558),
}


def kafka(size: int = 40, api_key: int = 18, version: int = 4) -> bytes:
    return struct.pack(">ihhih", size, api_key, version, 1, 0)


@each(
    ("opening", "protocol"),
    [
        (b"GET / HTTP/1.1\r\n", WireProtocol.HTTP),
        (b"POST /v1/topics HTTP/1.1\r\n", WireProtocol.HTTP),
        (b"OPTIONS * HTTP/1.1", WireProtocol.HTTP),
        (b"CONNECT evil.example:443 HTTP/1.1", WireProtocol.HTTP),
        (b"PRI * HTTP/2.0\r\n\r\nSM", WireProtocol.HTTP),
        (b"GET http://proxied.example/ HTTP/1.1", WireProtocol.HTTP),
        (b"HTTP/1.1 400 Bad Request", WireProtocol.HTTP),
        (b"Host: localhost", WireProtocol.HTTP),
        (b"host: localhost", WireProtocol.HTTP),
        (b"pub 7 connect\n", WireProtocol.LINE),
        (b"sub daisy connect\r\n", WireProtocol.LINE),
        (b"topic 1 [a]\n", WireProtocol.LINE),
        (b"end\n", WireProtocol.LINE),
        (b"terminate\r\n", WireProtocol.LINE),
        (GREETING, WireProtocol.ZMTP),
        (b"\xff" + bytes(7) + b"\x01\x7f", WireProtocol.ZMTP),
        (b"\xff", WireProtocol.ZMTP),
        (b"\x16\x03\x01\x02\x00\x01", WireProtocol.TLS),
        (b"\x16\x03\x03", WireProtocol.TLS),
        (kafka(), WireProtocol.KAFKA),
        (kafka(api_key=0, version=9, size=200_000_000), WireProtocol.KAFKA),
        (kafka(api_key=3, version=12), WireProtocol.KAFKA),
        (b"", None),
        (b"hello\n", None),
        (b"GET", None),
        (b"PUB a connect\n", None),
        (b"SUB /a connect\n", None),
        (b"TOPIC 1 [a]\n", None),
        (b"PUT a connect\n", None),
        (b"CONNECT a\n", None),
        (b"quack quack", None),
        (b"ended\n", None),
        (b"\xff" + bytes(8) + b"\x7e", None),
        (kafka()[:7], None),
        (kafka(size=4), None),
        (kafka(size=-1), None),
        (kafka(api_key=500), None),
        (kafka(version=99), None),
    ],
)
def test_a_protocol_is_known_by_its_first_bytes(
    opening: bytes, protocol: WireProtocol | None
) -> None:
    assert recognize_protocol(opening[: serving_limits.OPENING_BYTES]) is protocol


@given(st.binary(max_size=serving_limits.OPENING_BYTES))
def test_any_first_bytes_are_of_one_protocol_or_of_none(opening: bytes) -> None:
    assert recognize_protocol(opening) in {None, *WireProtocol}


def test_every_protocol_and_every_served_socket_has_its_listeners() -> None:
    assert set(SERVED_BY) == set(WireProtocol)
    assert set(SOCKETS_SERVED_BY) == {
        *REQUESTING_SOCKETS,
        *PUBLISHING_SOCKETS,
        *SUBSCRIBING_SOCKETS,
    }


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        (WireProtocol.HTTP, "it speaks HTTP; use port 8002 (http)"),
        (WireProtocol.KAFKA, "it speaks the Kafka protocol; use port 9092 (kafka)"),
        (
            WireProtocol.ZMTP,
            "it speaks ZMTP (ZeroMQ); use port 5555 (zmq) or 5557 (xpub) or 5558 (proxy)",
        ),
        (
            WireProtocol.LINE,
            "it speaks the line protocol; no listener for it is on TCP: --line opens one",
        ),
        (
            WireProtocol.TLS,
            "it speaks TLS; no listener of this broker speaks TLS: connect without it",
        ),
    ],
)
def test_a_peer_is_told_the_port_to_use(
    protocol: WireProtocol, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert MistakenPeers("line", LISTENERS).report("1.2.3.4:5", protocol, now=0.0) == said
    assert caplog.messages == [f"1.2.3.4:5 disconnected from the line listener: {said}"]


def test_a_listener_that_opens_later_is_known_too() -> None:
    listeners: dict[str, tuple[str, int]] = {}
    mistaken = MistakenPeers("kafka", listeners)
    listeners["line"] = ("127.0.0.1", 5550)
    assert "use port 5550 (line)" in mistaken.report("a", WireProtocol.LINE, now=0.0)


def test_one_line_a_minute_is_logged_for_each_protocol_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mistaken = MistakenPeers("kafka", LISTENERS)
    minute = serving_limits.MISTAKEN_LOG_MS / 1000

    def logged(now: float, protocol: WireProtocol = WireProtocol.HTTP) -> list[str]:
        caplog.clear()
        mistaken.report("a", protocol, now)
        return [each.message for each in caplog.records if each.levelno >= logging.WARNING]

    assert len(logged(100.0)) == 1
    assert logged(100.0) == [] and logged(100.0 + minute - 0.001) == []
    assert len(logged(100.0, WireProtocol.TLS)) == 1, "another protocol is other news"
    (line,) = logged(100.0 + minute)
    assert line.endswith("(2 more since the last such line)")
    (line,) = logged(100.0 + 2 * minute)
    assert "more since" not in line


@pytest.mark.parametrize(
    ("socket_type", "said"),
    [
        ("SUB", "not here; use port 5557 (xpub)"),
        ("PUB", "not here; no listener for it is on TCP: --xsub opens one"),
        ("REQ", "not here; use port 5555 (zmq) or 5558 (proxy)"),
        ("PAIR", "not here"),
    ],
)
def test_a_zeromq_socket_of_another_type_is_told_its_port(socket_type: str, said: str) -> None:
    mistaken = MistakenPeers("zmq", LISTENERS)
    assert mistaken.report_socket("a", "not here", socket_type, now=0.0) == said
