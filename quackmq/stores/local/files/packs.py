"""Packs: files that many partitions share, so that small writes to thousands of them are one write.

Callers use a path and a position in it, as if each segment and each index had its own file. This
layer decides where the bytes lie:

- A small run of bytes is appended to the *active pack*, `log/packs/NUMBER`. An extent records where
  (extents.py). A path whose bytes are all in packs has no file and no directory.
- A large run is written to the path's own file, at its position. So are all bytes that a journal
  frame only refers to, because recovery knows extents only from the checkpoint.
- When a path has many bytes in packs, a checkpoint moves them to its own file, a few paths at once.

Durability: no byte in a pack is ever overwritten, and a later run of the broker never writes to an
old pack. A checkpoint names all extents, and is written after the packs are synced. After a crash
the extents of the last checkpoint are valid; bytes packed since then are still in the journal. A
pack is removed after a checkpoint that does not name it.

Space: when packs hold more unused bytes than used ones, the emptiest packs are rewritten.

Threads: any thread may read (`borrow`, `describe_pack_ranges`). Only one thread at a time makes
changes: during recovery the main thread, then the checkpoint lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

from quackmq.disk.interface import read_all
from quackmq.disk.real import Disk, File
from quackmq.errors import InternalError
from quackmq.records.batch import Buffer
from quackmq.stores import limits
from quackmq.stores.local.files import extents
from quackmq.stores.local.files.extents import NO_EXTENTS, Extent
from quackmq.stores.local.files.open_files import OpenFiles

DIRECTORY: Final = "log/packs"


class Run(NamedTuple):
    """Contiguous bytes from a position of a path on."""

    path: str
    position: int
    size: int
    pieces: list[Buffer]


class Packed(NamedTuple):
    """The packs in a checkpoint: their sizes by number, and the extents of each path."""

    sizes: Mapping[int, int]
    extents: Mapping[str, bytes]


NOTHING_PACKED: Final = Packed({}, {})


class Packs:
    """The packs of a store, and the extents of each path. See the module for threads."""

    def __init__(
        self, disk: Disk, files: OpenFiles, packed: Packed = NOTHING_PACKED, first: int = 1
    ) -> None:
        """`first` is the number of the first pack that may be written."""
        self._disk = disk
        self._files = files
        self._extents = dict(packed.extents)
        self._sizes = dict(packed.sizes)
        #: The bytes of each pack that an extent refers to.
        self._live = dict.fromkeys(self._sizes, 0)
        for rows in self._extents.values():
            for extent in extents.decode(rows):
                self._live[extent.pack] = self._live.get(extent.pack, 0) + extent.length
        #: The number of the pack that is written to.
        self._active = first
        #: Packs that could not be read for rewriting, and paths that could not be moved. They are
        #: left alone from then on, so that they do not block others.
        self._unreadable: set[int] = set()
        self._unmovable: set[str] = set()

    # --- reading: any thread --------------------------------------------------------------------

    def borrow(self, path: str) -> AbstractContextManager[File]:
        """Return the bytes of a path for a `with` block. Raises FileNotFoundError."""
        if path in self._extents:
            return nullcontext(_PackedFile(self, self._files, path))
        return self._files.borrow(path)

    def rows(self, path: str) -> bytes:
        """Return the encoded extents of a path (extents.py)."""
        return self._extents.get(path, NO_EXTENTS)

    def describe_pack_ranges(self, path: str, start: int, end: int) -> str:
        """Return which bytes of packs contain these bytes of a path, as text; "" if none do."""
        found = extents.pieces(self.rows(path), start, end - start)
        return ", ".join(
            f"{pack_path(pack)} bytes {pack_position} to {pack_position + length}"
            for pack, pack_position, length in found
            if pack is not None
        )

    # --- writing --------------------------------------------------------------------------------

    def write(self, runs: Iterable[Run], packed_bytes: int) -> None:
        """Write runs; those of fewer than `packed_bytes` to the active pack. If two runs overlap,
        the later one is right."""
        self._append_all(self._write_large_runs(runs, packed_bytes))

    def _write_large_runs(self, runs: Iterable[Run], packed_bytes: int) -> Iterator[Run]:
        """Write the large runs; yield the small ones. If a path has many extents, they are joined
        with the run. Only a few are joined at a time: reading them takes longer than all the rest.
        """
        joins = 0
        for run in runs:
            if run.size >= packed_bytes:
                self._files.write(run.path, run.position, run.pieces)
            elif extents.count(self.rows(run.path)) > limits.PATH_EXTENTS and not (
                joins > limits.PACK_JOINS
            ):
                joins += 1
                yield self._join_with_extents(run)
            else:
                yield run

    def _append_all(self, runs: Iterable[Run]) -> None:
        """Append runs to packs, in blocks of a bounded size."""
        batch: list[Run] = []
        size = 0
        for run in runs:
            batch.append(run)
            size += run.size
            if size > limits.PACK_WRITE_BYTES:
                self._append(batch)
                batch, size = [], 0
        if batch:
            self._append(batch)

    def _join_with_extents(self, run: Run) -> Run:
        """Join a run with the small extents before it. If these cannot be read, they stay where
        they are, and reading them reports the error."""
        before = extents.worth_joining(
            self.rows(run.path), run.position, run.size, limits.MOVED_BYTES
        )
        content = self._read_extents(before)
        if not content:
            return run
        joined = b"".join(content)
        return Run(run.path, before[0].position, len(joined) + run.size, [joined, *run.pieces])

    def _append(self, batch: list[Run]) -> None:
        """Append runs to the active pack; close it when it is full."""
        if self._sizes.get(self._active, 0) > limits.PACK_BYTES:
            self._active += 1
        pack, path = self._active, pack_path(self._active)
        pack_position = self._sizes.get(pack, 0)
        data = b"".join(piece for run in batch for piece in run.pieces)
        self._files.write(path, pack_position, [data])
        self._sizes[pack] = pack_position + len(data)
        for run in batch:
            self._add_extent(run.path, Extent(run.position, run.size, pack, pack_position))
            pack_position += run.size

    def _add_extent(self, path: str, extent: Extent) -> None:
        """Record where bytes of a path lie now; count older bytes that it replaces as unused."""
        rows, replaced = extents.lay_over(self.rows(path), extent)
        self._extents[path] = rows
        self._live[extent.pack] = self._live.get(extent.pack, 0) + extent.length
        self._release_extents(replaced)

    def _release_extents(self, released: Iterable[Extent]) -> None:
        """Count the bytes of these extents as unused."""
        for extent in released:
            self._live[extent.pack] -= extent.length

    def _read_extents(self, extents_to_read: Iterable[Extent]) -> list[bytes] | None:
        """Return the bytes of extents; None if any of them cannot be read."""
        content: list[bytes] = []
        for extent in extents_to_read:
            try:
                with self._files.borrow(pack_path(extent.pack)) as file:
                    data = read_all(file, extent.length, extent.pack_position)
            except OSError:
                return None
            if len(data) < extent.length:
                return None
            content.append(data)
        return content

    # --- for checkpoints ------------------------------------------------------------------------

    def capture(self, without: Collection[str]) -> Packed:
        """Return the packs and extents for the next checkpoint, all of them synced, except those of
        the paths `without`. Call in the checkpoint lane."""
        extents_by_path = dict(self._extents)
        live = dict(self._live)
        for path in without:
            for extent in extents.decode(extents_by_path.pop(path, NO_EXTENTS)):
                live[extent.pack] -= extent.length
        sizes = {pack: self._sizes.get(pack, 0) for pack in sorted(live) if live[pack]}
        return Packed(sizes, extents_by_path)

    def list_unnamed(self, packed: Packed) -> list[int]:
        """Return the closed packs that a checkpoint does not name: they may be removed after it."""
        return [pack for pack in self._sizes if pack != self._active and pack not in packed.sizes]

    def remove_packs(self, numbers: Iterable[int]) -> None:
        """Remove packs. Raises InternalError if an extent still refers to one."""
        for pack in numbers:
            if self._live.pop(pack, 0):
                raise InternalError(f"{pack_path(pack)} cannot be removed: it is in use")
            self._sizes.pop(pack, None)
            self._unreadable.discard(pack)
            self._remove_file(pack_path(pack))

    def remove(self, path: str) -> None:
        """Remove a path and all its bytes. Its own file goes first: a reader that needs both finds
        it missing, and does not report the rest as damage."""
        self._remove_file(path)
        self.forget(path)

    def forget(self, path: str) -> None:
        """Drop the extents of a path."""
        self._unmovable.discard(path)
        self._release_extents(extents.decode(self._extents.pop(path, NO_EXTENTS)))

    def _remove_file(self, path: str) -> None:
        """Remove a file; do nothing if it does not exist, as for a path whose bytes are all in
        packs."""
        self._files.forget(path)
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            return

    # --- moving ---------------------------------------------------------------------------------

    def list_movable(self) -> list[str]:
        """Return the paths that should get their own file, those with most bytes in packs first."""
        sizes: dict[str, int] = {}
        for path, rows in self._extents.items():
            if path in self._unmovable:
                continue
            size = extents.bytes_in(rows)
            # Writes join the extents of a path above PATH_EXTENTS. Where they could not, and there
            # are twice as many, the path is moved.
            if size > limits.MOVED_BYTES or extents.count(rows) > 2 * limits.PATH_EXTENTS:
                sizes[path] = size
        ordered = sorted(sizes, key=lambda path: (-sizes[path], path))
        if len(ordered) > limits.MOVED_PATHS:
            del ordered[limits.MOVED_PATHS :]
        return ordered

    def move(self, paths: Iterable[str]) -> None:
        """Write the packed bytes of these paths to their own files, durably; drop their extents."""
        for path in paths:
            rows = self.rows(path)
            if not rows:
                continue
            runs = extents.runs(extents.decode(rows))
            content = [self._read_extents(run) for run in runs]
            if any(part is None for part in content):
                self._unmovable.add(path)  # reading it reports the error
                continue
            for run, part in zip(runs, content, strict=True):
                self._files.write(path, run[0].position, part or [])
            # Before the extents are dropped: the next checkpoint relies on the file alone.
            self._files.sync(path)
            self.forget(path)

    # --- space ----------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """The bytes in packs that an extent refers to."""
        return sum(self._live.values())

    @property
    def dead_bytes(self) -> int:
        """The bytes in packs that nothing refers to."""
        return sum(self._sizes.values()) - self.live_bytes

    def rewrite(self) -> None:
        """Write the remaining bytes of the emptiest packs to the active one, if most bytes in packs
        are unused. Each call does a bounded part."""
        dead = self.dead_bytes
        if dead > self.live_bytes and dead > limits.PACK_WASTE_BYTES:
            self._append_all(self._runs_in(self._emptiest()))

    def _emptiest(self) -> set[int]:
        """Choose the closed packs with the fewest used bytes, up to the bound of one rewrite."""
        closed = [
            pack
            for pack in self._sizes
            if pack != self._active and self._live.get(pack) and pack not in self._unreadable
        ]
        closed.sort(key=lambda pack: (self._live[pack], pack))
        chosen: set[int] = set()
        chosen_bytes = 0
        for pack in closed:
            # At least one pack is chosen, even if it alone exceeds the bound.
            if chosen and limits.REWRITTEN_BYTES < self._live[pack] + chosen_bytes:
                break
            chosen.add(pack)
            chosen_bytes += self._live[pack]
        return chosen

    def _runs_in(self, packs: set[int]) -> Iterator[Run]:
        """Yield the readable bytes that are still used in these packs."""
        for path, rows in list(self._extents.items()):
            inside = [extent for extent in extents.decode(rows) if extent.pack in packs]
            for run in extents.runs(inside):
                content = self._read_extents(run)
                if content is None:
                    self._unreadable.update(extent.pack for extent in run)
                    continue
                size = sum(extent.length for extent in run)
                yield Run(path, run[0].position, size, [*content])


class _PackedFile:
    """The bytes of one path, gathered from packs and from its own file. Read only."""

    __slots__ = ("_files", "_packs", "_path", "_rows")

    def __init__(self, packs: Packs, files: OpenFiles, path: str) -> None:
        self._packs = packs
        self._files = files
        self._path = path
        self._rows = packs.rows(path)

    def read_some(self, length: int, position: int) -> bytes:
        """Return at most `length` bytes: those that are contiguous in one file. If the bytes move
        to another file meanwhile, read them there."""
        while True:
            piece = extents.piece_at(self._rows, position, length)
            try:
                with self._files.borrow(self._name(piece)) as file:
                    return file.read_some(piece.length, piece.position)
            except FileNotFoundError:
                if not self._reload_extents():
                    raise

    def _reload_extents(self) -> bool:
        """Read the extents again. Return whether they changed: then the bytes have moved, and their
        former pack may have been removed."""
        former_rows, self._rows = self._rows, self._packs.rows(self._path)
        return self._rows != former_rows

    def _name(self, piece: extents.Piece) -> str:
        return self._path if piece.pack is None else pack_path(piece.pack)

    def is_cached(self, length: int, position: int) -> bool:
        """Return whether all these bytes are in the page cache."""
        for piece in extents.pieces(self._rows, position, length):
            try:
                with self._files.borrow(self._name(piece)) as file:
                    if not file.is_cached(piece.length, piece.position):
                        return False
            except FileNotFoundError:
                return False  # reading it raises the error
        return True

    def view(self, length: int, position: int) -> memoryview | None:
        """Return the bytes without copying them; None if they lie in several places, or cannot be
        viewed."""
        piece = extents.piece_at(self._rows, position, length)
        if piece.length < length:
            return None
        try:
            with self._files.borrow(self._name(piece)) as file:
                return file.view(length, piece.position)
        except FileNotFoundError:
            return None

    def size(self) -> int:
        """Return the position at which the bytes end."""
        ends = [extent.end for extent in extents.decode(self._rows)]
        try:
            with self._files.borrow(self._path) as file:
                ends.append(file.size())
        except FileNotFoundError:
            pass
        return max(ends, default=0)

    def write_some(self, data: Buffer, position: int) -> int:
        raise self._read_only()

    def sync(self) -> None:
        raise self._read_only()

    def truncate(self, size: int) -> None:
        raise self._read_only()

    def close(self) -> None:
        raise self._read_only()

    def _read_only(self) -> InternalError:
        return InternalError(f"{self._path} lies in packs and cannot be changed in place")


def pack_path(number: int) -> str:
    return f"{DIRECTORY}/{number}"


def list_packs(disk: Disk) -> list[int]:
    """Return the numbers of the packs in the directory."""
    return sorted(int(name) for name in disk.list(DIRECTORY) if name.isdecimal())
