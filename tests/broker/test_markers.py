"""The markers that end a transaction: one in each partition, with the producer's epoch."""

from __future__ import annotations

import uuid

import pytest

from quackmq.broker.transactions.entry import ProducerEpoch
from quackmq.broker.transactions.markers import make_marker_appends
from quackmq.model.log_transactions import Marker, read_marker
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch
from tests.kit.support import START_MS

KEYS = [PartitionKey(uuid.UUID(int=7), partition) for partition in (3, 0)]


@pytest.mark.parametrize("marker", Marker)
def test_each_partition_gets_a_marker_of_the_producer(marker: Marker) -> None:
    appends = make_marker_appends(ProducerEpoch(9, 4), marker, START_MS, iter(KEYS))
    assert [append.key for append in appends] == KEYS
    for append in appends:
        batch = Batch.parse(append.batch.view)
        assert read_marker(batch) is marker
        assert (batch.producer_id, batch.producer_epoch) == (9, 4)
        assert batch.max_timestamp == START_MS
        assert not append.owned, "the store must copy a batch that is appended several times"


def test_without_partitions_there_are_no_markers() -> None:
    assert make_marker_appends(ProducerEpoch(9, 4), Marker.ABORT, START_MS, []) == []
