"""The last connection error of librdkafka, for calls that get no response.

A client connects to the configured address, and the broker sends its advertised address. If the
advertised address cannot be reached, every call times out although the configured address is right.
So the error names the advertised address.

Any thread may call.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from confluent_kafka import KafkaError

log = logging.getLogger(__name__)

#: "HOST:PORT/1: Connect to … failed: Connection refused (after 0ms in state CONNECT)". After the
#: slash is the node id, if the address is an advertised one.
_ERROR_TEXT: Final = re.compile(
    r"(?:\w+://)?(?P<address>[^ ]+)/(?P<node>\w+): (?P<what>.*?)(?: \(after .*)?", re.DOTALL
)


class ConnectionErrors:
    def __init__(self, addresses: str) -> None:
        """`addresses` are the configured addresses, separated by commas."""
        self._addresses = addresses
        self._configured_addresses = {
            each.strip().rpartition("://")[2] for each in addresses.split(",")
        }
        self._last_error = ""

    def on_error(self, error: KafkaError) -> None:
        """Store a connection error; librdkafka's callback. It raises nothing, because librdkafka
        connects again, and calls that time out report the error.
        """
        log.debug("%s", error)
        if error.code() not in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            return
        match = _ERROR_TEXT.fullmatch(error.str())
        if match is None:
            self._last_error = error.str().lower()
            return
        reason, address = match["what"].rpartition(": ")[2].lower(), match["address"]
        if match["node"].isdecimal() and address not in self._configured_addresses:
            reason += f" at {address}, the address that the broker at {self._addresses} advertises"
        self._last_error = reason

    def clear(self) -> None:
        """Forget the last error, after a response arrived."""
        self._last_error = ""

    def suffix(self) -> str:
        """Return the last error in parentheses, as a suffix for a message; "" if there is none."""
        return f" ({self._last_error})" if self._last_error else ""
