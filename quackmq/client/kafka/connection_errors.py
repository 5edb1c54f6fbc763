"""The last connection error of librdkafka, for calls that get no answer.

A client connects to the given address, and the broker there tells it its advertised address. If the
advertised address cannot be reached, every call times out although the given address is right. So
the error names the advertised address.

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
_SAID: Final = re.compile(
    r"(?:\w+://)?(?P<address>[^ ]+)/(?P<node>\w+): (?P<what>.*?)(?: \(after .*)?", re.DOTALL
)


class Trouble:
    def __init__(self, addresses: str) -> None:
        """`addresses` are the addresses that the program has given."""
        self._addresses = addresses
        self._given = {each.strip().rpartition("://")[2] for each in addresses.split(",")}
        self._words = ""

    def note(self, error: KafkaError) -> None:
        """Store a connection error; librdkafka's callback. It raises nothing, because
        connections come and go, and calls that need one report it themselves."""
        log.debug("%s", error)
        if error.code() not in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            return
        said = _SAID.fullmatch(error.str())
        if said is None:
            self._words = error.str().lower()
            return
        what, address = said["what"].rpartition(": ")[2].lower(), said["address"]
        if said["node"].isdecimal() and address not in self._given:
            what += f" at {address}, the address that the broker at {self._addresses} advertises"
        self._words = what

    def clear(self) -> None:
        """Forget the last error, after an answer arrived."""
        self._words = ""

    def words(self) -> str:
        """Return the last error in parentheses, as a suffix for a message; "" if there is none."""
        return f" ({self._words})" if self._words else ""
