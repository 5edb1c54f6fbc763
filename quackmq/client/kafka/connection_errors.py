"""What librdkafka said last of its connections, for calls that get no answer.

A client connects to the address that it was given, and the broker there tells it another one, at
which it is to be reached: the advertised address. If that one cannot be reached, every call times
out though the given address is right. So the error names the advertised address.

Any thread may call.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from confluent_kafka import KafkaError

log = logging.getLogger(__name__)

#: "HOST:PORT/1: Connect to … failed: Connection refused (after 0ms in state CONNECT)". Behind the
#: address is the broker's number, if it has told its address itself.
_SAID: Final = re.compile(
    r"(?:\w+://)?(?P<address>[^ ]+)/(?P<node>\w+): (?P<what>.*?)(?: \(after .*)?", re.DOTALL
)


class Trouble:
    def __init__(self, addresses: str) -> None:
        """`addresses` are those that the program has given."""
        self._addresses = addresses
        self._given = {each.strip().rpartition("://")[2] for each in addresses.split(",")}
        self._words = ""

    def note(self, error: KafkaError) -> None:
        """librdkafka's callback. Connections come and go; calls that cannot do without one say so
        themselves."""
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
        """An answer came: whatever was wrong with a connection is over."""
        self._words = ""

    def words(self) -> str:
        """Return the last trouble in parentheses, to be added to an error; "" if there is none."""
        return f" ({self._words})" if self._words else ""
