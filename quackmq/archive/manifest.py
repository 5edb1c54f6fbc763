"""Which files contain which offsets of a partition: frozen values and pure functions over them.

    first_offset                                                          next_offset
      |                                                                        |
    [ file 0 … 999 ][ file 1000 … 1799 ][ file 1800 … 2399 ]  [ q 2012 … 2019 ]
      the edge: some of it may be trimmed                       quarantined, kept raw

Files are **ranges** of offsets: an offset that is not in the file of its range was aborted, was a
marker, or is quarantined; it is no gap. The ranges are contiguous from the first file's
`first_offset` to the manifest's `next_offset`; a file may have no record at all. Offsets before the
manifest's own `first_offset` are deleted, even if a file still has them (the *edge*, until that
file is rewritten). Each change makes a manifest with the next version.

On disk it is JSON with one line per file; the checksum in the last line covers all lines before it:

    {"format":1,"topic":"ducks","topic_id":"…","partition":0,"version":7,
    "first_offset":0,"next_offset":2400,
    "files":[
    {"name":"00000000000000000000-00000001.parquet","first_offset":0,"next_offset":1000, … },
    …
    ],
    "quarantined":[
    …
    ],
    "crc32c":"9ae0daaf"}

Names are never reused in a partition: they contain the first offset, for people, and the version
that added the file. Other names than `.parquet` begin with "_", so that no tool reads them as data.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import orjson
from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.errors import DamagedData, InvalidRequest, LimitReached, NewerFormat, StateChanged
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch

FORMAT: Final = 1
_CHECKSUM_LINE: Final = re.compile(rb'"crc32c":"([0-9a-f]{8})"\}\n')
_CHECKSUM_BYTES: Final = len(b'"crc32c":"00000000"}\n')
_FILE_NAME: Final = re.compile(r"\d{20}-\d{8,}\.parquet")
_OFFERED_NAME: Final = re.compile(r"_offered-([0-9a-z]{1,32})-[A-Za-z0-9_.]{1,100}\.new")
_QUARANTINE_NAME: Final = re.compile(r"_quarantined-\d{20}-\d{8,}\.batch")


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A Parquet file: offsets, content, and the checksum of its last bytes (see `schema`). The
    bounds of times are None if there are no records."""

    name: str
    first_offset: int
    next_offset: int
    records: int
    size: int
    tail_bytes: int
    tail_crc32c: int
    least_timestamp_ms: int | None = None
    greatest_timestamp_ms: int | None = None
    least_append_ms: int | None = None
    greatest_append_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A batch that cannot be decoded, kept unchanged in its own file."""

    name: str
    first_offset: int
    next_offset: int
    size: int
    crc32c: int
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The archive of a partition at one version. Versions grow by one with each change."""

    key: PartitionKey
    topic: str
    version: int
    first_offset: int
    next_offset: int
    files: tuple[ArchiveFile, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()

    @property
    def records(self) -> int:
        return sum(file.records for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files) + sum(batch.size for batch in self.quarantined)

    @property
    def edge(self) -> ArchiveFile | None:
        """The file of which a part is trimmed, and which may be rewritten without it; or None."""
        if self.files and self.files[0].first_offset < self.first_offset:
            return self.files[0]
        return None

    def file_at(self, offset: int) -> int:
        """Return the index of the file whose range contains an offset in [first, next)."""
        return bisect_right(self.files, offset, key=lambda file: file.next_offset)

    def quarantined_from(self, offset: int) -> Quarantined | None:
        """Return the first quarantined batch with an offset at or after this one, or None."""
        index = bisect_right(self.quarantined, offset, key=lambda batch: batch.next_offset)
        return self.quarantined[index] if index < len(self.quarantined) else None


def empty(key: PartitionKey, topic: str, first_offset: int) -> Manifest:
    """Return the manifest of a partition without archived records. It has version 0."""
    return Manifest(key, topic, 0, first_offset, first_offset)


def file_name(first_offset: int, version: int) -> str:
    return f"{first_offset:020d}-{version:08d}.parquet"


def quarantine_name(first_offset: int, version: int) -> str:
    return f"_quarantined-{first_offset:020d}-{version:08d}.batch"


def quarantine_entry(batch: Batch, version: int, reason: str) -> Quarantined:
    """Return the manifest entry of a quarantined batch, whose file has only the batch's bytes."""
    return Quarantined(
        quarantine_name(batch.base_offset, version),
        batch.base_offset,
        batch.next_offset,
        batch.size,
        crc32c(batch.view),
        reason[: limits.ARCHIVE_REASON_CHARS],
    )


def offered_name(plan: str, word: str) -> str:
    """Return the name of a file that is offered in the place of others, under a plan. `word`
    distinguishes the files of a plan: letters, digits, "_" and "."."""
    return f"_offered-{plan}-{word}.new"


def parse_plan(name: str) -> str | None:
    """Return the plan under which a file is offered; None if it is not an offered file."""
    match = _OFFERED_NAME.fullmatch(name)
    return None if match is None else match[1]


def is_archive_name(name: str) -> bool:
    """Return whether a name is that of a file or of a quarantined batch."""
    return bool(_FILE_NAME.fullmatch(name) or _QUARANTINE_NAME.fullmatch(name))


# --- changes -------------------------------------------------------------------------------------


def add(manifest: Manifest, file: ArchiveFile, quarantined: Iterable[Quarantined] = ()) -> Manifest:
    """Add a file after the others, with the quarantined batches of its range. Raises InvalidRequest
    if the file does not continue the archive, LimitReached if the partition would have too many
    files or quarantined batches."""
    if file.first_offset != manifest.next_offset:
        raise InvalidRequest(
            f"{file.name} begins at {file.first_offset}, but the archive ends at "
            f"{manifest.next_offset}"
        )
    batches = tuple(quarantined)
    for batch in batches:
        if not file.first_offset <= batch.first_offset < batch.next_offset <= file.next_offset:
            raise InvalidRequest(f"{batch.name} is not in the range of {file.name}")
    return _make_next_version(
        manifest,
        next_offset=file.next_offset,
        files=(*manifest.files, file),
        quarantined=(*manifest.quarantined, *batches),
    )


def replace(
    manifest: Manifest, old: Sequence[str], new: Sequence[ArchiveFile], version: int
) -> Manifest:
    """Replace the `old` files, contiguous and named in order, by `new` ones. Both must have the
    same range and number of records, except that the trimmed edge may be left out.

    `version` is that of the manifest by which this was planned. Later changes do no harm while the
    old files are listed, since a name is used once and its file never changes. So records archived
    meanwhile do not invalidate a merge that took an hour. Raises StateChanged if an old file was
    removed since then, InvalidRequest if a range, a number or a name does not fit."""
    if not old or not new:
        raise InvalidRequest("name at least one old and one new file")
    start = _find_start(manifest, old, version)
    stop = start + len(old)
    replaced = manifest.files[start:stop]
    begin, end = new[0].first_offset, new[-1].next_offset
    edge = max(replaced[0].first_offset, manifest.first_offset)
    if not replaced[0].first_offset <= begin <= edge or end != replaced[-1].next_offset:
        raise InvalidRequest(
            f"offsets {replaced[0].first_offset} to {replaced[-1].next_offset - 1} cannot be "
            f"replaced by {begin} to {end - 1}"
        )
    old_records, new_records = (
        sum(file.records for file in replaced),
        sum(file.records for file in new),
    )
    if new_records > old_records or (
        new_records < old_records and begin == replaced[0].first_offset
    ):
        raise InvalidRequest(f"{old_records} records cannot be replaced by {new_records}")
    files = (*manifest.files[:start], *new, *manifest.files[stop:])
    return _make_next_version(manifest, files=files)


def trim(manifest: Manifest, before: int) -> Manifest:
    """Delete everything before an offset. Whole files are dropped; one that is cut becomes the
    edge. Return the same manifest if nothing changes. Beyond the archive's end, everything is
    dropped, and the archive begins there."""
    if before <= manifest.first_offset:
        return manifest
    return _make_next_version(
        manifest,
        first_offset=before,
        next_offset=max(before, manifest.next_offset),
        files=tuple(file for file in manifest.files if file.next_offset > before),
        quarantined=tuple(batch for batch in manifest.quarantined if batch.next_offset > before),
    )


def dropped_names(older: Manifest, newer: Manifest) -> tuple[str, ...]:
    """Return the names that only the older manifest has. Their files can be removed when the newer
    one is durable and the older one is no longer used."""
    return tuple(sorted(set(list_names(older)) - set(list_names(newer))))


def list_names(manifest: Manifest) -> list[str]:
    return [entry.name for entry in _list_entries(manifest)]


def _find_start(manifest: Manifest, names: Sequence[str], version: int) -> int:
    """Return the index of the first of these files, which must be contiguous in the manifest.
    Raises StateChanged and InvalidRequest as `replace` does."""
    if version > manifest.version:
        raise StateChanged(
            f"the manifest is at version {manifest.version}, not yet at {version}: plan again"
        )
    listed = [file.name for file in manifest.files]
    if missing := sorted(set(names) - set(listed)):
        if version < manifest.version:
            raise StateChanged(
                f"{missing[0][:100]} is not, or no longer, in version {manifest.version} of the "
                "manifest: plan again"
            )
        raise InvalidRequest(f"{missing[0][:100]!r} is not in the manifest")
    start = listed.index(names[0])
    if listed[start : start + len(names)] != list(names):
        raise InvalidRequest(
            f"{names[0]} and {len(names) - 1} more are not contiguous in the manifest"
        )
    return start


def _list_entries(manifest: Manifest) -> list[ArchiveFile | Quarantined]:
    return [*manifest.files, *manifest.quarantined]


def _make_next_version(manifest: Manifest, **changes: Any) -> Manifest:
    """Return the next version with these changes. Raises LimitReached, InvalidRequest."""
    changed = dataclasses.replace(manifest, version=manifest.version + 1, **changes)
    if len(changed.files) > shared_limits.ARCHIVE_FILES:
        raise LimitReached(
            f"the partition would have {len(changed.files)} files; at most "
            f"{shared_limits.ARCHIVE_FILES} are allowed: merge or delete some"
        )
    if len(changed.quarantined) > limits.ARCHIVE_QUARANTINED:
        raise LimitReached(
            f"the partition would have {len(changed.quarantined)} quarantined batches; at most "
            f"{limits.ARCHIVE_QUARANTINED} are allowed"
        )
    if rule := broken_rule(changed):
        raise InvalidRequest(rule)
    return changed


def broken_rule(manifest: Manifest) -> str | None:
    """Return a description of the rule that a manifest breaks; None if it is valid."""
    files, batches = manifest.files, manifest.quarantined
    begin, end = manifest.first_offset, manifest.next_offset
    if not 0 <= begin <= end or manifest.version < 0 or manifest.key.partition < 0:
        return f"version {manifest.version} with offsets {begin} to {end - 1} is impossible"
    for entry in _list_entries(manifest):
        if not 0 <= entry.first_offset < entry.next_offset or entry.size <= 0:
            return f"{entry.name} has offsets {entry.first_offset} to {entry.next_offset - 1}"
        if not is_archive_name(entry.name):
            return f"{entry.name!r} is not the name of a file in the archive"
    if any(file.name[0] == "_" for file in files) or any(entry.name[0] != "_" for entry in batches):
        return "a file is named like a quarantined batch, or the reverse"
    if len(set(list_names(manifest))) != len(files) + len(batches):
        return "a name is listed twice"
    for left, right in pairwise(files):
        if left.next_offset != right.first_offset:
            return f"{right.name} does not begin where {left.name} ends"
    for first, second in pairwise(batches):
        if first.next_offset > second.first_offset:
            return f"{second.name} overlaps {first.name}"
    if batches and not (begin < batches[0].next_offset and batches[-1].next_offset <= end):
        return "a batch is quarantined outside of the archive"
    if not files:
        return None if begin == end else f"no file has offsets {begin} to {end - 1}"
    if not files[0].first_offset <= begin < files[0].next_offset or files[-1].next_offset != end:
        return f"the files do not cover offsets {begin} to {end - 1}"
    if any(not _has_sound_numbers(file) for file in files):
        return "a file's numbers contradict each other"
    return None


def _has_sound_numbers(file: ArchiveFile) -> bool:
    """Return whether the counts, sizes and times of a file can be true together."""
    if not 0 <= file.records <= file.next_offset - file.first_offset:
        return False
    if not 0 < file.tail_bytes <= min(file.size, limits.ARCHIVE_TAIL_BYTES):
        return False
    bounds = (
        (file.least_timestamp_ms, file.greatest_timestamp_ms),
        (file.least_append_ms, file.greatest_append_ms),
    )
    if not file.records:
        return all(bound == (None, None) for bound in bounds)
    return all(
        least is not None and greatest is not None and least <= greatest
        for least, greatest in bounds
    )


# --- bytes ---------------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as it is stored, with its checksum."""
    head = orjson.dumps(
        {
            "format": FORMAT,
            "topic": manifest.topic,
            "topic_id": str(manifest.key.topic_id),
            "partition": manifest.key.partition,
            "version": manifest.version,
            "first_offset": manifest.first_offset,
            "next_offset": manifest.next_offset,
        }
    )
    body = b"%b,\n%b%b" % (
        head[:-1],
        _encode_list("files", manifest.files),
        _encode_list("quarantined", manifest.quarantined),
    )
    return b'%b"crc32c":"%08x"}\n' % (body, crc32c(body))


def decode(data: bytes, source: str) -> Manifest:
    """Decode a manifest; `source` names its file in errors. Raises DamagedData, and NewerFormat for
    a later format."""
    if len(data) > limits.ARCHIVE_MANIFEST_BYTES:
        raise DamagedData(f"{source}: {len(data)} bytes are too many for a manifest")
    body, last = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    match = _CHECKSUM_LINE.fullmatch(last)
    if match is None or int(match[1], 16) != crc32c(body):
        raise DamagedData(f"{source}: the manifest's checksum is wrong")
    try:
        fields = orjson.loads(data)
        if fields["format"] != FORMAT:
            raise NewerFormat(
                f"{source}: the manifest has format {fields['format']}, this program knows "
                f"{FORMAT}: use a newer QuackMQ"
            )
        manifest = Manifest(
            PartitionKey(uuid.UUID(fields["topic_id"]), fields["partition"]),
            fields["topic"],
            fields["version"],
            fields["first_offset"],
            fields["next_offset"],
            tuple(ArchiveFile(**file) for file in fields["files"]),
            tuple(Quarantined(**entry) for entry in fields["quarantined"]),
        )
        rule = broken_rule(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedData(
            f"{source}: an invalid manifest with a good checksum: {error!r}"
        ) from error
    if rule:
        raise DamagedData(f"{source}: {rule}")
    return manifest


def _encode_list(name: str, values: Sequence[ArchiveFile] | Sequence[Quarantined]) -> bytes:
    # Copied, because each result of orjson takes at least 4 KiB, and there are up to 20,000.
    lines = b",\n".join([memoryview(orjson.dumps(value)).tobytes() for value in values])
    return b'"%b":[\n%b],\n' % (name.encode(), lines + b"\n" if lines else b"")
