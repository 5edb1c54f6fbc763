"""The queue over HTTP, ours and the one that a user would write: the same requests for both."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from benchmarks import wrk
from benchmarks.driver import LoadFailed
from benchmarks.processes import Command, free_ports, running

#: Messages that every consumer finds: more than it can read in one run.
TO_READ: Final = 2_000
_FILLED_BY: Final = 64
_ROOT: Final = str(Path(__file__).parent.parent)


@dataclass
class Queue:
    """A topic of a queue, and those that have registered with it."""

    address: str
    topic: str
    producer_id: str
    consumer_ids: list[str] = field(default_factory=list)

    @classmethod
    def made(cls, address: str, topic: str) -> Queue:
        answer = _call(address, "/producer/register", {"topic": topic})
        return cls(address, topic, answer["producer_id"])

    def register_consumers(self, count: int) -> None:
        for _ in range(count):
            answer = _call(self.address, "/consumer/register", {"topic": self.topic})
            self.consumer_ids.append(answer["consumer_id"])

    def produce(self, connections: int, seconds: int, message: str) -> float:
        """Requests a second."""
        body = self._produced(message)
        return wrk.run(self.address, connections, seconds, "POST", ["/producer/produce"], body)

    def consume(self, connections: int, seconds: int) -> float:
        """Requests a second, of one consumer after the other."""
        asked = [{"topic": self.topic, "consumer_id": each} for each in self.consumer_ids]
        paths = [f"/consumer/consume?{urlencode(each)}" for each in asked]
        return wrk.run(self.address, connections, seconds, "GET", paths)

    def fill(self, count: int, message: str) -> None:
        """At least so many messages, so that there is something to consume."""
        filled = 0.0
        while filled < count:
            filled += self.produce(_FILLED_BY, 1, message)

    def _produced(self, message: str) -> str:
        asked = {"topic": self.topic, "producer_id": self.producer_id, "message": message}
        return json.dumps(asked)


@contextmanager
def fastapi(directory: Path) -> Iterator[str]:
    """The peer (peers/fastapi_queue.py) by its usual server; where it listens."""
    (port,) = free_ports(1)
    application = ("-m", "uvicorn", "benchmarks.peers.fastapi_queue:app", "--port", str(port))
    quietly = ("--no-access-log", "--log-level", "warning")
    environment = {"QUEUE_DATABASE": str(directory / "queue.db"), "PYTHONPATH": _ROOT}
    command = Command((sys.executable, *application, *quietly), environment)
    with running([command], port, directory) as server:
        server.wait_until_it_listens()
        yield server.address


def _call(address: str, path: str, asked: dict[str, str]) -> dict[str, str]:
    with closing(http.client.HTTPConnection(address)) as connection:
        connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, str] = json.loads(response.read())
    if answer.get("status") != "success":
        raise LoadFailed(f"POST {path}: {answer}")
    return answer
