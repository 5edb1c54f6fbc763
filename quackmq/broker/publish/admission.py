"""Check a batch against the policy of its topic. Pure."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.errors import CorruptBatch, NoSubscriber, RecordTooLarge
from quackmq.model.topic import Topic
from quackmq.records.batch import Batch
from quackmq.records.codec import find_larger_value


def check_publishable(
    topic: Topic, batch: Batch, count_subscriptions: Callable[[UUID], int]
) -> None:
    """Raise CorruptBatch, RecordTooLarge or NoSubscriber if a topic does not accept a batch."""
    check_records(batch)
    policy = topic.policy
    if policy.batch_bytes is not None or policy.entry_bytes is not None:
        check_sizes(topic, batch)
    if policy.needs_subscriber and not count_subscriptions(topic.id):
        raise NoSubscriber(
            f"topic {topic.name} accepts no records while it has no subscription: subscribe first"
        )


def check_sizes(topic: Topic, batch: Batch) -> None:
    """Raise RecordTooLarge if a batch, or the value of one of its records, is larger than the
    topic accepts."""
    policy = topic.policy
    if policy.batch_bytes is not None and batch.size > policy.batch_bytes:
        raise RecordTooLarge(
            f"a batch of {batch.size} bytes; topic {topic.name} accepts at most "
            f"{policy.batch_bytes}: send smaller batches"
        )
    if policy.entry_bytes is None:
        return
    is_compressed = batch.compression != "none"
    try:
        size = find_larger_value(
            batch,
            policy.entry_bytes,
            max_bytes=limits.CHECKED_BATCH_BYTES if is_compressed else shared_limits.BATCH_BYTES,
        )
    except CorruptBatch as error:
        # Kafka clients repeat a batch that was refused as corrupt. This one would never pass.
        raise RecordTooLarge(
            f"cannot check the entries of a batch for topic {topic.name}, which accepts at most "
            f"{policy.entry_bytes} bytes each: {error}: send smaller batches"
        ) from error
    if size is not None:
        raise RecordTooLarge(
            f"an entry of {size} bytes; topic {topic.name} accepts at most {policy.entry_bytes}"
        )


def check_records(batch: Batch) -> None:
    """Raise CorruptBatch for a batch without records, or with a header that contradicts itself.
    Raise RecordTooLarge for more records than a reader of single messages should have to decode."""
    if batch.record_count < 1 or batch.record_count != batch.last_offset_delta + 1:
        raise CorruptBatch(
            f"the batch says {batch.record_count} records and a last offset delta of "
            f"{batch.last_offset_delta}"
        )
    if batch.record_count > shared_limits.PUBLISHED_RECORDS_PER_BATCH:
        raise RecordTooLarge(
            f"a batch of {batch.record_count} records; "
            f"{shared_limits.PUBLISHED_RECORDS_PER_BATCH} is the most: send smaller batches"
        )
