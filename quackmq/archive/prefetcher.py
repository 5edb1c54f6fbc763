"""Reads pieces of the archive for the loop, and prefetches the next piece for sequential readers.

A reader of history requests a piece, receives it, and processes it before it requests the next. If
each piece were made only then, reader and broker would wait for each other. So while a reader
processes a prefetched piece (`quackmq.archive.prefetch_buffer`), the next one is made in the read
lane. A prefetched piece is returned without using the lane.

Promised: the same pieces as `ArchiveReader.read`. Prefetching uses at most one thread of the lane,
and makes nothing for which there is no room. Not promised: that every reader gets prefetched data.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.errors import BrokerClosing, LimitReached, NotFound
from quackmq.model.topic import PartitionKey

if TYPE_CHECKING:
    from quackmq.archive.parquet.reader import ArchiveReader, EncodedBatches

log = logging.getLogger(__name__)


class Prefetcher:
    def __init__(self, registry: ManifestRegistry) -> None:
        self._registry = registry
        #: The running prefetch, and the position at which it begins.
        self._prefetch_task: asyncio.Task[None] | None = None
        self._prefetch_position: tuple[PartitionKey, int] | None = None

    async def read(self, manifest: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        """Read as `ArchiveReader.read` does; the caller keeps the manifest's files pinned."""
        if self._prefetch_task is not None and self._prefetch_position == (manifest.key, offset):
            # The requested piece is being made already: do not make it twice.
            await asyncio.wait([self._prefetch_task])
            self._registry.check_open()
        reader = self._registry.loaded_reader
        piece = None if reader is None else reader.read_prefetched(manifest, offset, max_bytes)
        if piece is None:
            job = partial(self._read_in_lane, manifest, offset, max_bytes)
            piece = await self._registry.disk.run(job, "read")
        self._start_prefetch(manifest.key, piece.next_offset, max_bytes)
        return piece

    def _read_in_lane(self, manifest: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        """Read in the read lane."""
        return self._registry.reader.read(manifest, offset, max_bytes)

    def _start_prefetch(self, key: PartitionKey, offset: int, max_bytes: int) -> None:
        """Prefetch for a reader that has read up to an offset, unless a prefetch is running."""
        reader = self._registry.loaded_reader
        if reader is None or self._prefetch_task is not None:
            return
        manifest = self._registry.manifest(key)
        begin = None if manifest is None else reader.find_prefetch_offset(manifest, offset)
        if begin is None:
            return
        self._prefetch_position = (key, begin)
        self._prefetch_task = self._registry.start_task(
            self._prefetch(reader, key, begin, max_bytes)
        )
        self._prefetch_task.add_done_callback(self._on_prefetched)

    async def _prefetch(
        self, reader: ArchiveReader, key: PartitionKey, offset: int, max_bytes: int
    ) -> None:
        """Prefetch batches from an offset on, in the read lane, with the manifest's files
        pinned."""
        try:
            pin = self._registry.pin(key)
        except (NotFound, LimitReached, BrokerClosing):
            return  # the next read raises the error
        with pin:
            # The offset may have been trimmed since the prefetch was planned.
            if pin.manifest.first_offset <= offset < pin.manifest.next_offset:
                job = partial(reader.prefetch, pin.manifest, offset, max_bytes)
                await self._registry.disk.run(job, "read")

    def _on_prefetched(self, task: asyncio.Task[None]) -> None:
        self._prefetch_task = self._prefetch_position = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("prefetching from the archive failed", exc_info=error)
