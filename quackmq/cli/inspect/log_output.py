"""Print the results of `quackmq log`: tables, batches and records, and findings.

Data from peers is printed through `text`, which escapes control characters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import orjson

from quackmq.cli.text import format_bytes, format_time, pluralize, progress_on_stderr, table
from quackmq.disk.real import RealDisk
from quackmq.errors import (
    CorruptBatch,
    DamagedStore,
    InvalidRequest,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.log_transactions import TransactionBoundary, read_marker
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic
from quackmq.records import codec
from quackmq.records.batch import NO_PRODUCER_ID, Batch, Record
from quackmq.stores.local.files.format import (
    FORMAT_VERSION,
    AppendEntry,
    ChangeEntry,
    Entry,
    TrimEntry,
)
from quackmq.stores.local.files.format import entries as entries_of
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.journal import slot_path
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.inspect.directory import FrameAt, Inspection
from quackmq.stores.local.inspect.findings import Finding, Kind
from quackmq.stores.local.inspect.segments import StoredBatch
from quackmq.stores.local.inspect.verify import Tally, Verification
from quackmq.stores.local.segmented_log import SegmentedLog


def inspect_log(args: argparse.Namespace) -> bool:
    """Run `ls`, `dump` or `verify`; return whether there is damage. Raises StoreLocked,
    NewerFormat, UnusableDirectory, NotFound, InvalidRequest or OSError."""
    with ExitStack() as opened:
        disk = RealDisk(args.directory, read_only=True)
        opened.callback(disk.close)
        inspection = Inspection(disk)
        opened.callback(inspection.close)
        match args.action:
            case "ls":
                return list_topics(inspection, as_json=args.json)
            case "verify":
                return verify(inspection, deep=args.deep)
        if args.journal:
            if args.topic is not None or args.start or args.records:
                raise InvalidRequest("--journal can only be combined with --limit")
            return dump_journal(inspection, args.limit)
        return dump(inspection, args.topic, args.start, args.limit, with_records=args.records)


# --- ls ------------------------------------------------------------------------------------------


def list_topics(inspection: Inspection, *, as_json: bool) -> bool:
    """Print the state of the store and its topics; return whether there is damage."""
    if as_json:
        print(orjson.dumps(_as_json(inspection), option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(_state_lines(inspection)))
        rows = list(_topic_rows(inspection))
        print("\n".join(table(rows, right_aligned=range(1, 7))))
        for finding in inspection.findings:
            print(finding)
    return inspection.damaged


def _state_lines(inspection: Inspection) -> Iterator[str]:
    """Yield the lines about the store as a whole. Without a checkpoint only its format is known."""
    meta, header = inspection.meta, inspection.checkpoint
    cluster_id = "unknown" if meta is None else meta.cluster_id
    version = FORMAT_VERSION if meta is None else meta.format
    yield f"format {version}, cluster {cluster_id}"
    if header is None:
        return
    yield f"run {header.run}, leader epoch {header.epoch}, sync {header.sync}"
    if header.clean:
        yield "closed cleanly"
    else:
        yield f"not closed: {inspection.frames} journal frames after the checkpoint"


def _topic_rows(inspection: Inspection) -> Iterator[Sequence[str]]:
    """Yield the heading and one row for each partition. The id and the policy of a topic are in the
    row of its partition 0 only."""
    yield ("TOPIC", "PARTITION", "FIRST", "STABLE", "NEXT", "BYTES", "SEGMENTS", "ID", "POLICY")
    for topic in _sorted_topics(inspection):
        policy = " ".join(
            f"{name}={value}" for name, value in _changed_policy_fields(topic.policy).items()
        )
        for log in _logs_of(inspection, topic):
            first = log.key.partition == 0
            yield (
                topic.name,
                str(log.key.partition),
                str(log.first_offset),
                str(log.stable_offset),
                str(log.high_watermark),
                str(log.size),
                str(len(log.segments)),
                str(topic.id) if first else "",
                policy if first else "",
            )


def _as_json(inspection: Inspection) -> dict[str, Any]:
    """Return what `ls --json` prints."""
    meta, header = inspection.meta, inspection.checkpoint
    return {
        "format": FORMAT_VERSION if meta is None else meta.format,
        "cluster_id": None if meta is None else meta.cluster_id,
        "run": None if header is None else header.run,
        "leader_epoch": None if header is None else header.epoch,
        "sync": None if header is None else header.sync,
        "closed": None if header is None else header.clean,
        "frames_behind_checkpoint": inspection.frames,
        "topics": [
            {
                "name": topic.name,
                "id": str(topic.id),
                "created_ms": topic.created_ms,
                "policy": _changed_policy_fields(topic.policy),
                "partitions": [
                    {
                        "partition": log.key.partition,
                        "first_offset": log.first_offset,
                        "stable_offset": log.stable_offset,
                        "next_offset": log.high_watermark,
                        "bytes": log.size,
                        "segments": len(log.segments),
                        "open_transactions": [
                            {"producer_id": producer_id, "first_offset": first_offset}
                            for producer_id, first_offset in log.transactions.open.items()
                        ],
                    }
                    for log in _logs_of(inspection, topic)
                ],
            }
            for topic in _sorted_topics(inspection)
        ],
        "findings": inspection.findings,
    }


def _sorted_topics(inspection: Inspection) -> list[Topic]:
    return [topic for _, topic in sorted(inspection.catalog.topics.items())]


def _logs_of(inspection: Inspection, topic: Topic) -> Iterator[SegmentedLog]:
    for partition in range(topic.partitions):
        yield inspection.logs[PartitionKey(topic.id, partition)]


def _changed_policy_fields(policy: Policy) -> dict[str, Any]:
    """Return the fields that differ from the default."""
    values = ((each, getattr(policy, each.name)) for each in fields(policy))
    return {each.name: value for each, value in values if value != each.default}


# --- dump ----------------------------------------------------------------------------------------


def dump(
    inspection: Inspection,
    selector: str | None,
    start: int,
    limit: int | None,
    *,
    with_records: bool,
) -> bool:
    """Print the batches of the selected partitions, from offset `start` on, and damaged ranges in
    their place. Return whether there is damage. `limit` is the number of batches or, with records,
    of records."""
    is_damaged = _print_findings(inspection)
    remaining = limit
    for topic, log in _select_logs(inspection, selector):
        name = f"{topic.name}:{log.key.partition}"
        if selector is not None and start < log.first_offset:
            print(
                f"{name}: offsets {start} to {log.first_offset - 1} are not in the log any more: "
                "they were archived or deleted; `quackmq archive ls` lists the archive",
                file=sys.stderr,
            )
        # Batches before the first offset are trimmed; their files may not be removed yet.
        for batch_or_finding in inspection.segments.batches(log, max(start, log.first_offset)):
            if remaining == 0:
                return is_damaged
            if isinstance(batch_or_finding, Finding):
                is_damaged = True
                print(f"{name} {batch_or_finding}")
                continue
            print(f"{name} {_batch_line(batch_or_finding, log.first_offset)}")
            printed = 1
            if with_records:
                first_offset = max(start, log.first_offset)
                printed = _print_records(batch_or_finding.batch, first_offset, remaining)
            remaining = None if remaining is None else remaining - printed
    return is_damaged


def _select_logs(inspection: Inspection, text: str | None) -> Iterator[tuple[Topic, SegmentedLog]]:
    """Yield the partitions of TOPIC[:PARTITION], or all. Raises UnknownTopic or
    UnknownPartition."""
    if text is None:
        for topic in _sorted_topics(inspection):
            yield from ((topic, log) for log in _logs_of(inspection, topic))
        return
    name, colon, number = text.partition(":")
    selected_topic = inspection.catalog.topics.get(name)
    if selected_topic is None:
        raise UnknownTopic(f"there is no topic {name!r} in the directory")
    if not colon:
        yield from ((selected_topic, log) for log in _logs_of(inspection, selected_topic))
        return
    if not (number.isascii() and number.isdigit() and int(number) < selected_topic.partitions):
        partitions = pluralize(selected_topic.partitions, "partition")
        raise UnknownPartition(f"topic {name} has {partitions}, not {number!r}")
    yield selected_topic, inspection.logs[PartitionKey(selected_topic.id, int(number))]


def _batch_line(stored_batch: StoredBatch, first_offset: int) -> str:
    """Return a line about one batch: its offsets, place, producer and times. `first_offset` is the
    first offset of the partition; a batch may start before it."""
    batch = stored_batch.batch
    parts = [
        f"offsets {batch.base_offset} to {batch.next_offset - 1}",
        f"{batch.size} bytes at {stored_batch.path}:{stored_batch.position}",
        f"compression {batch.compression}",
        f"leader epoch {batch.leader_epoch}",
    ]
    if batch.producer_id != NO_PRODUCER_ID:
        parts.append(
            f"producer {batch.producer_id} epoch {batch.producer_epoch} "
            f"sequence {batch.base_sequence}"
        )
    parts.append(f"{format_time(batch.base_timestamp)} to {format_time(batch.max_timestamp)}")
    if batch.base_offset < first_offset:
        parts.append(f"trimmed before offset {first_offset}")
    if batch.is_transactional:
        parts.append("transactional")
    if batch.is_control:
        parts.append(_describe_marker(batch))
    return ", ".join(parts)


def _describe_marker(batch: Batch) -> str:
    try:
        return f"marker: {read_marker(batch).name.lower()}"
    except InvalidRequest:
        return "control"


def _print_records(batch: Batch, start: int, limit: int | None) -> int:
    """Print up to `limit` records from offset `start` on; return how many were printed."""
    count = 0
    try:
        for record in codec.decode(batch):
            if record.offset < start:
                continue
            if count == limit:
                break
            print(f"    {_record_line(record)}")
            count += 1
    except CorruptBatch as error:
        print(f"    {Kind.POISON}: the batch cannot be decoded: {error}")
    return count


def _record_line(record: Record) -> str:
    """Return a line about one record: its offset, time, key, value and headers."""
    line = f"{record.offset} {format_time(record.timestamp_ms)} {format_bytes(record.key)} "
    line += format_bytes(record.value)
    for name, value in record.headers:
        line += f" {format_bytes(name.encode())}: {format_bytes(value)}"
    return line


def dump_journal(inspection: Inspection, limit: int | None) -> bool:
    """Print up to `limit` frames of the journal, and findings in their place. Return whether there
    is damage."""
    is_damaged = _print_findings(inspection, without_journal=True)
    remaining = limit
    for frame_or_finding in inspection.journal():
        if remaining == 0:
            return is_damaged
        if isinstance(frame_or_finding, Finding):
            is_damaged = is_damaged or frame_or_finding.kind is Kind.DAMAGE
            print(frame_or_finding)
            continue
        is_damaged = _print_frame(inspection, frame_or_finding) or is_damaged
        remaining = None if remaining is None else remaining - 1
    return is_damaged


def _print_frame(inspection: Inspection, frame_at: FrameAt) -> bool:
    """Print one frame and its entries. Entries from the first undecodable one on are missing.
    Return whether there is such an entry."""
    (slot, position), frame, is_after_checkpoint = frame_at
    print(
        f"{slot_path(slot)}:{position} frame {frame.number}, run {frame.run}, {frame.size} bytes, "
        f"sync {frame.sync.name.lower()}, synced through {frame.synced_through}, "
        f"{'behind' if is_after_checkpoint else 'covered by'} the checkpoint"
    )
    try:
        for entry in entries_of(frame.payload):
            print(f"    {_entry_line(inspection, entry)}")
    except DamagedStore as error:
        print(f"    {Kind.DAMAGE}: {error}")
        return True
    return False


def _entry_line(inspection: Inspection, entry: Entry) -> str:
    """Return a line about one entry of a frame. An append without data refers to bytes that are in
    the segment already."""
    match entry:
        case ChangeEntry(change):
            return f"change {format_bytes(change)}"
        case TrimEntry(key, first_offset):
            return f"trim {_partition_name(inspection, key)} before offset {first_offset}"
        case AppendEntry(descriptor, data):
            path = Segment(descriptor.key, descriptor.segment_base).path
            return (
                f"{'refer to' if data is None else 'append'} "
                f"{_partition_name(inspection, descriptor.key)} "
                f"offsets {descriptor.base_offset} to {descriptor.next_offset - 1}, "
                f"{descriptor.length} bytes for "
                f"{path}:{descriptor.position}, at {format_time(descriptor.append_time_ms)}"
                f"{''.join(map(_describe_boundary, descriptor.boundaries))}"
            )


def _describe_boundary(boundary: TransactionBoundary) -> str:
    verb = "begins" if boundary.marker is None else f"{boundary.marker.name.lower()}s"
    return f", {boundary.offset} {verb} a transaction of producer {boundary.producer_id}"


def _partition_name(inspection: Inspection, key: PartitionKey) -> str:
    topic = inspection.catalog.topics_by_id.get(key.topic_id)
    return f"{key.topic_id if topic is None else topic.name}:{key.partition}"


def _print_findings(inspection: Inspection, *, without_journal: bool = False) -> bool:
    """Print the findings of opening the directory, and return whether there is damage. With
    `without_journal`, leave out those about the journal, because `dump_journal` prints them in
    their place."""
    for finding in inspection.findings:
        if not (without_journal and finding.path.startswith(JOURNAL_DIRECTORY)):
            print(finding)
    return inspection.damaged


# --- verify --------------------------------------------------------------------------------------


def verify(inspection: Inspection, *, deep: bool) -> bool:
    """Check every byte of the directory and print the findings; return whether there is damage."""
    verification = Verification(inspection, deep=deep, progress=progress_on_stderr())
    for finding in verification.findings():
        print(finding, flush=True)
    print(_summary_line(verification.tally))
    return verification.tally.damage > 0


def _summary_line(tally: Tally) -> str:
    """Return the last line: how much was found, and how much was checked."""
    results = [
        pluralize(tally.damage, "damaged range") if tally.damage else "no damage",
        *([pluralize(tally.poison, "undecodable batch", "es")] if tally.poison else []),
        *([pluralize(tally.notes, "note")] if tally.notes else []),
    ]
    checked = [
        pluralize(tally.partitions, "partition"),
        pluralize(tally.segments, "segment"),
        pluralize(tally.batches, "batch", "es"),
        pluralize(tally.bytes, "byte"),
        pluralize(tally.frames, "frame"),
    ]
    return f"{', '.join(results)} in {', '.join(checked)}"
