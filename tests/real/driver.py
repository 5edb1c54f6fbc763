"""A program that works on a local store and tells, line by line, what it was told: to be killed.

    python -m tests.real.driver DIRECTORY

Kafka clients cannot move cursors of ours yet, so here the store's contract is used directly. Each
*worker* has a name, a cursor of that name, and a count that begins where its cursor stands. In one
call it appends its next record to each of two partitions and moves its cursor on; *markers* move
their cursor alone. What goes to stdout, each line in one write:

    found NAME CURSOR           for each name, when the store is open
    ready
    done NAME NUMBER            the call that made the cursor NUMBER has returned

On SIGTERM it finishes what it has begun, closes the store and leaves with 0.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from quackmq import limits
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Cursor, CursorKey, PartitionKey, Topic
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import batch_of
from tests.real.records import Identity, value_of

TOPIC: Final = "work"
PARTITIONS: Final = 2
WORKERS: Final = tuple(f"worker-{number}" for number in range(8))
MARKERS: Final = tuple(f"marker-{number}" for number in range(2))
#: Small, so that every life goes through slots, segments and checkpoints.
OPTIONS: Final = LocalOptions(
    segment_bytes=256 * limits.KIB,
    region_bytes=4 * limits.KIB,
    journal_slot_bytes=128 * limits.KIB,
    journal_inline_bytes=4 * limits.KIB,
    checkpoint_bytes=512 * limits.KIB,
    tail_bytes=128 * limits.KIB,
    open_files=3,
)


async def open_store(directory: Path) -> tuple[LocalStore, Topic]:
    store = await LocalStore.open(directory, OPTIONS)
    topic = (await store.topics()).get(TOPIC)
    if topic is None:
        topic = await store.create_topic(TOPIC, PARTITIONS, Policy())
    return store, topic


async def standing(store: LocalStore, topic: Topic) -> dict[str, int]:
    """Where every name's cursor stands; 0 for one that was never set."""
    cursors = await store.cursors(topic_id=topic.id)
    found = dict.fromkeys((*WORKERS, *MARKERS), 0)
    return found | {key.name: cursor.offset or 0 for key, cursor in cursors.items()}


def cursor_of(name: str, topic: Topic, number: int) -> Cursor:
    return Cursor(CursorKey(name, topic.id, 0), number)


async def main(directory: Path) -> None:
    finish = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, finish.set)
    store, topic = await open_store(directory)
    found = await standing(store, topic)
    for name, cursor in found.items():
        say(f"found {name} {cursor}")
    say("ready")
    source = random.Random(os.urandom(8))

    async def work(name: str, number: int) -> None:
        size = source.choice((60, 300, 3_000, 9_000, 200_000))
        batch = batch_of(value_of(Identity(name, number), size))
        appends = [Append(PartitionKey(topic.id, each), batch) for each in range(PARTITIONS)]
        await store.append(appends, [cursor_of(name, topic, number + 1)])

    async def mark(name: str, number: int) -> None:
        await store.set_cursors([cursor_of(name, topic, number + 1)])

    async def count_on(name: str, step: Callable[[str, int], Awaitable[None]]) -> None:
        number = found[name]
        while not finish.is_set():
            await step(name, number)
            number += 1
            say(f"done {name} {number}")
            # Otherwise all of them would go in step, and a cycle always hold one call of each.
            await asyncio.sleep(source.uniform(0, 0.002))

    await asyncio.gather(
        *(count_on(name, work) for name in WORKERS), *(count_on(name, mark) for name in MARKERS)
    )
    await store.close()


def say(line: str) -> None:
    """At once and whole: a pipe keeps what was written to it when the writer is killed."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
