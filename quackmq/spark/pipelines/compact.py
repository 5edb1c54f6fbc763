"""Merge small archive files into large ones on all of Spark's cores, while the broker runs.

The archive's own planner chooses the merges (`quackmq.archive.merging.planner`). Each merge is a
Spark task (`merge_tasks.task`). The driver offers the merged file to the broker. The broker
compares it with the files that it replaces, record by record. It puts the file in their place if
the manifest still has the version of the plan. Archiving, merging and reading go on meanwhile. If
the broker or another program has merged the same files first, the new file is swept, and the topic
is planned again.

No record is lost, doubled or moved, whichever process is killed and whenever. A merge that is in
its place stays, and the next run continues from there. Fewer files are not promised if new ones
come faster than old ones are merged: a run does not merge files that were archived after it began.

Workers write to the archive's directory: they run on the broker's machine, or share its disk.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import SparkSession

from quackmq import limits as shared_limits
from quackmq.archive.merging.planner import Merge, MergeSettings, plan
from quackmq.errors import (
    InvalidRequest,
    StateChanged,
    StorageError,
    UnknownPlan,
    UnknownTopic,
)
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, Http, find_broker, path_of
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.merge_tasks.plan import Listed, Plan, all_topics, fetch
from quackmq.spark.pipelines.merge_tasks.task import (
    Damaged,
    Failed,
    Made,
    Order,
    Outcome,
    carry_out,
)
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report

SUMMARY: Final = "merge small files of the archive into large ones, beside a broker that goes on"

_COLUMNS: Final = ("topic", "files before", "files after", "bytes before", "bytes after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option(
        "whose archive; without it, that of all topics", default=(), metavar="TOPIC"
    )
    target_bytes: int = option(
        "about how large files should become",
        default=shared_limits.MERGE_TARGET_BYTES,
        metavar="BYTES",
    )
    by_day: bool = option("merge only what was appended on the same day (UTC)", default=False)
    dry_run: bool = option("tell what would be merged, and change nothing", default=False)


@dataclass(frozen=True, slots=True)
class Compacted:
    """Count the files and bytes of a topic's archive, up to the end that it had when the run began.

    - `merges`: merged files that the broker has put in their place.
    - `beaten`: merges without effect, because another program had merged the same files.
    - `damaged`: files that cannot be read; they are left unchanged."""

    topic: str
    files_before: int
    bytes_before: int
    files_after: int
    bytes_after: int
    merges: int = 0
    beaten: int = 0
    damaged: tuple[str, ...] = ()


def run(job: Job, options: Options) -> Report:
    settings = settings_of(options.target_bytes, options.by_day)
    access = find_broker(job.address)
    with access.connect() as broker:
        names = list(dict.fromkeys(options.topics))
        # Raise UnknownTopic for a named topic before any work begins.
        listed = [fetch(broker, name) for name in names] if names else _look_at_all(broker)
    if options.dry_run:
        return _report(
            [_foreseen(each, settings) for each in listed], "what the first plan would make of it"
        )
    done: list[Compacted] = []
    for each in listed:
        work = _Compaction(job.spark, access, each, settings, job.tell, job.stopping)
        try:
            done.append(work.run())
        except UnknownTopic:
            if names:
                raise
            # The topic was deleted meanwhile, and the user did not name it.
        job.check()
    return _report(done, "small files into large ones, as far as was archived when this began")


def compact(
    spark: SparkSession,
    topic: str,
    *,
    bootstrap_servers: str,
    target_bytes: int = shared_limits.MERGE_TARGET_BYTES,
    by_day: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Compacted:
    """Compact one topic in the caller's Spark session; return the counts.

    Raise UnknownTopic. Raise StorageError if workers cannot work in the archive's directory. Raise
    StateChanged if other programs merged the same files first, several times in a row."""
    access = find_broker(bootstrap_servers)
    with access.connect() as broker:
        listed = fetch(broker, topic)
    settings = settings_of(target_bytes, by_day)
    return _Compaction(spark, access, listed, settings, tell, threading.Event()).run()


def settings_of(target_bytes: int, by_day: bool) -> MergeSettings:
    """Return the settings of the planner for a compaction. Raise InvalidRequest."""
    if not 1 <= target_bytes <= shared_limits.ARCHIVE_OFFERED_BYTES:
        raise InvalidRequest(
            f"target_bytes cannot be {target_bytes}: 1 to {shared_limits.ARCHIVE_OFFERED_BYTES} are"
        )
    return MergeSettings(
        target_bytes=target_bytes,
        growth=limits.COMPACT_GROWTH,
        most_files=shared_limits.ARCHIVE_REPLACED_FILES,
        by_day=by_day,
    )


@dataclass
class _Compaction:
    """Compact one topic. Use an instance once, from one thread."""

    spark: SparkSession
    access: Access
    begun: Listed
    settings: MergeSettings
    tell: Callable[[str], None]
    stopping: threading.Event
    merges: int = 0
    beaten: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def run(self) -> Compacted:
        ends = _ends(self.begun)
        with self.access.connect() as broker:
            futile = 0
            while not self.stopping.is_set():
                before = self.merges + len(self.damaged)
                if not self._round(broker, ends):
                    break
                futile = 0 if self.merges + len(self.damaged) > before else futile + 1
                if futile == limits.COMPACT_ATTEMPTS:
                    raise StateChanged(
                        f"topic {self.begun.topic}: others were faster with all that was planned, "
                        f"{futile} times in a row: is it being compacted twice?"
                    )
            return self._compacted(fetch(broker, self.begun.topic), ends)

    def _round(self, broker: Http, ends: dict[int, int]) -> bool:
        """Plan once and run the merges. Return whether there was anything to merge."""
        with Plan(self.access, self.begun.topic) as held:
            self._check_same(held.listed)
            merges = list(_planned(held.listed, self.settings, self.damaged, ends))
            if not merges:
                return False
            orders = [
                Order(self.begun.topic, held.listed.directory, held.id, merge) for merge in merges
            ]
            self._carry_out(broker, orders)
            return True

    def _carry_out(self, broker: Http, orders: Sequence[Order]) -> None:
        """Run all merges of a plan. Each is a Spark job of its own, so that its file is offered as
        soon as it is made."""
        context = self.spark.sparkContext
        group = f"quackmq-compact-{uuid.uuid4().hex}"

        def job(order: Order) -> Outcome:
            context.setJobGroup(group, f"compact {order.topic}", interruptOnCancel=True)
            return context.parallelize([order], 1).map(carry_out).collect()[0]

        at_once = min(context.defaultParallelism, len(orders), limits.COMPACT_CONCURRENT_MERGES)
        with ThreadPoolExecutor(at_once, "quackmq-compact") as threads:
            waiting = {threads.submit(job, order): order for order in orders}
            try:
                while waiting and not self.stopping.is_set():
                    self._tell(len(orders), len(waiting))
                    ended, _ = wait(
                        waiting, limits.COMPACT_STOP_CHECK_MS / 1000, return_when=FIRST_COMPLETED
                    )
                    for future in ended:
                        if self.stopping.is_set():
                            break  # the job may have been cancelled
                        self._settle(broker, waiting.pop(future), future)
            finally:
                for future in waiting:
                    future.cancel()
                if waiting:
                    context.cancelJobGroup(group)

    def _settle(self, broker: Http, order: Order, future: Future[Outcome]) -> None:
        outcome = future.result()
        if isinstance(outcome, Failed):
            raise StorageError(outcome.why)
        if isinstance(outcome, Damaged):
            self.damaged[outcome.name] = outcome.why
        elif isinstance(outcome, Made) and self._offer(broker, order, outcome):
            self.merges += 1
        else:
            self.beaten += 1

    def _offer(self, broker: Http, order: Order, made: Made) -> bool:
        """Offer a merged file to the broker; return whether the broker took it. A slow broker is
        asked again. It may then refuse the repeat, because it took the file the first time: that
        counts as taken."""
        merge = order.merge
        target = path_of(
            *("topics", order.topic, "archive", "partitions", merge.key.partition, "replace")
        )
        asked = {"version": merge.version, "old": merge.names, "new": [made.name]}
        try:
            broker.request("POST", target, asked, max_timeouts=limits.SPARK_COMMIT_WAITS)
        except (StateChanged, UnknownPlan, InvalidRequest) as error:
            if _is_merged(fetch(broker, order.topic), merge):
                return True
            if isinstance(error, InvalidRequest):
                raise
            return False
        return True

    def _check_same(self, listed: Listed) -> None:
        if listed.topic_id != self.begun.topic_id:
            raise UnknownTopic(f"topic {listed.topic} was deleted and made anew meanwhile")

    def _tell(self, planned: int, waiting: int) -> None:
        self.tell(
            f"{self.begun.topic}: {planned - waiting} of {planned} merges done, "
            f"{self.merges} in their place"
        )

    def _compacted(self, ended: Listed, ends: dict[int, int]) -> Compacted:
        self._check_same(ended)
        return Compacted(
            self.begun.topic,
            *_amount(self.begun, ends),
            *_amount(ended, ends),
            self.merges,
            self.beaten,
            tuple(self.damaged.values()),
        )


# --- the archive, and its merges -----------------------------------------------------------------


def _look_at_all(broker: Http) -> list[Listed]:
    found: list[Listed] = []
    for name in all_topics(broker):
        try:
            found.append(fetch(broker, name))
        except UnknownTopic:
            continue  # it was deleted meanwhile
    return found


def _ends(listed: Listed) -> dict[int, int]:
    """Return the end of the archive by partition. Partitions may be added later: they are not
    compacted."""
    return {each.key.partition: each.next_offset for each in listed.partitions}


def _amount(listed: Listed, ends: dict[int, int]) -> tuple[int, int]:
    """Count the files and bytes up to the given ends."""
    files = [
        file
        for each in listed.partitions
        for file in each.files
        if file.first_offset < ends.get(each.key.partition, 0)
    ]
    return len(files), sum(file.size for file in files)


def _planned(
    listed: Listed, settings: MergeSettings, excluded: dict[str, str], ends: dict[int, int]
) -> Iterator[Merge]:
    for each in listed.partitions:
        for merge in plan(each, settings, excluded):
            if merge.next_offset <= ends.get(each.key.partition, 0):
                yield merge


def _is_merged(listed: Listed, merge: Merge) -> bool:
    """Return whether a new file covers exactly the range of a merge."""
    files = listed.partitions[merge.key.partition].files
    return any(
        (file.first_offset, file.next_offset) == (merge.first_offset, merge.next_offset)
        and file.name not in merge.names
        for file in files
    )


def _foreseen(listed: Listed, settings: MergeSettings) -> Compacted:
    """Return the result that the first plan would have. The size after a merge is not known, so it
    is the size before."""
    ends = _ends(listed)
    files, size = _amount(listed, ends)
    merges = list(_planned(listed, settings, {}, ends))
    gone = sum(len(merge.files) for merge in merges)
    return Compacted(listed.topic, files, size, files - gone + len(merges), size, len(merges))


def _report(done: Sequence[Compacted], title: str) -> Report:
    rows = [
        (each.topic, each.files_before, each.files_after, each.bytes_before, each.bytes_after)
        for each in done
    ]
    facts = {
        "merges": sum(each.merges for each in done),
        "beaten by others": sum(each.beaten for each in done),
        "damaged files": [why for each in done for why in each.damaged],
    }
    return Report(title, _COLUMNS, rows, facts, is_good=not facts["damaged files"])
