"""Check that a broker listens at the address.

librdkafka tries to connect forever, and a waiting call ends only with its timeout. To report a
wrong port or a broker that is not running at once, the first call of a client connects itself
before librdkafka does, and sends an ApiVersions request.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from typing import Final

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.deadline import Deadline
from quackmq.errors import InvalidRequest, NoBroker

DEFAULT_PORT: Final = 9092
_EXAMPLE: Final = f"127.0.0.1:{DEFAULT_PORT}"
#: One address of the comma-separated list: [PROTOCOL://]HOST[:PORT], as librdkafka accepts it.
_ADDRESS: Final = re.compile(
    r"(?:(?P<protocol>\w+)://)?(?:\[(?P<v6>.+)\]|(?P<host>[^:/]+))(?::(?P<port>\d+))?"
)
#: librdkafka's protocols; unencrypted connections can be checked here.
_PROTOCOLS: Final = {"plaintext", "ssl", "sasl_plaintext", "sasl_ssl"}
_ENCRYPTED: Final = {"ssl", "sasl_ssl"}
#: Kafka's ApiVersions request, version 0, without a client id, and the start of its response.
_CORRELATION_ID: Final = 0x71756163
_REQUEST: Final = struct.pack(">ihhih", 10, 18, 0, _CORRELATION_ID, -1)
_RESPONSE_START: Final = struct.Struct(">ii")


def check_addresses(addresses: str) -> None:
    """Raise InvalidRequest for addresses that librdkafka could never connect to."""
    for address in _split(addresses):
        match = _ADDRESS.fullmatch(address)
        if match is None or (match["host"] or "").isdigit():
            raise InvalidRequest(f"{address} is not HOST:PORT, as in {_EXAMPLE}")
        if match["protocol"] and match["protocol"].lower() not in _PROTOCOLS:
            raise InvalidRequest(
                f"{address} is not HOST:PORT: leave out {match['protocol']}://, and name the port "
                f"that listens for Kafka clients, as in {_EXAMPLE}"
            )


def wait_for_broker(addresses: str, deadline: Deadline, *, is_encrypted: bool = False) -> None:
    """Return when a broker accepts a connection at one of the addresses, or when an address is
    only slow or unreachable, because librdkafka keeps trying then. Raise NoBroker if all
    addresses refuse (if the caller has set a timeout, only after that time), or if another kind
    of server responds. The latter is not detected on encrypted connections."""
    while True:
        refusals = _find_refusals(addresses, deadline, is_encrypted=is_encrypted)
        if refusals is None:
            return
        if not deadline.is_explicit or deadline.has_passed():
            break
        time.sleep(min(deadline.remaining_s(), limits.CLIENT_PROBE_MS / 1000))
    duration = f" after {deadline.duration_text()}" if deadline.is_explicit else ""
    raise NoBroker(
        f"nothing listens at {addresses}{duration} ({', '.join(refusals)}), and nothing was sent: "
        "start a broker there with `quackmq serve`, or name another one, as in "
        "Client('HOST:PORT') or --broker HOST:PORT"
    )


def _split(addresses: str) -> list[str]:
    return [each for each in map(str.strip, addresses.split(",")) if each]


def _find_refusals(addresses: str, deadline: Deadline, *, is_encrypted: bool) -> list[str] | None:
    """Return why each address refuses, or None if one does not. Raises NoBroker."""
    refusals: list[str] = []
    other_server: NoBroker | None = None
    for address in _split(addresses):
        match = _ADDRESS.fullmatch(address)
        if match is None:
            return None  # librdkafka reports what is wrong with it
        host, port = match["v6"] or match["host"], int(match["port"] or DEFAULT_PORT)
        try:
            timeout_s = max(
                0.001, min(deadline.remaining_s(), shared_limits.CLIENT_CONNECT_MS / 1000)
            )
            with socket.create_connection((host, port), timeout_s) as connection:
                if not is_encrypted and (match["protocol"] or "").lower() not in _ENCRYPTED:
                    _check_broker(connection, address)
            return None
        except NoBroker as error:
            other_server = error
        except ConnectionRefusedError:
            refusals.append("connection refused")
        except socket.gaierror as error:
            refusals.append(f"{host}: {(error.strerror or str(error)).lower()}")
        except (OSError, OverflowError):
            return None  # slow or unreachable at the moment: librdkafka keeps trying
    if other_server is not None:
        raise other_server
    return sorted(set(refusals)) or None


def _check_broker(connection: socket.socket, address: str) -> None:
    """Raise NoBroker if the response is not a broker's. A missing response is not an error: the
    broker may be busy.
    """
    connection.sendall(_REQUEST)
    response = b""
    while len(response) < _RESPONSE_START.size:
        received = connection.recv(_RESPONSE_START.size - len(response))
        if not received:
            return
        response += received
    if _RESPONSE_START.unpack(response)[1] != _CORRELATION_ID:
        raise NoBroker(
            f"the server at {address} does not speak the Kafka protocol, and nothing was sent: use "
            "the Kafka address that `quackmq serve` prints"
        )
