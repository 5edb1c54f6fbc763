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
from quackmq.client.kafka.errors import Deadline
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
#: Kafka's ApiVersions request, version 0, without a client id, and the start of its answer.
_QUESTION_ID: Final = 0x71756163
_QUESTION: Final = struct.pack(">ihhih", 10, 18, 0, _QUESTION_ID, -1)
_ANSWER: Final = struct.Struct(">ii")


def check_addresses(addresses: str) -> None:
    """Raise InvalidRequest for addresses that librdkafka could never connect to."""
    for address in _split(addresses):
        found = _ADDRESS.fullmatch(address)
        if found is None or (found["host"] or "").isdigit():
            raise InvalidRequest(f"{address} is not HOST:PORT, as in {_EXAMPLE}")
        if found["protocol"] and found["protocol"].lower() not in _PROTOCOLS:
            raise InvalidRequest(
                f"{address} is not HOST:PORT: leave out {found['protocol']}://, and name the port "
                f"that listens for Kafka clients, as in {_EXAMPLE}"
            )


def reach(addresses: str, deadline: Deadline, *, is_encrypted: bool = False) -> None:
    """Return when one of the addresses accepts a connection, or may do so later. Raise NoBroker
    if all of them refuse (if the caller gave a timeout, only after that time), or if something
    other than a broker answers. The latter is not detected on encrypted connections."""
    while True:
        refusals = _refusals(addresses, deadline, is_encrypted=is_encrypted)
        if refusals is None:
            return
        if not deadline.is_given or deadline.passed():
            break
        time.sleep(min(deadline.left(), limits.CLIENT_PROBE_MS / 1000))
    waited = f" after {deadline.words()}" if deadline.is_given else ""
    raise NoBroker(
        f"nothing listens at {addresses}{waited} ({', '.join(refusals)}), and nothing was sent: "
        "start a broker there with `quackmq serve`, or name another one, as in "
        "Client('HOST:PORT') or --broker HOST:PORT"
    )


def _split(addresses: str) -> list[str]:
    return [each for each in map(str.strip, addresses.split(",")) if each]


def _refusals(addresses: str, deadline: Deadline, *, is_encrypted: bool) -> list[str] | None:
    """Return why each address refuses, or None if one does not. Raises NoBroker."""
    refusals: list[str] = []
    stranger: NoBroker | None = None
    for address in _split(addresses):
        found = _ADDRESS.fullmatch(address)
        if found is None:
            return None  # librdkafka reports what is wrong with it
        host, port = found["v6"] or found["host"], int(found["port"] or DEFAULT_PORT)
        try:
            patience = max(0.001, min(deadline.left(), shared_limits.CLIENT_CONNECT_MS / 1000))
            with socket.create_connection((host, port), patience) as connection:
                if not is_encrypted and (found["protocol"] or "").lower() not in _ENCRYPTED:
                    _check_broker(connection, address)
            return None
        except NoBroker as error:
            stranger = error
        except ConnectionRefusedError:
            refusals.append("connection refused")
        except socket.gaierror as error:
            refusals.append(f"{host}: {(error.strerror or str(error)).lower()}")
        except (OSError, OverflowError):
            return None  # slow or unreachable at the moment: librdkafka keeps trying
    if stranger is not None:
        raise stranger
    return sorted(set(refusals)) or None


def _check_broker(connection: socket.socket, address: str) -> None:
    """Raise NoBroker if the answer is not a broker's. No answer is not an error: a broker may be
    busy."""
    connection.sendall(_QUESTION)
    answer = b""
    while len(answer) < _ANSWER.size:
        more = connection.recv(_ANSWER.size - len(answer))
        if not more:
            return
        answer += more
    if _ANSWER.unpack(answer)[1] != _QUESTION_ID:
        raise NoBroker(
            f"the server at {address} does not speak the Kafka protocol, and nothing was sent: use "
            "the Kafka address that `quackmq serve` prints"
        )
