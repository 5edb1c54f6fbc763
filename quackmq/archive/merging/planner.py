"""Decides which files of a partition should be merged: a pure function of its manifest.

Small files are expensive: a line in the manifest, a footer that is half of the file, a task for
each reader of the history. Rewriting is expensive too, so a merge has to be worth it:

    records   16    16    16    4    4    1  1  1  1         the last four become one,
              16    16    16    4    4    4                   four times as large

Neighbours are merged when together they have `growth` times the records of the largest of them; or
twice as many, if they make a file of at least half of `target_bytes`, which is never touched again.
So **a record is rewritten at most as often as the number of a file's records can double**, and
about log₄ of that in practice. At most `growth - 1` small files of each size remain. Records are
counted and not bytes, since only records add up, whatever the compression.

The edge, a file whose beginning was trimmed, is rewritten when more than `edge_share` of it is
gone, with its neighbours or alone.

With `by_day`, no file has records of two days: no merge crosses a day (UTC, by append time, which
is ordered like the offsets). A file that was archived across midnight belongs to the day on which
it began.

The broker runs these merges one by one (`merger`). A program with many workers may run all merges
of a plan at once: no file is in two of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.errors import InvalidSetting, QuackError
from quackmq.model.topic import PartitionKey

#: The most bytes of the footers of merged files: the new footer lists all their row groups.
_TAIL_BYTES: Final = limits.ARCHIVE_TAIL_BYTES // 8
_DAY_MS: Final = 24 * 3_600_000
#: The least growth of records if the file will be large enough to be left alone.
_LAST_GROWTH: Final = 2


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """The target of merging: files of about `target_bytes`. One merge has at most `most_files`."""

    target_bytes: int = shared_limits.MERGE_TARGET_BYTES
    growth: int = limits.MERGE_GROWTH
    most_files: int = limits.MERGE_FILES
    edge_share: float = limits.MERGE_EDGE_SHARE
    by_day: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidSetting for a value out of range."""
        if self.target_bytes < 1 or self.most_files < 2 or self.growth < _LAST_GROWTH:
            raise InvalidSetting(
                f"invalid merge settings: target_bytes {self.target_bytes} must be 1 or more, "
                f"most_files {self.most_files} 2 or more, growth {self.growth} {_LAST_GROWTH} or "
                f"more"
            )
        if not 0 < self.edge_share < 1:
            raise InvalidSetting(f"edge_share must lie between 0 and 1, not {self.edge_share}")


@dataclass(frozen=True, slots=True)
class Merge:
    """Neighbouring files to merge into one, for the offsets [first_offset, next_offset), by this
    version of the manifest."""

    key: PartitionKey
    version: int
    files: tuple[ArchiveFile, ...]
    first_offset: int

    @property
    def next_offset(self) -> int:
        return self.files[-1].next_offset

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def size(self) -> int:
        """The bytes that the merge reads."""
        return sum(file.size for file in self.files)


class UnreadableFile(Exception):
    """A file to merge cannot be read; `name` is its name."""

    def __init__(self, name: str, cause: QuackError) -> None:
        super().__init__(str(cause))
        self.name = name


def plan(
    manifest: Manifest,
    settings: MergeSettings = MergeSettings(),
    excluded: Collection[str] = (),
) -> list[Merge]:
    """Return the merges that are worth it now, by offset; no file is in two of them. Files whose
    names are `excluded`, for instance damaged ones, are left as they are."""
    merges: list[Merge] = []
    parts = [_make_part(manifest, file) for file in manifest.files]
    start = 0
    while start < len(parts):
        count = _count_worth_merging(parts, start, settings, excluded)
        if count:
            files = tuple(part.file for part in parts[start : start + count])
            begin = max(files[0].first_offset, manifest.first_offset)
            merges.append(Merge(manifest.key, manifest.version, files, begin))
        start += max(count, 1)
    return merges


class _Part(NamedTuple):
    """The untrimmed part of a file. For the edge, records and size are estimated from its
    offsets."""

    file: ArchiveFile
    records: int
    size: int
    trimmed_share: float = 0.0


def _make_part(manifest: Manifest, file: ArchiveFile) -> _Part:
    """Return the untrimmed part of a file. Assume that records and bytes are spread evenly over the
    offsets."""
    trimmed = manifest.first_offset - file.first_offset
    if trimmed <= 0:
        return _Part(file, file.records, file.size)
    offsets = file.next_offset - file.first_offset
    remaining = offsets - trimmed
    return _Part(
        file,
        file.records * remaining // offsets,
        file.size * remaining // offsets,
        trimmed / offsets,
    )


def _count_worth_merging(
    parts: list[_Part], start: int, settings: MergeSettings, excluded: Collection[str]
) -> int:
    """Return how many files from index `start` on should become one; 0 if none should."""
    best = 0
    if parts[start].trimmed_share > settings.edge_share and parts[start].file.name not in excluded:
        # Rewrite the edge even alone: most of its bytes are of deleted records.
        best = 1
    records = most_records = size = tail_bytes = 0
    for count, part in enumerate(_find_mergeable(parts, start, settings, excluded), start=1):
        records += part.records
        most_records = max(most_records, part.records)
        size += part.size
        tail_bytes += part.file.tail_bytes
        if size > settings.target_bytes or tail_bytes > _TAIL_BYTES:
            break
        # A file of half the target size is not merged again: see `_find_mergeable`.
        is_last = size * 2 >= settings.target_bytes
        growth = _LAST_GROWTH if is_last else settings.growth
        if count > 1 and records >= growth * most_records:
            best = count
    return best


def _find_mergeable(
    parts: list[_Part], start: int, settings: MergeSettings, excluded: Collection[str]
) -> Iterator[_Part]:
    """Yield the files from index `start` on that may be merged. Stop at a large or an excluded
    file, and with `by_day` at a file of another day."""
    days: set[int] = set()
    for part in parts[start : start + settings.most_files]:
        if part.size * 2 >= settings.target_bytes or part.file.name in excluded:
            return
        if settings.by_day and part.file.least_append_ms is not None:
            days.add(part.file.least_append_ms // _DAY_MS)
            if len(days) > 1:
                return
        yield part
