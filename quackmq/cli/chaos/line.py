"""A faulty client of the line protocol: a publisher and a subscriber, each with its own connection.

In this protocol a subscriber chooses its topics once per connection and cannot end a subscription.
So to subscribe or unsubscribe, the client sends `terminate` and connects again with more or fewer
topics. The broker keeps the subscriptions.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

from quackmq import limits
from quackmq.cli.broker.address import UnixPath, parse_address_or_path
from quackmq.cli.chaos.runner import PendingMessage
from quackmq.errors import InvalidRequest, QuackTimeout, Refused
from quackmq.protocols.line.codec.messages import (
    Choose,
    Connect,
    Entry,
    Lines,
    Message,
    Rejection,
    Role,
    Word,
    encode,
    parse,
)

#: Timeout of an answer.
_ANSWER_S: Final = 5.0
_READ_BYTES: Final = 64 * limits.KIB
#: The value of SO_LINGER (on, 0 seconds) with which `close` resets the connection at once.
_RESET: Final = struct.pack("ii", 1, 0)


class BadLineClient:
    """A `runner.FaultyClient` for the line protocol. Entries have no ids here: topic and content
    serve as the id."""

    def __init__(self, address: str, name: str) -> None:
        """Raise InvalidRequest for an invalid address. Connections are opened when they are
        needed."""
        try:
            self._address = parse_address_or_path(address)
        except ValueError as error:
            raise InvalidRequest(f"{address!r} {error}") from None
        self._name = name
        #: Subscribed topics, in order.
        self._topics: dict[str, None] = {}
        self._publisher: _Connection | None = None
        #: Topics that the publisher has chosen. It keeps them when it connects again.
        self._published: dict[str, None] = {}
        self._subscriber: _Connection | None = None

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """Send the entry `times` times; return how many the broker accepted. Raises Refused if it
        accepted none. Without `waits`, reset the connection before the answer and return 0."""
        connection = self._connect_publisher(topic)
        connection.send(encode(Entry(topic, content)) * times)
        if not waits:
            self._publisher = None
            connection.reset()
            return 0
        accepted = sum(connection.receive_word() is Word.SUCCESSFUL for _ in range(times))
        if not accepted:
            raise Refused("the entry was not accepted")
        return accepted

    def receive(self, topic: str, wait_s: float) -> PendingMessage | None:
        if not self._topics:
            return None
        entry = self._connect_subscriber().receive_entry(wait_s)
        return None if entry is None else _to_received_message(entry)

    def acknowledge(self, message: PendingMessage, times: int) -> PendingMessage | None:
        """Answer the last entry `times` times. With 0, reset the connection. With more, return the
        entry that a surplus answer has acknowledged, if any."""
        connection = self._subscriber
        if connection is None:
            return None
        if times == 0:  # without an answer, redelivery would wait for the broker's timer
            self._subscriber = None
            connection.reset()
            return None
        connection.send(encode(Word.SUCCESSFUL) * times)
        # The surplus acknowledgement is refused, unless the next entry was already sent: then it
        # acknowledges that one.
        another = None if times == 1 else connection.receive_entry_or_refusal()
        return None if another is None else _to_received_message(another)

    def subscribe(self, topic: str) -> None:
        self._topics[topic] = None
        self._close_subscriber()
        self._connect_subscriber()

    def unsubscribe(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._close_subscriber()

    def die(self) -> None:
        for connection in (self._publisher, self._subscriber):
            if connection is not None:
                connection.reset(b"topic ")  # in the middle of a message
        self._publisher = self._subscriber = None

    def close(self, *, keeps_subscriptions: bool) -> None:
        self._close_subscriber()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.terminate()

    # --- connections ---

    def _connect_publisher(self, topic: str) -> _Connection:
        """Return a connection on which a publisher has chosen this topic. Topics are chosen once
        per connection, so a new topic needs a new connection."""
        if self._publisher is None or topic not in self._published:
            # Forget the old connection first: if connecting fails, a closed one must not be used
            # again.
            publisher, self._publisher = self._publisher, None
            if publisher is not None:
                publisher.terminate()
            self._published[topic] = None
            self._publisher = _Connection(
                self._socket_address(), Role.PUB, f"{self._name}-pub", list(self._published)
            )
        return self._publisher

    def _connect_subscriber(self) -> _Connection:
        """Return the connection of the subscriber; connect and choose its topics if there is
        none."""
        if self._subscriber is None:
            self._subscriber = _Connection(
                self._socket_address(), Role.SUB, self._name, list(self._topics)
            )
        return self._subscriber

    def _close_subscriber(self) -> None:
        connection, self._subscriber = self._subscriber, None
        if connection is not None:
            connection.terminate()

    def _socket_address(self) -> str | tuple[str, int]:
        address = self._address
        return address.path if isinstance(address, UnixPath) else (address.host, address.port)


class _Connection:
    """A connection on which the topics have been chosen."""

    def __init__(
        self, address: str | tuple[str, int], role: Role, name: str, topics: list[str]
    ) -> None:
        """Connect and choose the topics. Raises Refused if the broker rejects a message,
        QuackTimeout without an answer, or OSError."""
        if isinstance(address, str):
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.settimeout(_ANSWER_S)
                self._socket.connect(address)
            except OSError:
                self._socket.close()
                raise
        else:
            self._socket = socket.create_connection(address, _ANSWER_S)
        self._lines = Lines()
        try:
            messages: list[Message] = [Connect(role, name), Word.END]
            messages += [Choose(role, name, topic) for topic in topics]
            for message in [*messages, Word.END]:
                self.send(encode(message))
                answer = self._receive_answer()
                if answer is not Word.ACCEPT:
                    reason = f": {answer.reason}" if isinstance(answer, Rejection) else ""
                    raise Refused(f"{message} was refused{reason}")
        except BaseException:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        self._socket.settimeout(_ANSWER_S)
        self._socket.sendall(data)

    def receive_word(self) -> Word:
        """Return the next answer without its reason; raises as `_receive_answer` does."""
        answer = self._receive_answer()
        return Word.REJECT if isinstance(answer, Rejection) else answer

    def _receive_answer(self) -> Word | Rejection:
        """Return the next answer. Raises QuackTimeout, or ConnectionResetError if the broker ends
        the connection."""
        message = self._receive_message(time.monotonic() + _ANSWER_S)
        if message is None:
            raise QuackTimeout(f"no answer within {_ANSWER_S:g} s")
        if message is Word.TERMINATE:
            raise ConnectionResetError("the broker sent terminate")
        assert isinstance(message, Word | Rejection), "a publisher receives only answers"
        return message

    def receive_entry(self, wait_s: float) -> Entry | None:
        """Return the next entry, or None after `wait_s`."""
        message = self._receive_message(time.monotonic() + wait_s)
        if message is Word.TERMINATE:
            raise ConnectionResetError("the broker sent terminate")
        assert message is None or isinstance(message, Entry), "a subscriber receives only entries"
        return message

    def receive_entry_or_refusal(self) -> Entry | None:
        """Return the next entry, or None if the broker refuses the acknowledgement."""
        message = self._receive_message(time.monotonic() + _ANSWER_S)
        if message is None:
            raise QuackTimeout(f"no answer within {_ANSWER_S:g} s")
        if message is Word.TERMINATE:
            raise ConnectionResetError("the broker sent terminate")
        return message if isinstance(message, Entry) else None

    def terminate(self) -> None:
        """Send `terminate`, await the answer and close. A connection that the broker has closed
        is not an error."""
        try:
            self.send(encode(Word.TERMINATE))
            until_s = time.monotonic() + _ANSWER_S
            while self._receive_message(until_s) not in (Word.TERMINATE, None):
                pass
        except OSError:
            pass
        finally:
            self._socket.close()

    def reset(self, last: bytes = b"") -> None:
        """Reset the connection immediately, after sending `last` if given."""
        try:
            if last:
                self._socket.setblocking(False)
                self._socket.send(last)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError:
            pass  # the broker has closed the connection already
        finally:
            self._socket.close()

    def _receive_message(self, until_s: float) -> Message | None:
        """Return the next message, or None at the deadline."""
        while (line := self._lines.next_line()) is None:
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return None
            self._socket.settimeout(remaining_s)
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            self._lines.receive(data)
        if isinstance(line, Exception):
            raise line
        return parse(line)


def _to_received_message(entry: Entry) -> PendingMessage:
    text = entry.content.decode(errors="backslashreplace")
    return PendingMessage(entry.topic, f"{entry.topic}/{text}", entry.content)
