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
from quackmq.stores.local.commit.write_back import Waiting, WriteBack
from quackmq.stores.local.files.checkpoint import CapturedLog
from quackmq.stores.local.files.segment import Entries
from quackmq.stores.local.partition_log import PartitionLog


class Capture:
    def __init__(self, changed: dict[PartitionLog, None]) -> None:
        """`changed` are the logs that changed since the last capture. The capture empties it."""
        self._left = changed
        #: Whether everything is captured.
        self.is_over = not changed
        self.logs: list[CapturedLog] = []
        self.indexes: list[Entries] = []
        #: Committed chunks that are not in their segments yet. Their logs are all in `changed`.
        self.waiting: list[Waiting] = []

    def keep(self, log: PartitionLog) -> None:
        """Capture a log that is about to change, if it is not captured yet."""
        if log in self._left:
            del self._left[log]
            self._take(log)

    async def finish(self) -> None:
        """Capture the remaining logs; let other work run in between."""
        while self._left:
            for _ in range(min(limits.CAPTURED_LOGS, len(self._left))):
                log, _ = self._left.popitem()
                self._take(log)
            if self._left:
                await asyncio.sleep(0)
        self.is_over = True

    async def note_written(self, write_back: WriteBack) -> None:
        """Record that the checkpoint's files are written; let other work run in between."""
        step = limits.CAPTURED_LOGS
        for at in range(0, len(self.waiting), step):
            write_back.done(self.waiting[at : at + step])
            await asyncio.sleep(0)
        for at in range(0, len(self.indexes), step):
            for entries in self.indexes[at : at + step]:
                entries.written()
            await asyncio.sleep(0)
        for taken in (self.logs, self.waiting, self.indexes):
            taken.clear()  # the committer keeps this object until the next checkpoint

    def _take(self, log: PartitionLog) -> None:
        if log.readable:
            self.logs.append(CapturedLog.of(log))
        for segment in log.segments:
            if segment.pending or segment.aborted_pending:
                self.indexes.append(segment.unwritten_entries())
        if log.unwritten:
            self.waiting.append(Waiting(log, tuple(log.unwritten)))
