"""Pieces of the archive for the loop, and the next one made while the last one is on its way.

Who reads history through a door asks for a piece, is given it, and works on it before it asks for
the next. Made only then, each would wait for the other in turns. So while somebody takes what waits
for them (`quackmq.archive.prefetch_buffer`), what follows is made in the read lane, and a piece
that waits already is given without going there.

Promised: the same pieces as `ArchiveReader.read`; one thread of the lane at the most is taken, and
nothing is made for which there is no room. Not promised: that it is made for everybody who reads.

Who may call: the loop.
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
    from quackmq.archive.parquet.reader import ArchiveReader, Piece

log = logging.getLogger(__name__)


class Prefetcher:
    def __init__(self, partitions: ManifestRegistry) -> None:
        self._partitions = partitions
        #: What is made at present, and where it begins.
        self._making: asyncio.Task[None] | None = None
        self._place: tuple[PartitionKey, int] | None = None

    async def read(self, manifest: Manifest, offset: int, max_bytes: int) -> Piece:
        """As `ArchiveReader.read`; the files of the manifest are the caller's to hold."""
        if self._making is not None and self._place == (manifest.key, offset):
            await asyncio.wait([self._making])
            self._partitions.check_open()
        reader = self._partitions.loaded_reader
        piece = None if reader is None else reader.read_waiting(manifest, offset, max_bytes)
        if piece is None:
            job = partial(self._read, manifest, offset, max_bytes)
            piece = await self._partitions.disk.run(job, "read")
        self._make_next(manifest.key, piece.next_offset, max_bytes)
        return piece

    def _read(self, manifest: Manifest, offset: int, max_bytes: int) -> Piece:
        """In the read lane."""
        return self._partitions.reader.read(manifest, offset, max_bytes)

    def _make_next(self, key: PartitionKey, offset: int, max_bytes: int) -> None:
        """For who has read up to an offset, if nothing else is being made."""
        reader = self._partitions.loaded_reader
        if reader is None or self._making is not None:
            return
        manifest = self._partitions.manifest(key)
        begin = None if manifest is None else reader.wanted_ahead(manifest, offset)
        if begin is None:
            return
        self._place = (key, begin)
        self._making = self._partitions.begin(self._make(reader, key, begin, max_bytes))
        self._making.add_done_callback(self._made)

    async def _make(
        self, reader: ArchiveReader, key: PartitionKey, offset: int, max_bytes: int
    ) -> None:
        try:
            pin = self._partitions.pin(key)
        except (NotFound, LimitReached, BrokerClosing):
            return  # whoever reads on is told
        with pin:
            if pin.manifest.first_offset <= offset < pin.manifest.next_offset:
                job = partial(reader.make_ahead, pin.manifest, offset, max_bytes)
                await self._partitions.disk.run(job, "read")

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making = self._place = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("nothing was made ahead of a reader of the archive", exc_info=error)
