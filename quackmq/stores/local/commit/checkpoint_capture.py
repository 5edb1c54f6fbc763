"""Taking the content of a checkpoint from the logs, in slices, while commits go on.

A checkpoint is the state behind one frame. To take it from 50,000 partitions at once would hold the
loop for a quarter of a second. So the logs that changed since the last checkpoint are taken a few
at a time, and a log that is about to change is taken first. What is taken is therefore the state
behind the frame at which the capture began, whatever is committed meanwhile.

Who may call: the loop. No I/O happens here.
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
        """`changed` are the logs that changed since the last capture. It is used up."""
        self._left = changed
        #: Whether everything is taken.
        self.is_over = not changed
        self.logs: list[CapturedLog] = []
        self.indexes: list[Entries] = []
        #: Committed chunks that are not in their segments yet. All belong to logs that changed.
        self.waiting: list[Waiting] = []

    def keep(self, log: PartitionLog) -> None:
        """The log is about to change: take it as it is, if it was not taken yet."""
        if log in self._left:
            del self._left[log]
            self._take(log)

    async def finish(self) -> None:
        """Take what is left, and let others run in between."""
        while self._left:
            for _ in range(min(limits.CAPTURED_LOGS, len(self._left))):
                log, _ = self._left.popitem()
                self._take(log)
            if self._left:
                await asyncio.sleep(0)
        self.is_over = True

    async def note_written(self, write_back: WriteBack) -> None:
        """The checkpoint is in place: note what the files hold now, and let others run."""
        step = limits.CAPTURED_LOGS
        for at in range(0, len(self.waiting), step):
            write_back.done(self.waiting[at : at + step])
            await asyncio.sleep(0)
        for at in range(0, len(self.indexes), step):
            for entries in self.indexes[at : at + step]:
                entries.written()
            await asyncio.sleep(0)
        for taken in (self.logs, self.waiting, self.indexes):
            taken.clear()  # the engine holds this object until the next checkpoint

    def _take(self, log: PartitionLog) -> None:
        if log.readable:
            self.logs.append(CapturedLog.of(log))
        for segment in log.segments:
            if segment.pending or segment.aborted_pending:
                self.indexes.append(segment.unwritten_entries())
        if log.unwritten:
            self.waiting.append(Waiting(log, tuple(log.unwritten)))
