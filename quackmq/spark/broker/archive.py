"""What the broker tells of its archive: the files of topics, by partition.

A **plan** keeps the files that it lists where they are for a while, whatever is merged and trimmed.
A plan that is over, or whose broker was restarted, costs its reader another look, no records.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quackmq.errors import LimitReached, NotFound
from quackmq.spark import limits
from quackmq.spark.broker.http import Http, OtherFailure, path_of
from quackmq.spark.source.splits import File

#: By topic and partition, by offset.
Files = dict[tuple[str, int], Sequence[File]]

#: Why there is no archive to be told of: a broker without one, or of an earlier version.
_NO_ARCHIVE: Final = frozenset({"unknown_route", "no_archive"})


class Plan(NamedTuple):
    """Files, and the ids by which the broker knows the plans that keep them."""

    files: Files
    ids: tuple[str, ...] = ()


def plan(broker: Http, topics: Mapping[str, str], lease_ms: int = limits.SPARK_PLAN_MS) -> Plan:
    """The files of topics, by name with their ids, which stay for so long, unless too many plans
    are about. None of a topic that is gone, or where there is no archive: then the broker is asked
    for everything."""
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
            continue  # whoever reads the topic hears of it
        except OtherFailure as error:
            if error.reason not in _NO_ARCHIVE:
                raise
    return Plan(found, tuple(ids))


def held(broker: Http, plan_id: str, topics: Mapping[str, str]) -> Plan:
    """The files of a plan that somebody else holds, and lets go of. If it is over, another one."""
    target = path_of("archive", "plans", plan_id)
    try:
        first = broker.get(target).json
        pages = _pages(broker, first, target)
        return Plan(_files(pages, first["topic"], topics.get(first["topic"], "")))
    except NotFound:
        return plan(broker, topics)


def release(broker: Http, made: Plan) -> None:
    """Nobody reads by a plan any more."""
    for plan_id in made.ids:
        try:
            broker.ask("DELETE", path_of("archive", "plans", plan_id))
        except NotFound:
            continue  # it was over already


def files_now(broker: Http, topic: str, topic_id: str) -> Files:
    """The files of a topic as they are now; they may go at any time."""
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
