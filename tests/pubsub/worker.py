"""A producer or a subscriber in a process of its own, to be killed at any point and started again.

    python -m tests.pubsub.worker '{"role": "producer", "way": "http", …}'

A producer numbers its puts in each topic and notes each number that it was told is there. Started
again it either asks for the last number held and goes on behind it, or just repeats what comes
behind its own notes: the broker must know those that it has. A subscriber stores each message and
its id in one transaction, and goes on behind the last id that it stored.

Between any two steps it may kill itself, as often as `mortality` says. Exit code 0: the producer
has made all its puts, or the subscriber has seen the end of every partition. Exit code
CANNOT_GO_ON: its client cannot, and it wants to be started again. Once a subscriber has subscribed
to all its topics, it says so on stdout.

What it is told: `role`, `way` (see ways.py), `address`, `name`, `topics` (and how many partitions
each has), `count` (of puts in each topic), `directory`, `seed`, `mortality`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from tests.pubsub.checker import pieces_of
from tests.pubsub.results import Notes, Results
from tests.pubsub.ways import WAYS, CannotGoOn, Unsure, Way

CANNOT_GO_ON: Final = 3
SUBSCRIBED: Final = "subscribed\n"
#: Every so many puts one has several messages, where the way has such puts.
LARGER_EVERY: Final = 5
LARGER_PIECES: Final = 3
#: Who has tried so often, and again so often, says what for.
TOLD_EVERY: Final = 20


class Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._name: str = settings["name"]
        self._topics: dict[str, int] = settings["topics"]
        self._count: int = settings["count"]
        self._path = Path(settings["directory"]) / self._name
        self._mortality: float = settings["mortality"]
        self._random = random.Random(settings["seed"])
        self._address: str = settings["address"]
        self._kind = WAYS[settings["way"]]

    # --- producers --------------------------------------------------------------------------

    def produce(self) -> None:
        notes = Notes(self._path)
        way = self._way()
        begins = {topic: self._first_number(way, notes, topic) for topic in self._topics}
        for number in range(self._count):
            for topic, begin in begins.items():
                if number >= begin:
                    self._put(way, notes, topic, number)
        way.close()
        notes.close()

    def _first_number(self, way: Way, notes: Notes, topic: str) -> int:
        noted = notes.last(topic)
        if not way.tells_last_number or self._random.random() < 0.5:
            return noted + 1
        held = self._until_answered(lambda: way.last_number(topic))
        held = -1 if held is None else held
        # If it holds less than was acknowledged, the check at the end will miss that: it is not
        # put again here.
        for number in range(noted + 1, held + 1):
            notes.add(topic, number)
        return max(noted, held) + 1

    def _put(self, way: Way, notes: Notes, topic: str, number: int) -> None:
        larger = way.puts_many and number % LARGER_EVERY == 0
        values = [
            str(identity)
            for identity in pieces_of(self._name, number, LARGER_PIECES if larger else 1)
        ]
        self._may_die()
        self._until_answered(lambda: way.put(topic, number, values))
        self._may_die()
        notes.add(topic, number)

    # --- subscribers ------------------------------------------------------------------------

    def subscribe(self) -> None:
        way = self._way()
        for topic in self._topics:
            self._until_answered(partial(way.subscribe, topic))
        way.close()
        sys.stdout.write(SUBSCRIBED)
        sys.stdout.flush()
        opened = {topic: Results(self._path) for topic in self._topics}
        threads = [
            threading.Thread(target=_or_end, args=(partial(self._consume, topic, results),))
            for topic, results in opened.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _consume(self, topic: str, results: Results) -> None:
        """Until every partition of a topic has come to its end."""
        way = self._way()
        last_id = results.last_id(topic)
        missing = set(range(self._topics[topic])) - results.ended(topic)
        while missing:
            got = self._until_answered(partial(way.get, topic, last_id))
            if got is None:
                continue
            self._may_die()
            results.add(topic, got.id, got.value)
            last_id = got.id
            self._may_die()
            missing -= results.ended(topic) if got.is_end else set()
        way.close()
        results.close()

    # --- both -------------------------------------------------------------------------------

    def _way(self) -> Way:
        return self._kind(self._address, self._name, self._path.with_suffix(".client"))

    def _until_answered(self, ask: Callable[[], Any]) -> Any:
        for tries in count(1):
            try:
                return ask()
            except Unsure as error:
                if tries % TOLD_EVERY == 0:
                    print(f"{tries} tries: {error}", file=sys.stderr, flush=True)

    def _may_die(self) -> None:
        if self._random.random() < self._mortality:
            os.kill(os.getpid(), signal.SIGKILL)


def _or_end(run: Callable[[], None]) -> None:
    """A thread that fails ends the process."""
    try:
        run()
    except CannotGoOn as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(CANNOT_GO_ON)
    except:  # noqa: E722  (librdkafka's errors, where they slip through, are no exceptions)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> int:
    settings = json.loads(sys.argv[1])
    worker = Worker(settings)
    _or_end(worker.produce if settings["role"] == "producer" else worker.subscribe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
