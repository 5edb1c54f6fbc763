"""Somebody who publishes, in a thread, for as long as others are tried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from confluent_kafka import KafkaError, Message, Producer

from tests.real.clients import QUIET

DEADLINE_SECONDS = 90
#: A pace that leaves the machine to those who are tried.
PAUSE_SECONDS = 0.002


class Feeder:
    """Publishes records to a topic, partition after partition, until it is told to finish."""

    def __init__(
        self,
        address: str,
        topic: str,
        partitions: int,
        value: Callable[[int, int], str] = lambda _, number: str(number),
    ) -> None:
        """`value` makes a record of a partition and a number that grows from record to record."""
        self._topic = topic
        self._partitions = partitions
        self._value = value
        self._acknowledged: set[str] = set()
        self._failed: list[str] = []
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "enable.idempotence": True,
                "linger.ms": 1,
                # However long the broker is away.
                "message.timeout.ms": 0,
                "error_cb": lambda error: None,
                **QUIET,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> set[str]:
        """All that was published."""
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)
        assert self._producer.flush(DEADLINE_SECONDS) == 0
        assert self._failed == []
        return self._acknowledged

    def abandon(self) -> None:
        """End, whatever has become of the broker."""
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)
        self._producer.purge()

    @contextmanager
    def paused(self) -> Iterator[set[str]]:
        """No records for a while; those that were published until now."""
        with self._turn:
            assert self._producer.flush(DEADLINE_SECONDS) == 0
            yield set(self._acknowledged)

    def _run(self) -> None:
        for number in count():
            partition = number % self._partitions
            with self._turn:
                self._producer.produce(
                    self._topic,
                    self._value(partition, number),
                    partition=partition,
                    on_delivery=self._note,
                )
                self._producer.poll(0)
            if self._stop.wait(PAUSE_SECONDS):
                return

    def _note(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed.append(str(error))
        else:
            self._acknowledged.add((message.value() or b"").decode())
