"""The committer: gathers changes, and commits them in cycles.

While the medium makes one cycle durable, the next one gathers; so the more publishers there are,
the more of them share one commit. There are two catalogs: `latest`, with everything submitted,
against which requests are checked; and `durable`, which readers see.

A cycle that fails ends in one of three ways. If certainly nothing was stored, it is forgotten, with
all that was gathered after it, and cycles go on. If the outcome is unknown and the medium can find
it out, writes are refused until then (`Medium.resolve`). Else writes are refused for ever
(write_failure.py).

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from quackmq.clock import Clock
from quackmq.errors import (
    BrokerClosing,
    OutcomeUnknown,
    QuackError,
    StoreFenced,
    StoreUnavailable,
)
from quackmq.model.log_transactions import OpenTransactions
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog, Change, TopicDeleted, TopicPut
from quackmq.stores.core.medium import Loaded, Medium
from quackmq.stores.core.partition_log import PartitionLog, keys_of
from quackmq.stores.core.pending import CommitQueue, EncodedChange, PendingCommit
from quackmq.stores.core.reads import LogReader
from quackmq.stores.core.tail import Tail
from quackmq.stores.core.waiters import WaitingReaders
from quackmq.stores.core.write_failure import WriteFailure

_T = TypeVar("_T")
_logger = logging.getLogger("quackmq.store")


class Committer:
    def __init__(self, medium: Medium[Any], loaded: Loaded, now_ms: Callable[[], int]) -> None:
        self._loop = asyncio.get_running_loop()
        self.medium = medium
        self.durable = loaded.catalog
        self.latest = Catalog.from_snapshot(loaded.catalog.snapshot())
        self.logs: dict[PartitionKey, PartitionLog[Any]] = loaded.logs
        self.open_transactions = OpenTransactions()
        for log in self.logs.values():
            self._restore_open_transactions(log)
        self.epoch = loaded.epoch
        self.reader = LogReader(medium)
        self.readers = WaitingReaders(self._loop)
        #: The number of committed cycles. While it is unchanged, so is everything readable.
        self.commits = 0
        self._clock = Clock.of(now_ms)
        self.latest_append_ms = loaded.latest_append_ms
        self.tail = Tail(medium.tail_bytes)
        self.commit_queue = CommitQueue(medium.bounds)
        self.write_failure = WriteFailure(self.commit_queue)
        #: Gets the error when another broker has taken the store over.
        self.lost: asyncio.Future[StoreFenced] = self._loop.create_future()
        self._closing = False
        #: Whether a cycle is being committed, or will begin in the loop's next turn.
        self._is_flushing = False
        #: Set by `close`; resolved when no cycle is left to commit.
        self._idle: asyncio.Future[None] | None = None
        #: Finds out what became of a cycle.
        self._resolving: asyncio.Task[None] | None = None
        #: Logs that have changed since the last `Store.take_changed`.
        self.changed_logs: dict[PartitionLog[Any], None] = {}

    # --- called by the store ------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return the time of an append made now. It never goes back, since lookups by append time
        rely on the order."""
        self.latest_append_ms = max(self.latest_append_ms, self._clock.now_ms())
        return self.latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        """Why the store accepts no writes, or None."""
        return self.write_failure.error

    def check_writable(self) -> None:
        if self.write_failure.error is not None:
            self.write_failure.raise_if_failed()
        if self._closing:
            raise BrokerClosing("the store is closing: no more writes are accepted")

    def resolve_when_durable(self, result: _T) -> asyncio.Future[_T]:
        """Return a future that gets `result` when everything submitted so far is durable."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self.commit_queue.add_caller(future, result)
        if not self._is_flushing:
            self._is_flushing = True
            # In the loop's next turn: the cycle contains all requests of this turn.
            self._loop.call_soon(self._begin_cycle)
        return future

    def submit_changes(self, changes: Sequence[Change]) -> None:
        """Submit changes that become durable together. Raises LimitReached, and changes nothing, if
        they are too many."""
        encoded = self.commit_queue.encode(changes)
        self.commit_queue.reserve_changes(encoded)
        self.submit_encoded(encoded)

    def submit_encoded(self, changes: Iterable[EncodedChange]) -> None:
        """Submit encoded changes; the commit queue must have reserved room for them."""
        for change, encoded in changes:
            self.latest.apply(change)
            self.commit_queue.add_change(change, encoded)

    def submit_trim(self, log: PartitionLog[Any], first_offset: int) -> None:
        self.commit_queue.reserve_trim()
        self.commit_queue.add_trim(log, first_offset)

    async def close(self) -> None:
        """Finish everything submitted, then close the medium."""
        self._closing = True
        self.medium.begin_closing()
        if self._is_flushing:
            self._idle = self._loop.create_future()
            await self._idle
        for log in self.logs.values():
            log.wake_all()
        await self.medium.close()

    # --- called by the medium -----------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Refuse all writes from now on, because writing has failed outside a cycle."""
        self.write_failure.fail(error)

    def lose(self, error: StoreFenced) -> None:
        """Refuse all writes from now on, because another broker has taken the store over, or
        because what is in memory differs from what is stored. Tell those who wait for `lost`."""
        self.write_failure.fail(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def begin_exclusive(self) -> bool:
        """Keep cycles from beginning until `end_exclusive`, so that the medium can write something
        else; return False, and do nothing, if a cycle is being committed."""
        if self._is_flushing:
            return False
        self._is_flushing = True
        return True

    def end_exclusive(self) -> None:
        """Let cycles begin again, after `begin_exclusive`."""
        self._begin_next_cycle()

    # --- cycles -------------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        """Commit the changes of the next cycle."""
        self.medium.begin_commit(self.commit_queue.pop(), self._end_cycle)

    def _end_cycle(self, pending_commit: PendingCommit, error: Exception | None) -> None:
        """Make a durable cycle visible, or fail its callers. Begin the next cycle."""
        if error is not None:
            self._fail_cycle(pending_commit, error)
            return
        try:
            self._commit(pending_commit)
        except Exception as failure:
            # The cycle is stored, but its readers see it only after a restart.
            unknown = OutcomeUnknown(f"{type(failure).__name__}: {failure}")
            unknown.__cause__ = failure
            self._fail_for_ever(pending_commit, unknown)
            return
        self._begin_next_cycle_within_memory()

    def _begin_next_cycle_within_memory(self, _: object = None) -> None:
        """Begin the next cycle when the medium has caught up. Until then publishers wait, which
        bounds the memory."""
        backlog = self.medium.backlog()
        if backlog is not None and self.write_failure.error is None:
            backlog.add_done_callback(self._begin_next_cycle_within_memory)
        else:
            self._begin_next_cycle()

    def _begin_next_cycle(self) -> None:
        """Begin the next cycle if there are changes."""
        if not self.commit_queue.is_empty:
            # In the loop's next turn, so that the callers just answered can join the cycle.
            self._loop.call_soon(self._begin_cycle)
            return
        self._is_flushing = False
        if self._idle is not None:
            self._idle.set_result(None)
        else:
            self.medium.on_idle()

    def _commit(self, pending_commit: PendingCommit) -> None:
        """Make a durable cycle visible, and answer its callers."""
        self.commits += 1
        medium, tail, changed_logs = self.medium, self.tail, self.changed_logs
        forget_before_ms = self._clock.expired_before(limits.PRODUCER_EXPIRY_MS)
        medium.before_commit(pending_commit)
        for log, chunks in pending_commit.chunks:
            log.commit_chunks(chunks, forget_before_ms)
            tail.add(log, chunks)
            changed_logs[log] = None
        medium.after_chunks(pending_commit)
        for change, _ in pending_commit.changes:
            self.durable.apply(change)
            self._apply_to_logs(change)
        for log, first_offset in pending_commit.trims:
            medium.trim_log(log, first_offset)
            log.wake_trimmed()
            changed_logs[log] = None
        self.commit_queue.release(pending_commit)
        for future, result in pending_commit.callers:
            if not future.done():
                future.set_result(result)
        # After the publishers, which need not wait for many readers.
        for log, chunks in pending_commit.chunks:
            if log.waiters:
                self.readers.queue_notification(log, sum(len(chunk.data) for chunk in chunks))
        tail.shrink()
        medium.after_commit(pending_commit)

    def _apply_to_logs(self, change: Change) -> None:
        """Create the logs of new partitions; delete those of a deleted topic."""
        match change:
            case TopicPut(topic):
                for partition in range(topic.partitions):
                    key = PartitionKey(topic.id, partition)
                    if key not in self.logs:
                        self.logs[key] = self.medium.new_log(key, self.epoch)
            case TopicDeleted(topic_id):
                self._delete_logs(topic_id)

    def _delete_logs(self, topic_id: uuid.UUID) -> None:
        logs = [self.logs.pop(key) for key in keys_of(topic_id, self.logs)]
        for log in logs:
            log.is_deleted = True
            log.wake_all()
            self.changed_logs.pop(log, None)
        self.medium.delete_logs(topic_id, logs)

    # --- cycles that fail ---------------------------------------------------------------------

    def _fail_cycle(self, pending_commit: PendingCommit, error: Exception) -> None:
        """Give the callers of a cycle the error. What else happens, depends on its class."""
        match error:
            case StoreFenced():
                self.lose(error)
                self._fail_for_ever(pending_commit, error)
            case StoreUnavailable():
                failed = [pending_commit, *self.commit_queue.pop_all()]
                for each in failed:
                    self.write_failure.fail_callers(each, error)
                self._undo(failed)
                self._begin_next_cycle()
            case OutcomeUnknown() if self.medium.can_resolve:
                self._resolving = self._loop.create_task(
                    self._resolve(pending_commit, error), name="quackmq-resolve"
                )
            case _:
                self._fail_for_ever(pending_commit, error)

    def _fail_for_ever(self, pending_commit: PendingCommit, error: Exception) -> None:
        """Refuse all writes from now on. Give the callers of a cycle the error: OutcomeUnknown if
        the cycle may be stored, else that of all writes from now on."""
        failure = self.write_failure.fail(error)
        if isinstance(error, OutcomeUnknown):
            failure = OutcomeUnknown(
                f"it is unknown whether this change was stored, because a write failed ({error}); "
                "the store is read-only until the broker is restarted"
            )
            failure.__cause__ = error
        self.write_failure.fail_callers(pending_commit, failure)
        self._begin_next_cycle()

    async def _resolve(self, pending_commit: PendingCommit, error: OutcomeUnknown) -> None:
        """Refuse writes until the medium has found out whether a cycle was stored. If it was not,
        forget it. If it was, the broker must read everything again, since it was told otherwise."""
        unavailable = StoreUnavailable(
            "the store is finding out what became of its last write: try again later"
        )
        self.write_failure.suspend(unavailable)
        later = list(self.commit_queue.pop_all())
        self.write_failure.fail_callers(pending_commit, error)
        for each in later:
            self.write_failure.fail_callers(each, unavailable)
        try:
            is_stored = await self.medium.resolve(pending_commit)
        except StoreFenced as fenced:
            self.lose(fenced)
        except Exception as failure:
            self.write_failure.fail(failure)
        else:
            if is_stored:
                self.lose(
                    StoreFenced(
                        "a change whose outcome was unknown has been stored: the broker must open "
                        "the store again"
                    )
                )
            else:
                self._undo([pending_commit, *later])
                self.write_failure.resume()
        self._begin_next_cycle()

    def _undo(self, failed: Sequence[PendingCommit]) -> None:
        """Forget changes that were submitted and never will be durable, the last one first: set
        what they concern to what is durable."""
        for pending_commit in reversed(failed):
            for change, _ in reversed(pending_commit.changes):
                self.latest.revert(change, self.durable)
                if isinstance(change, TopicDeleted):
                    for key in keys_of(change.topic_id, self.logs):
                        self._roll_back(self.logs[key])
            for log in pending_commit.logs:
                self._roll_back(log)

    def _roll_back(self, log: PartitionLog[Any]) -> None:
        """Forget what a log has accepted and is not durable."""
        log.roll_back()
        self.open_transactions.forget(log.key)
        self._restore_open_transactions(log)

    def _restore_open_transactions(self, log: PartitionLog[Any]) -> None:
        """Add the durable open transactions of a log to those of all."""
        for producer_id, first_offset in log.transactions.open.items():
            self.open_transactions.add(log.key, producer_id, first_offset)
