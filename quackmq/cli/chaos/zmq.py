"""A faulty client of the ZeroMQ listener: PUT, GET, SUB and UNSUB over raw sockets.

The client acknowledges a message by sending its id with the next GET, as docs/zmq.md says.
"""

from __future__ import annotations

import time
from typing import Final

import zmq

from quackmq.cli.chaos.runner import PendingMessage
from quackmq.errors import ProtocolError, QuackTimeout
from quackmq.protocols.zmq.codec.queue_language import (
    Get,
    Put,
    ReceivedMessage,
    Request,
    Subscribe,
    Unsubscribe,
    encode_request,
    read_reply,
)

#: Timeout of an answer. The broker answers a GET without messages after at most 4 s.
ANSWER_S: Final = 6.0
#: How long a closing socket may still send requests.
_LAST_WORDS_MS: Final = 100


class RequestSocket:
    """Send requests to a REP socket. Uses a DEALER socket, because a REQ socket cannot send
    twice in a row."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._address = address
        self._socket: zmq.Socket[bytes] | None = None

    def send(self, frame: bytes) -> None:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.connect(self._address)
        self._socket.send_multipart([b"", frame])

    def receive_reply(self, until_s: float) -> bytes:
        """Return the next answer. After a timeout, disconnect, which discards later answers, and
        raise QuackTimeout."""
        assert self._socket is not None, "a request was sent"
        if not self._socket.poll(max(0, round((until_s - time.monotonic()) * 1000))):
            self.disconnect()
            raise QuackTimeout("the request timed out; is this the port of the chosen --door?")
        return self._socket.recv_multipart()[-1]

    def disconnect(self, *, flushes: bool = False) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(_LAST_WORDS_MS if flushes else 0)


class BadZmqClient:
    """A `runner.FaultyClient` for the ZeroMQ protocol."""

    def __init__(self, address: str, name: str) -> None:
        self._name = name
        self._context = zmq.Context()
        self._requests = RequestSocket(self._context, tcp_url(address))
        self._topics: dict[str, None] = {}
        #: The id to acknowledge with the next GET, by topic.
        self._last_ids: dict[str, str] = {}

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """Send a message `times` times. Without `waits`, disconnect instead of receiving the
        replies. Return how many were acknowledged."""
        put = Put(self._name, topic, content)
        for _ in range(times):
            self._requests.send(encode_request(put))
        if not waits:
            self._requests.disconnect(flushes=True)
            return 0
        for _ in range(times):
            self._receive_reply(put, ANSWER_S)
        return times

    def receive(self, topic: str, wait_s: float) -> PendingMessage | None:
        """Request the next message of a topic, which acknowledges the last one. Return None if
        there is none within `wait_s`."""
        get = Get(self._name, topic, self._last_ids.get(topic))
        self._requests.send(encode_request(get))
        try:
            got = self._receive_reply(get, wait_s)
        except QuackTimeout:
            return None
        return (
            PendingMessage(topic, got.id, got.content) if isinstance(got, ReceivedMessage) else None
        )

    def acknowledge(self, message: PendingMessage, times: int) -> PendingMessage | None:
        """Remember the id of a message, so that the next GET acknowledges it. If `times` is more
        than 1, send as many GET requests now and discard their replies."""
        if times == 0:
            return None
        self._last_ids[message.topic] = message.id
        if times > 1:
            for _ in range(times):
                self._requests.send(encode_request(Get(self._name, message.topic, message.id)))
            self._requests.disconnect(flushes=True)
        return None

    def subscribe(self, topic: str) -> None:
        self._topics[topic] = None
        if self._request(Subscribe(self._name, topic)):
            self._last_ids.pop(topic, None)

    def unsubscribe(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._last_ids.pop(topic, None)
        self._request(Unsubscribe(self._name, topic))

    def die(self) -> None:
        self._requests.disconnect()

    def close(self, *, keeps_subscriptions: bool) -> None:
        """End the subscriptions unless they are kept; close the socket."""
        try:
            for topic in [] if keeps_subscriptions else list(self._topics):
                self.unsubscribe(topic)
        finally:
            self._requests.disconnect()
            self._context.term()

    def _request(self, request: Request) -> ReceivedMessage | bool | int | None:
        self._requests.send(encode_request(request))
        return self._receive_reply(request, ANSWER_S)

    def _receive_reply(
        self, request: Request, wait_s: float
    ) -> ReceivedMessage | bool | int | None:
        """Return the parsed reply to a request. Ignore replies to earlier requests. Raise
        QuackTimeout after `wait_s`."""
        until_s = time.monotonic() + wait_s
        while True:
            frame = self._requests.receive_reply(until_s)
            try:
                return read_reply(request, frame)
            except ProtocolError:
                continue  # an answer to an earlier request


def tcp_url(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"
