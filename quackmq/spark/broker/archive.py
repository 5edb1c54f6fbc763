"""Ask the broker for the archived files of topics, by partition.

A **plan** pins the files that it lists for a while: merges and trims do not remove them. A reader
whose plan has ended, or whose broker was restarted, loses no records: it asks for the files again.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quackmq.errors import LimitReached, NotFound
from quackmq.spark import limits
from quackmq.spark.broker.http import Http, OtherFailure, path_of
from quackmq.spark.source.splits import File

#: The files of each topic and partition, in the order of their offsets.
Files = dict[tuple[str, int], Sequence[File]]

#: The error codes of a broker that has no archive, or is older than the archive.
_NO_ARCHIVE: Final = frozenset({"unknown_route", "no_archive"})


class Plan(NamedTuple):
    """The files of topics, and the ids of the broker's plans that pin them."""

    files: Files
    ids: tuple[str, ...] = ()


def plan(broker: Http, topics: Mapping[str, str], lease_ms: int = limits.SPARK_PLAN_MS) -> Plan:
    """Pin the archived files of topics for `lease_ms`; return them. `topics` maps names to ids.

    If the broker has too many plans, return the topic's files without a pin. A topic that is
    deleted, and a broker without an archive, give no files: then all records are read from the
    broker."""
    files: Files = {}
    ids: list[str] = []
    for name, topic_id in topics.items():
        target = path_of("topics", name, "archive", "plans")
        try:
            created = broker.post(target, {"for_ms": lease_ms}).json
            ids.append(created["plan"])
            pages = _fetch_pages(broker, created, path_of("archive", "plans", created["plan"]))
            files |= _parse_pages(pages, name, topic_id)
        except LimitReached:
            files |= list_current_files(broker, name, topic_id)
        except NotFound:
            continue  # reading the topic raises the error
        except OtherFailure as error:
            if error.reason not in _NO_ARCHIVE:
                raise
    return Plan(files, tuple(ids))


def files_of_plan(broker: Http, plan_id: str, topics: Mapping[str, str]) -> Plan:
    """Return the files of a plan that another process made and will release. If that plan has
    ended, make a new one."""
    target = path_of("archive", "plans", plan_id)
    try:
        first = broker.get(target).json
        pages = _fetch_pages(broker, first, target)
        return Plan(_parse_pages(pages, first["topic"], topics.get(first["topic"], "")))
    except NotFound:
        return plan(broker, topics)


def release(broker: Http, plan: Plan) -> None:
    """Release the plan: its files may be deleted from now on."""
    for plan_id in plan.ids:
        try:
            broker.request("DELETE", path_of("archive", "plans", plan_id))
        except NotFound:
            continue  # the plan had ended already


def list_current_files(broker: Http, topic: str, topic_id: str) -> Files:
    """Return the present archived files of a topic, without a pin: the broker may remove them at
    any time. Return none if there is no topic or no archive."""
    target = path_of("topics", topic, "archive")
    try:
        return _parse_pages(_fetch_pages(broker, broker.get(target).json, target), topic, topic_id)
    except NotFound:
        return {}
    except OtherFailure as error:
        if error.reason not in _NO_ARCHIVE:
            raise
        return {}


def _fetch_pages(broker: Http, first: Any, target: str) -> Iterator[Any]:
    page = first
    while True:
        yield page
        next_partition = page.get("next_partition")
        if next_partition is None:
            return
        page = broker.get(target, from_partition=next_partition).json


def _parse_pages(pages: Iterator[Any], topic: str, topic_id: str) -> Files:
    files_by_partition: Files = {}
    for page in pages:
        if page["topic_id"] != topic_id:
            return {}
        for partition in page["partitions"]:
            files = _parse_files(page["directory"], partition)
            if files:
                files_by_partition[topic, int(partition["partition"])] = files
    return files_by_partition


def _parse_files(directory: str, partition: Any) -> tuple[File, ...]:
    unreadable = [(file["first_offset"], file["next_offset"]) for file in partition["quarantined"]]
    return tuple(
        File(
            name=file["name"],
            path=os.path.join(directory, str(partition["partition"]), file["name"]),
            is_edge=file["first_offset"] < partition["first_offset"],
            first=max(file["first_offset"], partition["first_offset"]),
            next=file["next_offset"],
            size=file["size"],
            tail_bytes=file["tail_bytes"],
            tail_crc32c=file["tail_crc32c"],
            least_timestamp_ms=file["least_timestamp_ms"],
            greatest_timestamp_ms=file["greatest_timestamp_ms"],
            lost=tuple(
                (first, end)
                for first, end in unreadable
                if first < file["next_offset"] and end > file["first_offset"]
            ),
        )
        for file in partition["files"]
    )
