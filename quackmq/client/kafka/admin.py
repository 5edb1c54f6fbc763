"""librdkafka's admin client, and how to ask the coordinator of a group with it.

A request to a coordinator that is away must not time out inside librdkafka: the process would end
when the coordinator is back (`rd_kafka_enq_once_del_source_return: Assertion failed`, seen with
2.16). So such a request never times out there. The caller measures the time, and when it is up
`renew` drops the client together with the request.

Any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka.admin import AdminClient

from quackmq.errors import ClientClosed

#: The longest time that librdkafka accepts for a request, in seconds.
NEVER_S: Final = 3600.0


class Admin:
    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        """`settings` returns librdkafka's settings; they are asked for with each new client."""
        self._settings = settings
        self._lock = threading.Lock()
        self._held: list[AdminClient] = [AdminClient(settings())]

    @property
    def client(self) -> AdminClient:
        """ClientClosed."""
        try:
            return self._held[0]
        except IndexError:
            raise ClientClosed("the client is closed") from None

    def ask_group(
        self, group: str, ask: Callable[[AdminClient], Mapping[str, Any]]
    ) -> GroupRequest:
        """Send a request to the coordinator of a group. `ask` passes `request_timeout=NEVER_S`."""
        client = self.client
        return GroupRequest(client, ask(client)[group])

    def result(self, request: GroupRequest, timeout_s: float) -> Any:
        """Wait for the answer. When the time is up, drop the request and raise TimeoutError.
        KafkaException."""
        try:
            return request.future.result(timeout_s)
        except TimeoutError:
            self.renew(request)
            raise

    def renew(self, request: GroupRequest) -> None:
        """Drop the client that a request was sent with, and the request with it."""
        with self._lock:
            if self._held and self._held[0] is request.client:
                self._held[0] = AdminClient(self._settings())
        _drop(request.forget())

    def poll(self) -> None:
        """Let librdkafka report what it knows of its connections."""
        for client in self._held[:1]:
            client.poll(0)

    def close(self, timeout_s: float) -> None:
        """Close for good. Wait at most so long for librdkafka's threads."""
        _drop(self._held).join(timeout_s)


class GroupRequest:
    """A request to the coordinator of a group that waits for its answer."""

    def __init__(self, client: AdminClient, future: Future[Any]) -> None:
        self.client: AdminClient | None = client
        self.future = future

    def forget(self) -> list[AdminClient]:
        """Return the client in a list that holds the only reference that the request had."""
        held = [] if self.client is None else [self.client]
        self.client = None
        return held


def _drop(held: list[AdminClient]) -> threading.Thread:
    """Drop clients in a thread of their own. The last reference to a client waits until
    librdkafka's threads have ended, and one of them was seen to stay for ever after its broker was
    gone."""
    dropping = threading.Thread(target=held.clear, daemon=True)
    dropping.start()
    return dropping
