"""Check a batch against the policy of its topic. Pure."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from quackmq import limits
from quackmq.errors import CorruptBatch, NoSubscriber, RecordTooLarge
from quackmq.model.topic import Topic
from quackmq.records.batch import Batch


def check_publishable(
    topic: Topic, batch: Batch, count_subscriptions: Callable[[UUID], int]
) -> None:
    """Raise CorruptBatch, RecordTooLarge or NoSubscriber if a topic does not accept a batch."""
    check_records(batch)
    policy = topic.policy
    if policy.batch_bytes is not None and batch.size > policy.batch_bytes:
        raise RecordTooLarge(
            f"a batch of {batch.size} bytes; topic {topic.name} accepts at most "
            f"{policy.batch_bytes}: send smaller batches"
        )
    if policy.needs_subscriber and not count_subscriptions(topic.id):
        raise NoSubscriber(
            f"topic {topic.name} accepts no records while it has no subscription: subscribe first"
        )


def check_records(batch: Batch) -> None:
    """Raise CorruptBatch for a batch without records, or with a header that contradicts itself.
    Raise RecordTooLarge for more records than a reader of single messages should have to decode."""
    if batch.record_count < 1 or batch.record_count != batch.last_offset_delta + 1:
        raise CorruptBatch(
            f"the batch says {batch.record_count} records and a last offset delta of "
            f"{batch.last_offset_delta}"
        )
    if batch.record_count > limits.PUBLISHED_RECORDS_PER_BATCH:
        raise RecordTooLarge(
            f"a batch of {batch.record_count} records; {limits.PUBLISHED_RECORDS_PER_BATCH} is the "
            "most: send smaller batches"
        )
