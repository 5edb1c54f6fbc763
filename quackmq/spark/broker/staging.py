"""Stage rows in tasks, and commit them once in the driver.

Each attempt at a task stages its rows under a unique part name. So an attempt that died, was killed
or ran twice leaves only a part that no commit names. The driver commits the parts whose summaries
reached it:

    attempt 0 of task 0 --- stage --> part 6f0c…  ╲
    attempt 0 of task 1 --- stage --> part 91ab…   ✗ (it died: no summary)    commit (series, turn)
    attempt 1 of task 1 --- stage --> part c3d2…  ╱       ---->  all of it is visible, once

A call or a commit whose response was lost is repeated unchanged, and counts once. A write that was
committed before adds nothing. It is recognised as a repeat:

- A batch of a stream is a repeat if it is the last committed batch and has the same topics. Its
  rows may differ, because they may depend on a clock; another number of rows is logged as a
  warning. An earlier batch raises TurnOutdated.
- A write under a `writeId` is a repeat if its rows have the same digest, in any order. Other rows
  raise StageConflict.

A write without rows is not remembered: the next write under its name may have rows.

Not thread-safe: call from one thread. A `Target` and a `Staged` are values that Spark can send to
tasks and to the driver.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.errors import StageCommitted, StageConflict, TurnOutdated, UnknownStage
from quackmq.spark import limits
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.sink.digest import Digest, merge_digests
from quackmq.spark.sink.encode import EncodedBatch

log = logging.getLogger(__name__)

_OCTET_STREAM: Final = "application/octet-stream"
_PARTITION: Final = struct.Struct(">I")
_SERIES_PREFIX: Final = "spark/"
#: The prefix of the keys of writes with a `writeId`. The topic follows, or a star where rows name
#: their topics. No topic name contains a star, a number sign or a slash.
_NAMED_PREFIX: Final = "spark-write-id/"
_ANY_TOPIC: Final = "*"
_HASHED: Final = "#"
#: The prefix of the keys of writes without a `writeId`. Versions without digests used it for all
#: writes.
_PLAIN_PREFIX: Final = "spark-write/"


@dataclass(frozen=True, slots=True)
class Target:
    """The name of one commit: a key and, for a stream, the turn of a series.

    `name` is the `writeId` of a batch write. `older_key` is the key that versions without digests
    gave to that write."""

    key: str
    series: str | None = None
    turn: int | None = None
    name: str | None = None
    older_key: str | None = None

    def turn_fields(self) -> dict[str, Any]:
        """Return the fields that name the turn in a request; none for a batch write."""
        if self.series is None:
            return {}
        return {"series": self.series, "turn": self.turn}


@dataclass(frozen=True, slots=True)
class Staged:
    """The staged rows of one attempt.

    `summary` is None if the attempt had no rows, or if the target was committed before; in the
    second case `was_committed` is true. `digest` is set for writes with a `writeId`."""

    target: Target
    summary: dict[str, Any] | None
    records: int
    topics: tuple[str, ...]
    digest: Digest | None = None
    was_committed: bool = False


def write_target(topic: str | None, write_id: str | None) -> Target:
    """Return the target of a batch write to a topic. Without a topic, the rows name their topics.
    Without a `writeId`, the key is unique."""
    if write_id is None:
        return Target(f"{_PLAIN_PREFIX}{uuid.uuid4().hex}")
    key = f"{_NAMED_PREFIX}{topic or _ANY_TOPIC}/{write_id}"
    if len(key.encode()) > shared_limits.NAME_BYTES:
        hashed = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        key = f"{_NAMED_PREFIX}{_HASHED}/{hashed}"
    return Target(key, name=write_id, older_key=f"{_PLAIN_PREFIX}{write_id}")


def batch_target(query: str, batch: int, run: str) -> Target:
    """Return the target of a batch of a streaming query."""
    series = _SERIES_PREFIX + query
    return Target(f"{series}/{batch}/{run}", series, batch)


class Part:
    """The part of a stage that one attempt fills."""

    def __init__(self, http: Http, target: Target) -> None:
        self._http = http
        self._target = target
        self._path = path_of("stages", target.key, "parts", uuid.uuid4().hex)
        self._calls = 0
        self._part_summary: dict[str, Any] | None = None
        #: Whether the target was already committed: then nothing more is staged.
        self.is_committed = False

    def add(self, topic: str, batches: Iterable[EncodedBatch]) -> None:
        """Stage batches for partitions of a topic, in as few requests as possible. Raise
        TurnOutdated."""
        chunks: list[bytes] = []
        size = 0
        for partition, batch in batches:
            if chunks and (
                size + len(batch) > shared_limits.STAGE_CALL_BYTES - shared_limits.MIB
                or len(chunks) >= 2 * shared_limits.STAGE_CALL_BATCHES
            ):
                self._stage(topic, chunks)
                chunks, size = [], 0
            chunks += (_PARTITION.pack(partition), batch)
            size += len(batch) + _PARTITION.size
        if chunks:
            self._stage(topic, chunks)

    def staged(self, records: int, topics: Iterable[str], digest: Digest | None) -> Staged:
        """Return what this attempt staged, for the driver. There is no summary if the target was
        committed before."""
        summary = None if self.is_committed else self._part_summary
        names = tuple(sorted(topics))
        return Staged(self._target, summary, records, names, digest, self.is_committed)

    def _stage(self, topic: str, chunks: Sequence[bytes]) -> None:
        """Send one staging call of this part. `chunks` alternate between an encoded partition
        number and a batch. Do nothing if the target was committed before. Raise TurnOutdated if
        a later batch of the query was committed."""
        if self.is_committed:
            return
        query: dict[str, str | int] = {"topic": topic, **self._target.turn_fields()}
        path = f"{self._path}/{self._calls}"
        body = b"".join(chunks)
        try:
            response = self._http.request(
                "PUT", path, query=query, body=body, content_type=_OCTET_STREAM
            )
        except StageCommitted:
            self.is_committed = True
            return
        except TurnOutdated as error:
            raise _outdated_turn_error(self._http, self._target) from error
        self._part_summary = response.json
        self._calls += 1


def commit(http: Http, target: Target, staged: Sequence[Staged]) -> None:
    """Publish the rows that these attempts staged, unless the target was committed before. Raise
    TurnOutdated, StageConflict."""
    if target.series is not None:
        _commit_turn(http, target, staged)
    elif target.name is not None:
        _commit_named(http, target, staged)
    elif _part_summaries(staged):
        _request_commit(http, target, staged, target.key)


def abort(http: Http, target: Target) -> None:
    """Discard the staged rows of a target, if there are any and they are not committed."""
    try:
        http.request("DELETE", path_of("stages", target.key))
    except (UnknownStage, StageConflict):
        return


# --- batches of a stream -------------------------------------------------------------------------


def _commit_turn(http: Http, target: Target, staged: Sequence[Staged]) -> None:
    """Commit a batch of a stream. For a repeated batch, add nothing, compare its topics and log its
    number of rows. Raise TurnOutdated if a later batch was committed. Raise StageConflict if the
    topics differ, or if the broker has forgotten the batch that the tasks found committed."""
    if _are_all_rows_staged(staged):
        try:
            if not _request_commit(http, target, staged, "")["repeated"]:
                return
        except TurnOutdated as error:
            raise _outdated_turn_error(http, target) from error
    last = _fetch_last_turn(http, target)
    if last is not None and target.turn is not None and last["turn"] > target.turn:
        raise _outdated_turn_error(http, target)
    if last is None or last["turn"] != target.turn:
        if any(part.was_committed for part in staged):
            raise _forgotten_error(f"batch {target.turn} of {_query_name(target)}")
        return  # there are no rows
    _check_same_topics(http, target, staged, last)
    row_count = sum(part.records for part in staged)
    level = logging.INFO if row_count == last["records"] else logging.WARNING
    log.log(
        level,
        "batch %s of %s was repeated, with %d rows; it was committed with %d: nothing is added",
        target.turn,
        _query_name(target),
        row_count,
        last["records"],
    )


def _check_same_topics(
    http: Http, target: Target, staged: Sequence[Staged], last: dict[str, Any]
) -> None:
    """Raise StageConflict if a repeated batch has other topics: its rows would be missing there.
    The check is skipped for a repeat without rows, and for a batch that an older version committed
    without its topics."""
    topics = sorted({name for part in staged for name in part.topics})
    if not topics or last["topics"] is None or topics == last["topics"]:
        return
    raise StageConflict(
        f"batch {target.turn} of {_query_name(target)} was committed to "
        f"{_join_names(last['topics'])}, and comes again for {_join_names(topics)}. Nothing was "
        f"written. Run the query with its earlier topics until this batch is done; or make the "
        f"broker forget the query, so that the batch is written to {_join_names(topics)} as well: "
        f"{_forget_command(http, target)}"
    )


def _outdated_turn_error(http: Http, target: Target) -> TurnOutdated:
    """Return the error that names the last committed batch and tells the user what to do."""
    last = _fetch_last_turn(http, target)
    later = "a later one" if last is None else f"batch {last['turn']}"
    return TurnOutdated(
        f"batch {target.turn} of {_query_name(target)} was not written, because {later} was "
        f"already committed. The query was started from a restored or copied checkpoint that is "
        f"older than the last batch it wrote. Start it from its newest checkpoint, or with a new "
        f"checkpointLocation. To write its batches once more instead, make the broker forget the "
        f"query: {_forget_command(http, target)}"
    )


def _fetch_last_turn(http: Http, target: Target) -> dict[str, Any] | None:
    """Return the last committed turn of the series; None if the broker knows none."""
    assert target.series is not None
    try:
        last: dict[str, Any] = http.request("GET", path_of("series", target.series)).json
    except UnknownStage:
        return None
    return last


def _query_name(target: Target) -> str:
    """Return how error messages and logs name the streaming query."""
    return f"the streaming query {(target.series or '').removeprefix(_SERIES_PREFIX)}"


def _forget_command(http: Http, target: Target) -> str:
    """Return the command by which a user makes the broker forget the query."""
    return f"curl -X DELETE http://{http.address}{path_of('series', target.series or '')}"


# --- batch writes with a name --------------------------------------------------------------------


def _commit_named(http: Http, target: Target, staged: Sequence[Staged]) -> None:
    """Commit a write with a `writeId`. Add nothing if a write of this name and these rows was
    committed before. Raise StageConflict if the rows differ, or if the broker has forgotten
    the write that the tasks found committed."""
    digest = merge_digests(part.digest for part in staged if part.digest is not None)
    if _is_repeat_of_older_version(http, target, digest):
        return
    if _are_all_rows_staged(staged):
        try:
            if not _request_commit(http, target, staged, digest.text())["repeated"]:
                return
        except StageConflict:
            # If this name is committed, compare its rows below. Otherwise it is another conflict.
            if _fetch_commit(http, target.key) is None:
                raise
    committed = _fetch_commit(http, target.key)
    if committed is None:
        if any(part.was_committed for part in staged):
            raise _forgotten_error(f"the write {target.name!r}")
        return  # there are no rows
    if committed["contents"] != digest.text():
        raise _other_rows_error(target, committed["records"], digest.records)
    log.info(
        "the write %s was repeated, with %d rows: nothing is added", target.name, digest.records
    )


def _is_repeat_of_older_version(http: Http, target: Target, digest: Digest) -> bool:
    """Return whether a version without digests committed a write of this name. That version did not
    store the topic, so only the number of rows is compared: raise StageConflict if it differs."""
    if target.older_key is None:
        return False
    older_commit = _fetch_commit(http, target.older_key)
    if older_commit is None:
        return False
    if older_commit["records"] != digest.records:
        raise _other_rows_error(target, older_commit["records"], digest.records)
    log.warning(
        "an older version committed a write %s with as many rows (%d): this write counts as its "
        "repeat, and nothing is added",
        target.name,
        digest.records,
    )
    abort(http, target)
    return True


def _other_rows_error(target: Target, committed_rows: int, present_rows: int) -> StageConflict:
    """Return the error for a write id that was used before for other rows."""
    return StageConflict(
        f"writeId {target.name!r} was used before, for other rows: it was committed with "
        f"{committed_rows} rows, and this write has {present_rows}. Nothing was written. Use a "
        f"different id for each write. An id made from a batch's number needs the query's id as "
        f"well, since a query with a new checkpoint counts from 0 again"
    )


def _fetch_commit(http: Http, key: str) -> dict[str, Any] | None:
    """Return the commit of a key; None if the key was not committed."""
    try:
        commit_fields: dict[str, Any] | None = http.get(path_of("stages", key), limit=1).json[
            "commit"
        ]
    except UnknownStage:
        return None
    return commit_fields


# --- both ----------------------------------------------------------------------------------------


def _part_summaries(staged: Sequence[Staged]) -> list[dict[str, Any]]:
    """Return the part summaries of the attempts that staged rows."""
    return [attempt.summary for attempt in staged if attempt.summary is not None]


def _are_all_rows_staged(staged: Sequence[Staged]) -> bool:
    """Return whether all rows are staged. They are not if an attempt found the target committed."""
    return bool(_part_summaries(staged)) and not any(each.was_committed for each in staged)


def _request_commit(
    http: Http, target: Target, staged: Sequence[Staged], contents: str
) -> dict[str, Any]:
    """Request the commit of all staged rows; return the response. Its field `repeated` tells
    whether the commit was made before. `contents` is the digest that the broker keeps with it."""
    response = http.request(
        "POST",
        path_of("stages", target.key, "commit"),
        {"receipts": _part_summaries(staged), "contents": contents, **target.turn_fields()},
        max_timeouts=limits.SPARK_COMMIT_WAITS,
    )
    committed: dict[str, Any] = response.json
    return committed


def _forgotten_error(write: str) -> StageConflict:
    """Return the error for a write whose tasks staged nothing because it was committed, and that
    the broker then forgot. Only the tasks have the rows, so the write must run again."""
    return StageConflict(
        f"{write} was committed when its tasks started, and the broker has forgotten it since: run "
        f"it again"
    )


def _join_names(topics: Sequence[str]) -> str:
    """List up to ten topics for an error message."""
    return ", ".join(topics[:10]) + (" and others" if len(topics) > 10 else "")
