"""Whether anything listens at the broker's address.

librdkafka tries for ever to connect, and a call that waits for it ends with its timeout. So that a
wrong port, or a broker that was not started, is told at once and in plain words, a client's first
call connects once by itself before librdkafka does.
"""

from __future__ import annotations

import re
import socket
import time
from typing import Final

from quackmq import limits
from quackmq.client.failures import Deadline
from quackmq.errors import NoBroker

DEFAULT_PORT: Final = 9092
#: One of the addresses, between commas: [PROTOCOL://]HOST[:PORT], as librdkafka takes them.
_ADDRESS: Final = re.compile(r"(?:\w+://)?(?:\[(?P<v6>.+)\]|(?P<host>[^:]+))(?::(?P<port>\d+))?")


def reach(addresses: str, deadline: Deadline) -> None:
    """Return when one of the addresses takes a connection, or may do so later. NoBroker if all of
    them refuse; if the caller gave a timeout, only after that time."""
    while True:
        refusals = _refusals(addresses, deadline)
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


def _refusals(addresses: str, deadline: Deadline) -> list[str] | None:
    """Return why each address refuses; None if one does not."""
    refusals: list[str] = []
    for address in filter(None, map(str.strip, addresses.split(","))):
        found = _ADDRESS.fullmatch(address)
        if found is None:
            return None  # librdkafka says what is wrong with it
        host, port = found["v6"] or found["host"], int(found["port"] or DEFAULT_PORT)
        try:
            patience = max(0.001, min(deadline.left(), limits.CLIENT_CONNECT_MS / 1000))
            socket.create_connection((host, port), patience).close()
            return None
        except ConnectionRefusedError:
            refusals.append("connection refused")
        except socket.gaierror as error:
            refusals.append(f"{host}: {(error.strerror or str(error)).lower()}")
        except (OSError, OverflowError):
            return None  # slow, or out of reach at the moment: librdkafka goes on trying
    return sorted(set(refusals)) or None
