"""What many tests need: batches made in one line, their values read back, a clock to be moved.

Batches are made and opened by aiokafka's codec, which nobody here wrote, so that a test of ours
never checks our codec against itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from quackmq.model.topic import Slice
from quackmq.records.batch import Batch, spans
from quackmq.serving.server import Server

#: Some moment; tests count from it.
START_MS = 1_700_000_000_000


class Clock:
    """Wall-clock time for one test; it stands still until moved."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms


def batch_of(
    *values: bytes,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    timestamp_ms: int = START_MS,
    transactional: bool = False,
) -> Batch:
    """A batch of one record for each value, all at the same time, not compressed."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=int(transactional),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=2**31 - 1,
    )
    for offset, value in enumerate(values):
        appended = builder.append(offset, timestamp=timestamp_ms, key=None, value=value, headers=[])
        assert appended is not None
    return Batch.parse(bytes(builder.build()))


def offsets_and_values(part: Slice) -> list[tuple[int, bytes]]:
    """Every record of a slice's batches, also those before the offset that was asked for."""
    return [
        (record.offset, record.value)
        for batch in batches_of(part.chunks)
        for record in DefaultRecordBatch(bytearray(batch.view))
    ]


def batches_of(chunks: Iterable[bytes | bytearray | memoryview]) -> list[Batch]:
    """The batches of a slice, their checksums checked."""
    return [
        Batch.parse(memoryview(chunk)[span.position : span.position + span.size])
        for chunk in chunks
        for span in spans(chunk)
    ]


async def listening(listener: Server[Any]) -> tuple[str, int]:
    """Start a listener that listens on TCP; return its host and port."""
    address = await listener.start()
    assert isinstance(address, tuple), address
    return address


def transport_of(writer: asyncio.StreamWriter) -> asyncio.Transport:
    """The transport of both directions: a StreamWriter is typed with the writing half only."""
    return cast(asyncio.Transport, writer.transport)


async def let_others_run(turns: int = 10) -> None:
    """Give other tasks the chance to get as far as they can without anything new happening.

    For arranging a likely order, such as a reader that waits before something is written; a test
    must hold in every other order too.
    """
    for _ in range(turns):
        await asyncio.sleep(0)
