"""librdkafka's admin client, and how to send requests to the coordinator of a group with it.

A request to an unavailable coordinator must not time out inside librdkafka: the process would abort
when the coordinator returns (`rd_kafka_enq_once_del_source_return: Assertion failed`, seen with
2.16). So such a request never times out there. The caller measures the time, and after the timeout
`drop_client` drops the client together with the request.

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
        """`settings` returns librdkafka's settings; it is called for each new client."""
        self._settings = settings
        self._lock = threading.Lock()
        self._clients: list[AdminClient] = [AdminClient(settings())]

    @property
    def client(self) -> AdminClient:
        """Raises ClientClosed."""
        try:
            return self._clients[0]
        except IndexError:
            raise ClientClosed("the client is closed") from None

    def send_to_group(
        self, group: str, send: Callable[[AdminClient], Mapping[str, Any]]
    ) -> GroupRequest:
        """Send a request to the coordinator of a group. `send` passes `request_timeout=NEVER_S`."""
        client = self.client
        return GroupRequest(client, send(client)[group])

    def result(self, request: GroupRequest, timeout_s: float) -> Any:
        """Wait for the result. After the timeout, drop the request and raise TimeoutError.
        Raises KafkaException if the request fails."""
        try:
            return request.future.result(timeout_s)
        except TimeoutError:
            self.drop_client(request)
            raise

    def drop_client(self, request: GroupRequest) -> None:
        """Drop the client that a request was sent with, and the request with it."""
        with self._lock:
            if self._clients and self._clients[0] is request.client:
                self._clients[0] = AdminClient(self._settings())
        _drop(request.release_client())

    def poll(self) -> None:
        """Let librdkafka run its callbacks about connections."""
        for client in self._clients[:1]:
            client.poll(0)

    def close(self, timeout_s: float) -> None:
        """Close for good. Wait for librdkafka's threads up to this time."""
        _drop(self._clients).join(timeout_s)


class GroupRequest:
    """A request to the coordinator of a group that has no response yet."""

    def __init__(self, client: AdminClient, future: Future[Any]) -> None:
        self.client: AdminClient | None = client
        self.future = future

    def release_client(self) -> list[AdminClient]:
        """Move the client into a list, so that the request no longer references it."""
        clients = [] if self.client is None else [self.client]
        self.client = None
        return clients


def _drop(clients: list[AdminClient]) -> threading.Thread:
    """Drop clients in a background thread. Dropping the last reference to a client waits for
    librdkafka's threads, and one of them was seen to run forever after its broker was gone."""
    thread = threading.Thread(target=clients.clear, daemon=True)
    thread.start()
    return thread
