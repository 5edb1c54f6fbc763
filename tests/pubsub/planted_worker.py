"""`python -m tests.pubsub.planted_worker BUG …` is a worker whose Python client leaves a check out.

Over Kafka's protocol it is the client that compares, since any cluster may be at the other end:

    last-id     a client that has just begun goes on where the cursor is, whatever id is named
    sequence    a put is made also if the publisher's number is held already
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from weakref import WeakSet

from confluent_kafka import Message as Record

from quackmq.client.consuming.consumer import Reader
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.numbered import Numbered
from quackmq.model.subscription import RecordPosition
from tests.pubsub import worker


def without_last_id() -> None:
    get_after = Reader.get_after
    begun: WeakSet[Reader] = WeakSet()

    def forgetful(
        self: Reader, positions: Iterable[RecordPosition] | None, deadline: Deadline
    ) -> Record:
        record = get_after(self, positions if self in begun else (), deadline)
        begun.add(self)
        return record

    Reader.get_after = forgetful  # type: ignore[method-assign]


def without_sequence() -> None:
    Numbered._find_last = lambda self, topic, deadline: None  # type: ignore[method-assign]


BUGS = {"last-id": without_last_id, "sequence": without_sequence}


if __name__ == "__main__":
    BUGS[sys.argv.pop(1)]()
    sys.exit(worker.main())
