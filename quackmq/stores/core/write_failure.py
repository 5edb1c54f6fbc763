"""What happens when a write fails: all callers get the error, and no more writes are accepted.

If a write or a sync fails (the disk is full, the device is broken), the content of the disk is
unknown. From then on the store is read-only, until it is opened again and recovered. A store that
another broker has taken over accepts no more writes either. A store that cannot be reached accepts
none until it can.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import logging

from quackmq.errors import QuackError, StoreFenced, StoreReadOnly, StoreUnavailable
from quackmq.stores.core.pending import CommitQueue, PendingCommit

_logger = logging.getLogger("quackmq.store")


class WriteFailure:
    """Why the store accepts no more writes: `error`, or None."""

    __slots__ = ("_commit_queue", "_is_final", "error")

    def __init__(self, commit_queue: CommitQueue) -> None:
        self.error: QuackError | None = None
        #: Whether `error` stays for ever.
        self._is_final = False
        self._commit_queue = commit_queue

    def fail(self, error: Exception) -> QuackError:
        """Refuse all writes from now on. The store is read-only, because it is unknown how much of
        the last write is stored; or it belongs to another broker (StoreFenced). Fail all waiting
        callers. Return the error for the others: all get the first one."""
        if self._is_final and self.error is not None:
            return self.error
        if isinstance(error, StoreFenced):
            self.error = error
            _logger.error("%s", error)
        else:
            self.error = StoreReadOnly(
                f"the store is read-only because a write failed ({error}); its data can still "
                "be read. Free disk space or repair the disk, then restart the broker"
            )
            self.error.__cause__ = error
            _logger.error("%s", self.error, exc_info=error)
        self._is_final = True
        self._commit_queue.batch_room.stop_delaying()
        self._commit_queue.change_room.stop_delaying()
        for pending_commit in self._commit_queue.pop_all():
            self.fail_callers(pending_commit, self.error)
        return self.error

    def suspend(self, error: StoreUnavailable) -> None:
        """Refuse all writes until `resume` is called."""
        if not self._is_final:
            self.error = error

    def resume(self) -> None:
        """Accept writes again, after `suspend`."""
        if not self._is_final:
            self.error = None

    def fail_callers(self, pending_commit: PendingCommit, error: QuackError) -> None:
        """Give the callers of a commit the error, and release the room that they occupied."""
        self._commit_queue.release(pending_commit)
        for future, _ in pending_commit.callers:
            if not future.done():
                future.set_exception(error)
                future.exception()  # no warning if its caller no longer waits

    def raise_if_failed(self) -> None:
        """Raise the error, if a write has failed."""
        if self.error is not None:
            # Without the traceback of earlier raises, which would be kept for ever.
            raise self.error.with_traceback(None)
