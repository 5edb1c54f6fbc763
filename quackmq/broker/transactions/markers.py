"""Appends of the markers that end a transaction. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from quackmq.broker.transactions.entry import ProducerEpoch
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Batch


def make_marker_appends(
    producer: ProducerEpoch, marker: Marker, now_ms: int, keys: Iterable[PartitionKey]
) -> list[Append]:
    """Return the appends that end a producer's transaction in these partitions. All of them share
    one batch; the store copies it."""
    batch = Batch.peek(marker_batch(*producer, marker, now_ms))
    return [Append(key, batch) for key in keys]
