"""The other side of driver.py: starts it, kills it at random instants, and checks what it says.

A cursor is never behind what was last acknowledged, nor ahead of what can have been asked for; and
since a worker's records and its cursor are one call, both partitions hold exactly as many of its
records, in order, as its cursor says.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quackmq import limits
from quackmq.model.topic import PartitionKey, Read
from tests.kit.server import Server
from tests.kit.support import offsets_and_values
from tests.real.broker import wait_until_opening
from tests.real.driver import MARKERS, PARTITIONS, WORKERS, open_store, standing
from tests.real.records import identify

COMMAND: Final = (sys.executable, "-m", "tests.real.driver")
#: A kill while the store opens: as often as that, and so much later at the most.
STARTING_SHARE: Final = 0.3
OPENING_S: Final = 0.03
#: A kill while it works: behind so many acknowledgements, and so much later, at the most.
MOST_ACKNOWLEDGEMENTS: Final = 2_000
LATER_S: Final = 0.01


@dataclass
class Cursors:
    """What is known of each cursor, from one life to the next."""

    at_least: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORKERS + MARKERS, 0))
    violations: list[str] = field(default_factory=list)
    acknowledged: int = 0

    def hear(self, line: str) -> None:
        match line.split():
            case ["found", name, cursor]:
                self.found(name, int(cursor))
            case ["done", name, number]:
                self.at_least[name] = int(number)
                self.acknowledged += 1

    def found(self, name: str, cursor: int) -> None:
        """Each name has one call under way at the most, which may have been carried out."""
        known = self.at_least[name]
        if not known <= cursor <= known + 1:
            self.violations.append(f"{name} was acknowledged {known} and stands at {cursor}")
        self.at_least[name] = cursor


def drive(directory: Path, seed: int, kills: int) -> Cursors:
    """Everything that was broken is in the result's `violations`."""
    source = random.Random(seed)
    cursors = Cursors()
    for _ in range(kills):
        with Server(directory, command=COMMAND) as driver:
            if source.random() < STARTING_SHARE:
                wait_until_opening(driver, directory)
                # Not to wait for anything: this makes the instant a random one.
                time.sleep(source.uniform(0, OPENING_S))
            else:
                work_on(driver, cursors, round(MOST_ACKNOWLEDGEMENTS ** source.random()))
                time.sleep(source.uniform(0, LATER_S))
            end(driver, cursors, signal.SIGKILL)
    with Server(directory, command=COMMAND) as driver:
        work_on(driver, cursors, 1)
        end(driver, cursors, signal.SIGTERM)
    asyncio.run(check_store(directory, cursors))
    return cursors


def work_on(driver: Server, cursors: Cursors, acknowledgements: int) -> None:
    due = cursors.acknowledged + acknowledgements
    while cursors.acknowledged < due:
        line = driver.line()
        assert line, f"the driver ended with {driver.exit_code()}: {driver.errors()}"
        cursors.hear(line)


def end(driver: Server, cursors: Cursors, number: signal.Signals) -> None:
    """And hear what it said before."""
    driver.send(number)
    while line := driver.line():
        cursors.hear(line)
    due = -number if number is signal.SIGKILL else 0
    if driver.exit_code() != due:
        cursors.violations.append(f"it ended with {driver.exit_code()}: {driver.errors()}")


async def check_store(directory: Path, cursors: Cursors) -> None:
    store, topic = await open_store(directory)
    try:
        for name, cursor in (await standing(store, topic)).items():
            cursors.found(name, cursor)
        for partition in range(PARTITIONS):
            key = PartitionKey(topic.id, partition)
            numbers: dict[str, list[int]] = defaultdict(list)
            offset, next_offset = (await store.offsets(key))[:2]
            while offset < next_offset:
                [part] = await store.read([Read(key, offset, limits.MIB)], max_bytes=limits.MIB)
                for due, (found, value) in enumerate(offsets_and_values(part), start=offset):
                    if found != due:
                        cursors.violations.append(f"{key} has {found} where {due} was due")
                    publisher, number = identify(value)
                    numbers[publisher].append(number)
                    offset = found + 1
            for name in WORKERS:
                if numbers[name] != list(range(cursors.at_least[name])):
                    cursors.violations.append(
                        f"{key} has {len(numbers[name])} records of {name}, whose cursor says "
                        f"{cursors.at_least[name]}, or they are not in order"
                    )
    finally:
        await store.close()
