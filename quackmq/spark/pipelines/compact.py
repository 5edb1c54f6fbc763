"""Merge small archive files into large ones on all of Spark's cores, while the broker runs.

The archive's own planner chooses the merges (`quackmq.archive.merging.planner`). Each merge is a
Spark task (`merge_tasks.task`). The driver offers the merged file to the broker. The broker
compares it with the files that it replaces, record by record. It puts the file in their place if
the manifest still has the version of the plan. Archiving, merging and reading continue meanwhile.
If the broker or another program has merged the same files first, the new file is removed, and the
topic is planned again.

No record is lost, doubled or moved, whichever process is killed and whenever. A merge that is in
its place stays, and the next run continues from there. Fewer files are not promised if new ones
come faster than old ones are merged: a run does not merge files that were archived after its start.

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
from quackmq.archive.merging import planner
from quackmq.archive.merging.planner import Merge, MergeSettings
from quackmq.errors import (
    InvalidRequest,
    StateChanged,
    StorageError,
    UnknownPlan,
    UnknownTopic,
)
from quackmq.spark import limits
from quackmq.spark.broker.archive import TopicArchive, fetch_archive
from quackmq.spark.broker.http import Access, Http, find_broker, path_of
from quackmq.spark.broker.metadata import list_topics
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.merge_tasks.plan import MergePlan
from quackmq.spark.pipelines.merge_tasks.task import (
    DamagedFile,
    MergedFile,
    MergeFailed,
    MergeOrder,
    Outcome,
    run_merge,
)
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report

SUMMARY: Final = "merge small archive files into large ones, while the broker runs"

_COLUMNS: Final = ("topic", "files before", "files after", "bytes before", "bytes after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option(
        "the topics to compact (default: all)", default=(), metavar="TOPIC"
    )
    target_bytes: int = option(
        "the approximate size of a merged file",
        default=shared_limits.MERGE_TARGET_BYTES,
        metavar="BYTES",
    )
    by_day: bool = option("merge only records appended on the same day (UTC)", default=False)
    dry_run: bool = option("report what would be merged, and change nothing", default=False)


@dataclass(frozen=True, slots=True)
class Compacted:
    """The files and bytes of a topic's archive, up to the end that it had when the run started.

    - `merges`: merged files that the broker has accepted.
    - `superseded`: merges without effect, because another program had replaced their files first.
    - `damaged`: the reasons why files cannot be read; these files are left unchanged."""

    topic: str
    files_before: int
    bytes_before: int
    files_after: int
    bytes_after: int
    merges: int = 0
    superseded: int = 0
    damaged: tuple[str, ...] = ()


def run(job: Job, options: Options) -> Report:
    """Compact the named topics, or all; return the report. With `dry_run`, only plan. Raise
    UnknownTopic for a named topic that does not exist, and NoBroker."""
    settings = make_settings(options.target_bytes, options.by_day)
    job.wait_for_broker()
    access = find_broker(job.address)
    with access.connect() as broker:
        names = list(dict.fromkeys(options.topics))
        # Raise UnknownTopic for a named topic before any work begins.
        archives = (
            [fetch_archive(broker, name) for name in names]
            if names
            else _fetch_all_archives(broker)
        )
    if options.dry_run:
        return _make_report(
            [_predict_result(archive, settings) for archive in archives],
            "the archives after the first plan",
        )
    results: list[Compacted] = []
    for archive in archives:
        compaction = _Compaction(
            job.spark, access, archive, settings, job.show_progress, job.stopping
        )
        try:
            results.append(compaction.run())
        except UnknownTopic:
            if names:
                raise
            # The topic was deleted meanwhile, and the user did not name it.
        job.check()
    return _make_report(results, "merged files, up to the end of the archives when the run started")


def compact(
    spark: SparkSession,
    topic: str,
    *,
    bootstrap_servers: str,
    target_bytes: int = shared_limits.MERGE_TARGET_BYTES,
    by_day: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Compacted:
    """Compact one topic in the caller's Spark session; return the counts. Call `tell` with a line
    of progress now and then.

    Raise UnknownTopic. Raise StorageError if workers cannot work in the archive's directory. Raise
    StateChanged if other programs merged the same files first, several times in a row."""
    access = find_broker(bootstrap_servers)
    with access.connect() as broker:
        archive = fetch_archive(broker, topic)
    settings = make_settings(target_bytes, by_day)
    return _Compaction(spark, access, archive, settings, tell, threading.Event()).run()


def make_settings(target_bytes: int, by_day: bool) -> MergeSettings:
    """Return the settings of the planner for a compaction. Raise InvalidRequest."""
    if not 1 <= target_bytes <= shared_limits.ARCHIVE_OFFERED_BYTES:
        raise InvalidRequest(
            f"target_bytes cannot be {target_bytes}: set it to 1 to "
            f"{shared_limits.ARCHIVE_OFFERED_BYTES}"
        )
    return MergeSettings(
        target_bytes=target_bytes,
        growth=limits.COMPACT_GROWTH,
        most_files=shared_limits.ARCHIVE_REPLACED_FILES,
        by_day=by_day,
    )


@dataclass
class _Compaction:
    """The compaction of one topic. Use an instance once, from one thread."""

    spark: SparkSession
    access: Access
    start_archive: TopicArchive
    settings: MergeSettings
    tell: Callable[[str], None]
    stopping: threading.Event
    merges: int = 0
    superseded: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def run(self) -> Compacted:
        """Plan and merge until no merge is left or the job stops; return the counts. Files that
        were archived after the start are not merged. Raise StateChanged after `COMPACT_ATTEMPTS`
        rounds in a row without progress."""
        ends = _archive_ends(self.start_archive)
        with self.access.connect() as broker:
            fruitless_rounds = 0
            while not self.stopping.is_set():
                progress_before = self.merges + len(self.damaged)
                if not self._run_round(broker, ends):
                    break
                has_progressed = self.merges + len(self.damaged) > progress_before
                fruitless_rounds = 0 if has_progressed else fruitless_rounds + 1
                if fruitless_rounds == limits.COMPACT_ATTEMPTS:
                    raise StateChanged(
                        f"topic {self.start_archive.topic}: another program merged all planned "
                        f"files first, {fruitless_rounds} times in a row: wait until it ends"
                    )
            return self._make_result(fetch_archive(broker, self.start_archive.topic), ends)

    def _run_round(self, broker: Http, ends: dict[int, int]) -> bool:
        """Plan once and run the merges. Return whether there was anything to merge."""
        with MergePlan(self.access, self.start_archive.topic) as merge_plan:
            self._check_same_topic(merge_plan.archive)
            merges = list(_plan_merges(merge_plan.archive, self.settings, self.damaged, ends))
            if not merges:
                return False
            orders = [
                MergeOrder(
                    self.start_archive.topic, merge_plan.archive.directory, merge_plan.id, merge
                )
                for merge in merges
            ]
            self._run_merges(broker, orders)
            return True

    def _run_merges(self, broker: Http, orders: Sequence[MergeOrder]) -> None:
        """Run all merges of a plan. Each merge is one Spark job, so that its file is offered as
        soon as it is made."""
        context = self.spark.sparkContext
        group = f"quackmq-compact-{uuid.uuid4().hex}"

        def run_in_spark(order: MergeOrder) -> Outcome:
            context.setJobGroup(group, f"compact {order.topic}", interruptOnCancel=True)
            return context.parallelize([order], 1).map(run_merge).collect()[0]

        concurrency = min(context.defaultParallelism, len(orders), limits.COMPACT_CONCURRENT_MERGES)
        with ThreadPoolExecutor(concurrency, "quackmq-compact") as threads:
            pending = {threads.submit(run_in_spark, order): order for order in orders}
            try:
                while pending and not self.stopping.is_set():
                    self._show_progress(len(orders), len(pending))
                    finished, _ = wait(
                        pending, limits.COMPACT_STOP_CHECK_MS / 1000, return_when=FIRST_COMPLETED
                    )
                    for future in finished:
                        if self.stopping.is_set():
                            break  # the job may have been cancelled
                        self._handle_outcome(broker, pending.pop(future), future)
            finally:
                for future in pending:
                    future.cancel()
                if pending:
                    context.cancelJobGroup(group)

    def _handle_outcome(self, broker: Http, order: MergeOrder, future: Future[Outcome]) -> None:
        """Offer a merged file to the broker, and count the outcome. Removed files and a refused
        offer count as `superseded`. Raise StorageError if the merge failed."""
        outcome = future.result()
        if isinstance(outcome, MergeFailed):
            raise StorageError(outcome.reason)
        if isinstance(outcome, DamagedFile):
            self.damaged[outcome.name] = outcome.reason
        elif isinstance(outcome, MergedFile) and self._offer_file(broker, order, outcome):
            self.merges += 1
        else:
            self.superseded += 1

    def _offer_file(self, broker: Http, order: MergeOrder, merged: MergedFile) -> bool:
        """Offer a merged file to the broker; return whether the broker accepted it. The offer is
        repeated if the broker responds too slowly. The broker may refuse the repeat because it
        accepted the first offer: that counts as accepted."""
        merge = order.merge
        path = path_of(
            *("topics", order.topic, "archive", "partitions", merge.key.partition, "replace")
        )
        request = {"version": merge.version, "old": merge.names, "new": [merged.name]}
        try:
            broker.request("POST", path, request, max_timeouts=limits.SPARK_COMMIT_WAITS)
        except (StateChanged, UnknownPlan, InvalidRequest) as error:
            if _is_merged(fetch_archive(broker, order.topic), merge):
                return True
            # Only the other two errors mean that the files have changed, or the plan has ended.
            if isinstance(error, InvalidRequest):
                raise
            return False
        return True

    def _check_same_topic(self, archive: TopicArchive) -> None:
        if archive.topic_id != self.start_archive.topic_id:
            raise UnknownTopic(f"topic {archive.topic} was deleted and made anew meanwhile")

    def _show_progress(self, planned: int, pending: int) -> None:
        self.tell(
            f"{self.start_archive.topic}: {planned - pending} of {planned} merges done, "
            f"{self.merges} accepted"
        )

    def _make_result(self, end_archive: TopicArchive, ends: dict[int, int]) -> Compacted:
        """Return the counts before and after. Raise UnknownTopic if the topic was created again."""
        self._check_same_topic(end_archive)
        return Compacted(
            self.start_archive.topic,
            *_count_files(self.start_archive, ends),
            *_count_files(end_archive, ends),
            self.merges,
            self.superseded,
            tuple(self.damaged.values()),
        )


# --- the archive, and its merges -----------------------------------------------------------------


def _fetch_all_archives(broker: Http) -> list[TopicArchive]:
    """Return the archive of each topic."""
    archives: list[TopicArchive] = []
    for name in list_topics(broker):
        try:
            archives.append(fetch_archive(broker, name))
        except UnknownTopic:
            continue  # the topic was deleted after it was listed
    return archives


def _archive_ends(archive: TopicArchive) -> dict[int, int]:
    """Return the end of the archive by partition. Partitions may be added later: they are not
    compacted."""
    return {partition.key.partition: partition.next_offset for partition in archive.partitions}


def _count_files(archive: TopicArchive, ends: dict[int, int]) -> tuple[int, int]:
    """Return the number of files and bytes that start before the ends."""
    files = [
        file
        for partition in archive.partitions
        for file in partition.files
        if file.first_offset < ends.get(partition.key.partition, 0)
    ]
    return len(files), sum(file.size for file in files)


def _plan_merges(
    archive: TopicArchive, settings: MergeSettings, excluded: dict[str, str], ends: dict[int, int]
) -> Iterator[Merge]:
    """Yield the planner's merges of files up to `ends`. `excluded` are damaged files, with the
    reasons."""
    for partition in archive.partitions:
        for merge in planner.plan(partition, settings, excluded):
            if merge.next_offset <= ends.get(partition.key.partition, 0):
                yield merge


def _is_merged(archive: TopicArchive, merge: Merge) -> bool:
    """Return whether a new file covers exactly the range of a merge."""
    files = archive.partitions[merge.key.partition].files
    return any(
        (file.first_offset, file.next_offset) == (merge.first_offset, merge.next_offset)
        and file.name not in merge.names
        for file in files
    )


def _predict_result(archive: TopicArchive, settings: MergeSettings) -> Compacted:
    """Return the result that the first plan would have. The size after a merge is not known, so it
    is the size before."""
    ends = _archive_ends(archive)
    files, size = _count_files(archive, ends)
    merges = list(_plan_merges(archive, settings, {}, ends))
    replaced = sum(len(merge.files) for merge in merges)
    return Compacted(archive.topic, files, size, files - replaced + len(merges), size, len(merges))


def _make_report(results: Sequence[Compacted], title: str) -> Report:
    """Return a row for each topic. The report is not good if a file is damaged."""
    rows = [
        (
            result.topic,
            result.files_before,
            result.files_after,
            result.bytes_before,
            result.bytes_after,
        )
        for result in results
    ]
    facts = {
        "merges": sum(result.merges for result in results),
        "merges that came too late": sum(result.superseded for result in results),
        "damaged files": [reason for result in results for reason in result.damaged],
    }
    return Report(title, _COLUMNS, rows, facts, is_good=not facts["damaged files"])
