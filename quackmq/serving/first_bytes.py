"""Recognize the protocol of a connection by its first bytes, and say which port serves it.

Every listener calls this when a peer's first bytes make no sense to it. Then the peer is usually a
client of another listener, a browser or a client that wants TLS. The listener closes the connection
and logs one line that names the protocol and the port to use.

    protocol   first bytes
    ---------- ------------------------------------------------------------------
    TLS        a handshake record: 0x16, then version 3.x
    ZMTP       a greeting: 0xFF, eight bytes, a byte whose lowest bit is 1
    HTTP       a method of HTTP, a space and what it asks for; `Host:`; `HTTP/`
    line       `pub `, `sub `, `topic `, `end`, `terminate`
    Kafka      a size below 256 MiB, an API key and a version, all big-endian

Clients connect again and again, libzmq ten times per second. So `MistakenPeers` logs one line a
minute for each protocol, and counts the others. Pure: the caller passes the clock in. Not
thread-safe: call from the event loop.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from quackmq.serving import limits

log = logging.getLogger(__name__)

#: Only whole methods: somebody may type the line protocol in capitals, as in `PUB ada connect`.
_HTTP: Final = re.compile(
    rb"(GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS|TRACE|PRI) (/|\*|https?://)|CONNECT \S+[.:]"
    rb"|HTTP/|[Hh][Oo][Ss][Tt]:"
)
_LINE: Final = re.compile(rb"(pub|sub|topic) |(end|terminate)\r?\n")
#: Size, API key and version of a Kafka request.
_KAFKA: Final = struct.Struct(">iHH")
_KAFKA_API_KEYS: Final = 128
_KAFKA_VERSIONS: Final = 32
_KAFKA_LEAST_BYTES: Final = 8


class WireProtocol(StrEnum):
    """The protocols that can be recognized; each value is the name for log messages."""

    KAFKA = "the Kafka protocol"
    HTTP = "HTTP"
    ZMTP = "ZMTP (ZeroMQ)"
    LINE = "the line protocol"
    TLS = "TLS"


#: The listeners that serve each protocol. ZMTP has four: the socket's type decides which one.
SERVED_BY: Final[Mapping[WireProtocol, tuple[str, ...]]] = {
    WireProtocol.KAFKA: ("kafka",),
    WireProtocol.HTTP: ("http",),
    WireProtocol.ZMTP: ("zmq", "xsub", "xpub", "proxy"),
    WireProtocol.LINE: ("line",),
    WireProtocol.TLS: (),
}
#: The listeners that serve each type of ZeroMQ socket.
SOCKETS_SERVED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("REQ", "DEALER", "ROUTER"), ("zmq", "proxy")),
    **dict.fromkeys(("PUB", "XPUB"), ("xsub",)),
    **dict.fromkeys(("SUB", "XSUB"), ("xpub",)),
}


def recognize_protocol(opening: bytes) -> WireProtocol | None:
    """Return the protocol that these first bytes of a connection belong to; None if unknown."""
    if opening[:2] == b"\x16\x03":
        return WireProtocol.TLS
    if opening[:1] == b"\xff" and (len(opening) < 10 or opening[9] & 1):
        return WireProtocol.ZMTP
    if _LINE.match(opening):
        return WireProtocol.LINE
    if _HTTP.match(opening):
        return WireProtocol.HTTP
    if len(opening) >= _KAFKA.size and opening[0] < 0x10:
        size, api_key, version = _KAFKA.unpack_from(opening)
        if size >= _KAFKA_LEAST_BYTES and api_key < _KAFKA_API_KEYS and version < _KAFKA_VERSIONS:
            return WireProtocol.KAFKA
    return None


def describe_ports(names: tuple[str, ...], addresses: Mapping[str, tuple[str, int]]) -> str:
    """Return a phrase that names the ports of these listeners. `addresses` are those of the open
    ones."""
    ports = [f"{addresses[name][1]} ({name})" for name in names if name in addresses]
    if ports:
        return f"use port {' or '.join(ports)}"
    options = " or ".join(f"--{name}" for name in names)
    return f"no listener for it is on TCP: {options} opens one"


class MistakenPeers:
    """Log the connections to one listener that speak another protocol.

    `addresses` maps the name of each open listener to its host and port; it may change later.
    """

    def __init__(self, listener: str, addresses: Mapping[str, tuple[str, int]]) -> None:
        self._listener = listener
        self._addresses = addresses
        #: The time of the last log line for each kind of mistake, and the number of mistakes since.
        self._logged: dict[str, tuple[float, int]] = {}

    def report(self, address: str, protocol: WireProtocol, now: float) -> str:
        """Log that this peer spoke another protocol; return the sentence. `now` is in seconds."""
        if protocol is WireProtocol.TLS:
            advice = "no listener of this broker speaks TLS: connect without it"
        else:
            advice = describe_ports(SERVED_BY[protocol], self._addresses)
        return self._log(address, f"it speaks {protocol}; {advice}", protocol, now)

    def report_socket(self, address: str, reason: str, socket_type: str, now: float) -> str:
        """Log that this listener does not serve the peer's type of ZeroMQ socket. Return the logged
        sentence: `reason` and the port that serves this type.
        """
        names = SOCKETS_SERVED_BY.get(socket_type)
        if names is not None:
            reason = f"{reason}; {describe_ports(names, self._addresses)}"
        return self._log(address, reason, "socket", now)

    def _log(self, address: str, reason: str, kind: str, now: float) -> str:
        """Log why a peer was disconnected, and return the reason. Warn at most once per interval
        for each kind of mistake."""
        logged_at, unlogged = self._logged.get(kind, (None, 0))
        if logged_at is not None and (now - logged_at) * 1000 < limits.MISTAKEN_LOG_MS:
            self._logged[kind] = logged_at, unlogged + 1
            log.debug("%s disconnected from the %s listener: %s", address, self._listener, reason)
            return reason
        more = f" ({unlogged} more since the last such line)" if unlogged else ""
        log.warning(
            "%s disconnected from the %s listener: %s%s", address, self._listener, reason, more
        )
        self._logged[kind] = now, 0
        return reason
