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
    """Hold files, and the ids of the broker's plans that pin them."""

    files: Files
    ids: tuple[str, ...] = ()


def plan(broker: Http, topics: Mapping[str, str], lease_ms: int = limits.SPARK_PLAN_MS) -> Plan:
    """Pin the archived files of topics for `lease_ms`; return them. `topics` maps names to ids.

    If the broker has too many plans, return the topic's files without a pin. A topic that is
    deleted, and a broker without an archive, give no files: then all records are read from the
    broker."""
    found: Files = {}
    ids: list[str] = []
    for name, topic_id in topics.items():
        target = path_of("topics", name, "archive", "plans")
        try:
            made = broker.post(target, {"for_ms": lease_ms}).json
            ids.append(made["plan"])
            pages = _pages(broker, made, path_of("archive", "plans", made["plan"]))
            found |= _files(pages, name, topic_id)
        except LimitReached:
            found |= files_now(broker, name, topic_id)
        except NotFound:
            continue  # reading the topic raises the error
        except OtherFailure as error:
            if error.reason not in _NO_ARCHIVE:
                raise
    return Plan(found, tuple(ids))


def held(broker: Http, plan_id: str, topics: Mapping[str, str]) -> Plan:
    """Return the files of a plan that another process holds and releases. If that plan has ended,
    make a new one."""
    target = path_of("archive", "plans", plan_id)
    try:
        first = broker.get(target).json
        pages = _pages(broker, first, target)
        return Plan(_files(pages, first["topic"], topics.get(first["topic"], "")))
    except NotFound:
        return plan(broker, topics)


def release(broker: Http, made: Plan) -> None:
    """End the plans of `made`: nothing reads their files any more."""
    for plan_id in made.ids:
        try:
            broker.ask("DELETE", path_of("archive", "plans", plan_id))
        except NotFound:
            continue  # the plan had ended already


def files_now(broker: Http, topic: str, topic_id: str) -> Files:
    """Return the present archived files of a topic, without a pin: the broker may remove them at
    any time. Return none if there is no topic or no archive."""
    target = path_of("topics", topic, "archive")
    try:
        return _files(_pages(broker, broker.get(target).json, target), topic, topic_id)
    except NotFound:
        return {}
    except OtherFailure as error:
        if error.reason not in _NO_ARCHIVE:
            raise
        return {}


def _pages(broker: Http, first: Any, target: str) -> Iterator[Any]:
    page = first
    while True:
        yield page
        following = page.get("next_partition")
        if following is None:
            return
        page = broker.get(target, from_partition=following).json


def _files(pages: Iterator[Any], topic: str, topic_id: str) -> Files:
    found: Files = {}
    for page in pages:
        if page["topic_id"] != topic_id:
            return {}
        for partition in page["partitions"]:
            files = _files_of(page["directory"], partition)
            if files:
                found[topic, int(partition["partition"])] = files
    return found


def _files_of(directory: str, partition: Any) -> tuple[File, ...]:
    lost = [(each["first_offset"], each["next_offset"]) for each in partition["quarantined"]]
    return tuple(
        File(
            name=each["name"],
            path=os.path.join(directory, str(partition["partition"]), each["name"]),
            is_edge=each["first_offset"] < partition["first_offset"],
            first=max(each["first_offset"], partition["first_offset"]),
            next=each["next_offset"],
            size=each["size"],
            tail_bytes=each["tail_bytes"],
            tail_crc32c=each["tail_crc32c"],
            least_timestamp_ms=each["least_timestamp_ms"],
            greatest_timestamp_ms=each["greatest_timestamp_ms"],
            lost=tuple(
                (first, end)
                for first, end in lost
                if first < each["next_offset"] and end > each["first_offset"]
            ),
        )
        for each in partition["files"]
    )
