"""The client of the ZeroMQ protocol: put, get, subscribe and unsubscribe.

    with ZmqClient("127.0.0.1:5555", "donald", directory="ids") as client:
        client.subscribe("ducks")
        client.put("ducks", "quack")
        message = client.get("ducks")
        print(message.id, message.text)

**Getting, exactly once.** The broker repeats a message until the next `get` names its id. What
happens after a crash depends on where the last id is stored:

- *With a directory*, the id is synced to disk before `get` returns its message. No message is
  returned twice and none is skipped. A message that the program had not finished at a crash is not
  returned again.
- *Without one*, the id is lost with the process: after a crash, the last message is returned again.
- *With the program's own store*: `get(topic, after=id)` names an id that the program has stored,
  best in the same transaction as its results. Then each message is processed exactly once, despite
  crashes. Before the first message, `after` is BEFORE_THE_FIRST.

**Putting, exactly once.** A `put` that returned is on disk at the broker. After a QuackTimeout the
outcome is unknown, and a repeated plain put may be stored twice. A numbered put
(`put(topic, content, sequence=n)`, ascending numbers per client name) can be repeated: the broker
drops it if it has it. After a crash, `last_sequence` tells where to continue.

No call takes longer than its timeout; then it raises QuackTimeout, which says what it waited for.
All errors are QuackErrors.

Any thread may call; calls of one object run one after the other. Only one client at a time may use
a name.
"""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from quackmq.client.closing import ClosedOnExit
from quackmq.client.deadline import Deadline
from quackmq.client.locks import locked
from quackmq.client.zeromq.last_ids import LastIds
from quackmq.client.zeromq.req_socket import ReqSocket
from quackmq.errors import InvalidMessageId, InvalidRequest, QuackTimeout
from quackmq.model.offset_notes import offset_for_number
from quackmq.model.subscription import check_name
from quackmq.model.topic import check_topic_name
from quackmq.protocols.zmq.codec.queue_language import (
    NONE_YET,
    Get,
    LastSequence,
    Put,
    ReceivedMessage,
    Request,
    Subscribe,
    Unsubscribe,
    encode_request,
    read_reply,
)

DEFAULT_TIMEOUT_S: Final = 5.0
#: The value of `after` before the first message.
BEFORE_THE_FIRST: Final = NONE_YET


class ZmqMessage(NamedTuple):
    """A message. Its id is an opaque token."""

    id: str
    topic: str
    content: bytes

    @property
    def text(self) -> str:
        """The content decoded as UTF-8. Raises UnicodeDecodeError for other bytes, which another
        protocol may have put."""
        return self.content.decode()


class ZmqClient(ClosedOnExit):
    def __init__(
        self,
        address: str,
        name: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`address` is HOST:PORT or tcp://HOST:PORT. The broker stores subscriptions and the
        numbers of puts under `name`. `timeout` is in seconds, for every call."""
        check_name(name)
        Deadline(timeout)  # it checks the number; this object is not used
        self.name = name
        self._req_socket = ReqSocket(address)
        self._timeout_s = timeout
        self._lock = threading.Lock()
        self._ids = LastIds(directory, name)

    def close(self) -> None:
        """Close the client. A call that waits in another thread raises ClientClosed."""
        self._req_socket.end_wait()
        with self._lock:
            self._req_socket.close()
            self._ids.close()

    # --- calls ------------------------------------------------------------------------------

    def put(self, topic: str, content: str | bytes, *, sequence: int | None = None) -> None:
        """Put a message into a topic; bytes must be UTF-8.

        client.put("ducks", "quack")
        client.put("ducks", "quack", sequence=7)    # can be repeated; stored once
        """
        put = Put(self.name, topic, _utf8(content), sequence)
        if sequence is not None:
            offset_for_number(sequence)  # raises InvalidRequest for an invalid number
        self._request(put, "the broker to take a message")

    def get(
        self, topic: str, *, timeout: float | None = None, after: str | None = None
    ) -> ZmqMessage:
        """Return the next message of a subscribed topic; wait for it. With `after`, return the
        message after the one with that id: for programs that store the id themselves.

            message = client.get("ducks", timeout=60)
            message = client.get("ducks", after=kept_id)
        """
        deadline = Deadline(self._timeout_s if timeout is None else timeout)
        if after is not None:
            _check_message_id(after)
        with self._locked(deadline):
            last = self._ids.get(topic) if after is None else after
            get = Get(self.name, topic, None if last == BEFORE_THE_FIRST else last)
            # If there is no message, the broker waits for a while and then answers that there is
            # none. Ask again until the deadline.
            while (got := self._exchange(get, deadline, "a message")) is None:
                if deadline.has_passed():
                    raise self._timeout_error(get, deadline, "a message")
            assert isinstance(got, ReceivedMessage), "the codec returns Got or None for Get"
            if after is None:
                self._ids.put(topic, got.id)
            return ZmqMessage(got.id, topic, got.content)

    def subscribe(self, topic: str) -> bool:
        """Subscribe to messages put from now on, until `unsubscribe`. Return True if the
        subscription is new.

            client.subscribe("ducks")
        """
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            subscribe = Subscribe(self.name, topic)
            is_new = bool(self._exchange(subscribe, deadline, "the broker"))
            if is_new:
                # A stored id belongs to an earlier subscription.
                self._ids.forget(topic)
            return is_new

    def unsubscribe(self, topic: str) -> None:
        """End the subscription; unread messages are dropped. Raises UnknownSubscription.

        client.unsubscribe("ducks")
        """
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            unsubscribe = Unsubscribe(self.name, topic)
            self._exchange(unsubscribe, deadline, "the broker")
            self._ids.forget(topic)

    def last_sequence(self, topic: str) -> int | None:
        """Return the sequence of this client's last numbered put at the broker, or None.

        next_sequence = (client.last_sequence("ducks") or 0) + 1
        """
        last = self._request(LastSequence(self.name, topic), "the broker")
        assert last is None or isinstance(last, int), "the codec returns a number or None"
        return last

    # --- requests --------------------------------------------------------------------

    def _request(self, request: Request, waited_for: str) -> ReceivedMessage | bool | int | None:
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            return self._exchange(request, deadline, waited_for)

    def _locked(self, deadline: Deadline) -> locked:
        """Return a block in which no other call runs. Raises QuackTimeout."""
        return locked(self._lock, f"another call of {self.name} to end", deadline)

    def _exchange(
        self, request: Request, deadline: Deadline, waited_for: str
    ) -> ReceivedMessage | bool | int | None:
        """Send a request and return the decoded reply. Raises QuackTimeout, or the error in the
        reply."""
        check_topic_name(request.topic)
        reply = self._req_socket.request(encode_request(request), deadline.remaining_s())
        if reply is None:
            raise self._timeout_error(request, deadline, waited_for)
        return read_reply(request, reply)

    def _timeout_error(self, request: Request, deadline: Deadline, waited_for: str) -> QuackTimeout:
        """Return the error for a missing reply. For a put, it says that the outcome is unknown."""
        verb = encode_request(request).split(b" ", 1)[0].decode()
        text = f"{verb} {request.topic}: waited {deadline.duration_text()} for {waited_for}"
        text += f", for {self.name} at {self._req_socket.address}"
        if isinstance(request, Put):
            text += "; its outcome is unknown"
            text += "" if request.sequence is None else ": put it again with the same sequence"
        return QuackTimeout(text)


def _check_message_id(message_id: str) -> None:
    """Raise InvalidMessageId for a text that cannot be an id and would garble the request."""
    is_word = message_id.isascii() and message_id.isprintable() and " " not in message_id
    if not message_id or not is_word:
        raise InvalidMessageId(
            f"{message_id!r} is not a message id: pass an id exactly as it came with a message, or "
            "BEFORE_THE_FIRST"
        )


def _utf8(content: str | bytes) -> bytes:
    """Return the content as bytes. Raises InvalidRequest if it is not UTF-8."""
    try:
        if isinstance(content, str):
            return content.encode()
        content.decode()
    except UnicodeError as error:
        raise InvalidRequest(f"a message over ZeroMQ must be UTF-8: {error}") from None
    return content
