"""A client in another language, driven by lines of JSON: a process that does what the test asks.

Scenarios of groups and of brokers that die have programs with a part to play (programs.py). The
driver is for all the rest: one call, one answer. It lasts for all tests of a worker, since a JVM
takes its time to start; what a test opens through it, the test's `Session` closes.

    → {"id": 1, "do": "send", "producer": 7, "topic": "news", "records": [{"value": "quack"}]}
    ← {"id": 1, "gives": [{"partition": 0, "offset": 0}]}
    ← {"id": 1, "fails": {"name": "TopicExistsException", "text": "…"}}

Keys, values and headers are strings whose characters are the bytes. Commands run at the same time.
What the client logs as a warning or an error comes on stderr, a line each, and is kept.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from tests.interop.running import DEADLINE_SECONDS

#: For answers: what a command itself waits for is shorter.
ANSWER_SECONDS: Final = 2 * DEADLINE_SECONDS


class ClientFailure(Exception):
    """What the client raised; `name` is its own name for it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Driver:
    """The process. Killed on leaving the block, whatever happens."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._ended = False
        self.said: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_answers),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with self._process:
            for reader in self._readers:
                reader.join()

    def begin(self, what: str, **arguments: Any) -> Future[Any]:
        """Ask for something, and get its outcome later."""
        outcome: Future[Any] = Future()
        with self._lock:
            assert not self._ended, f"the driver has ended: {self.said}"
            number = next(self._ids)
            self._waiting[number] = outcome
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        return outcome

    def call(self, what: str, **arguments: Any) -> Any:
        return self.begin(what, **arguments).result(ANSWER_SECONDS)

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                outcome = self._waiting.pop(answer["id"])
            if "fails" in answer:
                outcome.set_exception(ClientFailure(**answer["fails"]))
            else:
                outcome.set_result(answer["gives"])
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        for outcome in waiting.values():
            outcome.set_exception(ClientFailure("ended", f"the driver has ended: {self.said}"))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line.rstrip("\n"))


class Session:
    """What one test does with the driver, against one broker. A context manager."""

    def __init__(self, driver: Driver, address: str) -> None:
        self._driver = driver
        self._address = address
        self._opened: list[int] = []
        self._said_before = len(driver.said)
        self._expected: list[str] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        for closing in [self._driver.begin("close", number=number) for number in self._opened]:
            closing.result(ANSWER_SECONDS)

    def expect(self, complaint: str) -> None:
        """Of the client, which logs something with these words, and rightly so."""
        self._expected.append(complaint)

    def complaints(self) -> list[str]:
        """What else the client logged since the test began."""
        said = self._driver.said[self._said_before :]
        return [line for line in said if not any(words in line for words in self._expected)]

    def open(self, kind: str, *, address: str | None = None, **arguments: Any) -> Client:
        """A producer, consumer or admin; `settings` are under the client's own names."""
        number = self._driver.call(kind, address=address or self._address, **arguments)
        self._opened.append(number)
        return Client(self._driver, kind, number)

    def producer(self, **settings: Any) -> Client:
        return self.open("producer", settings=settings)

    def consumer(self, **settings: Any) -> Client:
        return self.open("consumer", settings=settings)

    def admin(self, **settings: Any) -> Client:
        return self.open("admin", settings=settings)


class Client:
    """A producer, consumer or admin of the other language."""

    def __init__(self, driver: Driver, kind: str, number: int) -> None:
        self._driver = driver
        self._named = {kind: number}
        self._number = number

    def call(self, what: str, **arguments: Any) -> Any:
        return self._driver.call(what, **self._named, **arguments)

    def method(self, name: str, *given: Any) -> Any:
        """Call a method of the client itself, where the driver has no word of its own for it."""
        return self.call("method", name=name, given=given)

    def send(self, topic: str, *values: str | None, **more: Any) -> list[int]:
        """The offsets that records with these values got, all with the same key and so on."""
        records = [{"value": value, **more} for value in values]
        places = self.call("send", topic=topic, records=records)
        assert all("offset" in place for place in places), places
        return [place["offset"] for place in places]

    def take(self, count: int) -> list[dict[str, Any]]:
        """So many records that came."""
        taken: list[dict[str, Any]] = self.call(
            "take", count=count, wait_ms=1000 * DEADLINE_SECONDS
        )
        assert len(taken) == count, f"{len(taken)} of {count} records came"
        return taken

    def values(self, count: int) -> list[str]:
        return [record["value"] for record in self.take(count)]

    def close(self) -> None:
        self._driver.call("close", number=self._number)
