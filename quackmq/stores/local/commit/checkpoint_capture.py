"""Captures the content of a checkpoint from the logs, in slices, while commits continue.

A checkpoint is the state after one frame. Capturing 50,000 partitions at once would block the loop
for a quarter of a second. So the logs that changed since the last checkpoint are captured a few at
a time, and a log that is about to change is captured first. The result is therefore the state after
the frame at which the capture began, whatever is committed meanwhile.

Not thread-safe: call from the event loop. Does no I/O.
"""

from __future__ import annotations

import asyncio

from quackmq.stores import limits
from quackmq.stores.local.commit.write_back import UnwrittenChunks, WriteBackQueue
from quackmq.stores.local.files.checkpoint import CapturedLog
from quackmq.stores.local.files.segment import PendingEntries
from quackmq.stores.local.segmented_log import SegmentedLog


class Capture:
    """The captured state of all logs that changed since the last checkpoint."""

    def __init__(self, changed_logs: dict[SegmentedLog, None]) -> None:
        """Capture the logs that changed since the last capture. This object empties
        `changed_logs`."""
        self._remaining = changed_logs
        #: Whether everything is captured.
        self.is_complete = not changed_logs
        self.logs: list[CapturedLog] = []
        self.indexes: list[PendingEntries] = []
        #: Committed chunks of these logs that are not in their segments yet.
        self.unwritten: list[UnwrittenChunks] = []

    def capture_before_change(self, log: SegmentedLog) -> None:
        """Capture a log that is about to change, if it is not captured yet."""
        if log in self._remaining:
            del self._remaining[log]
            self._capture(log)

    async def finish(self) -> None:
        """Capture the remaining logs; let other work run in between."""
        while self._remaining:
            for _ in range(min(limits.CAPTURED_LOGS, len(self._remaining))):
                log, _ = self._remaining.popitem()
                self._capture(log)
            if self._remaining:
                await asyncio.sleep(0)
        self.is_complete = True

    async def record_written(self, write_back_queue: WriteBackQueue) -> None:
        """Record that the checkpoint's files are written; let other work run in between."""
        step = limits.CAPTURED_LOGS
        for start in range(0, len(self.unwritten), step):
            write_back_queue.mark_written(self.unwritten[start : start + step])
            await asyncio.sleep(0)
        for start in range(0, len(self.indexes), step):
            for entries in self.indexes[start : start + step]:
                entries.mark_written()
            await asyncio.sleep(0)
        # The committer keeps this object until the next checkpoint. Freeing all of it at once would
        # block the loop as long as capturing it.
        for captured in (self.logs, self.unwritten, self.indexes):
            while captured:
                del captured[-step:]
                await asyncio.sleep(0)

    def _capture(self, log: SegmentedLog) -> None:
        """Add the present state of a log, its new index entries and its unwritten chunks."""
        # A log that never had a batch has no row: recovery creates it from the catalog.
        if log.high_watermark:
            self.logs.append(CapturedLog.of(log))
        for segment in log.segments:
            if segment.pending_regions or segment.pending_aborted:
                self.indexes.append(segment.pending_entries())
        if log.unwritten:
            self.unwritten.append(UnwrittenChunks(log, tuple(log.unwritten)))
