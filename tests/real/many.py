"""A program that appends to thousands of partitions and tells what was acknowledged: to be killed.

    python -m tests.real.many DIRECTORY PARTITIONS

Each record is the offset that it should get, as text. Many are on their way at once, each in a
partition of its own. `ready` goes to stdout when the store is open, and `PARTITION OFFSET` for each
record that was acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores.local import LocalStore
from tests.kit.support import batch_of

TOPIC: Final = "many"
_AT_ONCE: Final = 500


async def main(directory: Path, partitions: int) -> None:
    store = await LocalStore.open(directory)
    topic = (await store.topics()).get(TOPIC)
    if topic is None:
        topic = await store.create_topic(TOPIC, partitions, Policy())
    keys = [PartitionKey(topic.id, number) for number in range(partitions)]
    following = [(await store.offsets(key)).next for key in keys]
    os.write(1, b"ready\n")

    async def append(first: int) -> None:
        while True:
            for number in range(first, partitions, _AT_ONCE):
                offset = following[number]
                await store.room()
                [appended] = await store.append([Append(keys[number], batch_of(b"%d" % offset))])
                assert appended.base_offset == offset
                following[number] = offset + 1
                os.write(1, b"%d %d\n" % (number, offset))

    await asyncio.gather(*(append(first) for first in range(_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
