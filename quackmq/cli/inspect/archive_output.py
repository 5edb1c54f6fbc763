"""Print the results of `quackmq archive ls` and `verify`: tables and findings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.cli.text import format_time, pluralize, progress_on_stderr, table
from quackmq.disk.real import RealDisk
from quackmq.errors import DamagedData, StorageError, StoreLocked, UnusableDirectory
from quackmq.model.topic import PartitionKey
from quackmq.stores.local.inspect.directory import Inspection
from quackmq.stores.local.inspect.findings import Finding, Kind

#: The first offset of each partition's log.
LogStarts = dict[PartitionKey, int]


def inspect_archive(args: argparse.Namespace) -> bool:
    """Run `ls` or `verify`; return whether there is damage. Raises NewerFormat,
    UnusableDirectory, NotFound or OSError."""
    with ArchiveDirectory(args.directory) as archived:
        if args.action == "ls":
            return list_partitions(archived, args.topic, with_files=args.files, as_json=args.json)
        return verify(archived, args.directory, args.topic)


# --- ls ------------------------------------------------------------------------------------------

_HEADINGS: Final = ("TOPIC", "PARTITION", "FIRST", "NEXT", "RECORDS", "BYTES", "FILES")
_NUMBERS: Final = range(1, 7)


def list_partitions(
    archived: ArchiveDirectory, selector: str | None, *, with_files: bool, as_json: bool
) -> bool:
    """Print the archived partitions as a table or as JSON; return whether a manifest is damaged. A
    partition without a manifest has no archive yet and is left out."""
    partitions: list[tuple[ArchivedPartition, Manifest]] = []
    findings: list[Finding] = []
    for partition in archived.partitions(selector):
        try:
            manifest = archived.manifest(partition)
        except DamagedData as error:
            findings.append(_damage_finding(error))
            continue
        if manifest is not None:
            partitions.append((partition, manifest))
    if as_json:
        print(orjson.dumps(_as_json(partitions, findings), option=orjson.OPT_INDENT_2).decode())
        return bool(findings)
    rows: list[Sequence[str]] = [(*_HEADINGS, "FROM", "TO")]
    rows += [
        row
        for partition, manifest in partitions
        for row in _format_rows(partition, manifest, with_files=with_files)
    ]
    print("\n".join(table(rows, right_aligned=_NUMBERS)))
    for _, manifest in partitions:
        for batch in manifest.quarantined:
            print(_quarantine_finding(manifest, batch))
    for finding in findings:
        print(finding)
    return bool(findings)


def _format_rows(
    partition: ArchivedPartition, manifest: Manifest, *, with_files: bool
) -> Iterator[Sequence[str]]:
    """Yield the row of a partition and, with `with_files`, one row for each of its files."""
    yield (
        partition.topic,
        str(partition.partition),
        str(manifest.first_offset),
        str(manifest.next_offset),
        str(manifest.records),
        str(manifest.size),
        str(len(manifest.files)),
        *_format_times(manifest.files),
    )
    if with_files:
        for file in manifest.files:
            yield (
                f"  {file.name}",
                "",
                str(file.first_offset),
                str(file.next_offset),
                str(file.records),
                str(file.size),
                "",
                *_format_times([file]),
            )


def _format_times(listed: Sequence[ArchiveFile]) -> tuple[str, str]:
    """Return the times of the earliest and the latest record."""
    least = [file.least_timestamp_ms for file in listed if file.least_timestamp_ms is not None]
    greatest = [
        file.greatest_timestamp_ms for file in listed if file.greatest_timestamp_ms is not None
    ]
    return (format_time(min(least)), format_time(max(greatest))) if least and greatest else ("", "")


def _as_json(
    partitions: Sequence[tuple[ArchivedPartition, Manifest]], findings: Sequence[Finding]
) -> dict[str, Any]:
    """Return what `ls --json` prints."""
    return {
        "partitions": [
            {
                "topic": partition.topic,
                "topic_id": str(manifest.key.topic_id),
                "partition": partition.partition,
                "directory": partition.path,
                "version": manifest.version,
                "first_offset": manifest.first_offset,
                "next_offset": manifest.next_offset,
                "records": manifest.records,
                "bytes": manifest.size,
                "files": [asdict(file) for file in manifest.files],
                "quarantined": [asdict(batch) for batch in manifest.quarantined],
            }
            for partition, manifest in partitions
        ],
        "findings": [asdict(finding) for finding in findings],
    }


def _quarantine_finding(manifest: Manifest, batch: Quarantined) -> Finding:
    """Return the finding for a quarantined batch. It is not damage."""
    path = f"{ArchivedPartition(manifest.topic, manifest.key.partition).path}/{batch.name}"
    return Finding(
        Kind.POISON,
        path,
        f"kept raw, because it cannot be decoded: {batch.reason}",
        first_offset=batch.first_offset,
        next_offset=batch.next_offset,
    )


# --- verify --------------------------------------------------------------------------------------


@dataclass
class _Tally:
    partitions: int = 0
    files: int = 0
    records: int = 0
    bytes: int = 0
    damage: int = 0
    poison: int = 0
    notes: int = 0

    def count(self, finding: Finding) -> None:
        """Count a finding by its kind."""
        match finding.kind:
            case Kind.DAMAGE:
                self.damage += 1
            case Kind.POISON:
                self.poison += 1
            case Kind.NOTE:
                self.notes += 1


def verify(archived: ArchiveDirectory, directory: Path, selector: str | None) -> bool:
    """Check every byte and row of the archive, and that it joins the log. While a broker runs,
    the log is not checked."""
    tally = _Tally()
    for finding in _findings(archived, directory, selector, tally):
        tally.count(finding)
        print(finding, flush=True)
    print(_summary_line(tally))
    return tally.damage > 0


def _findings(
    archived: ArchiveDirectory, directory: Path, selector: str | None, tally: _Tally
) -> Iterator[Finding]:
    """Yield the findings of all selected partitions, and count in `tally` what was checked."""
    partitions = archived.partitions(selector)
    log_starts = _read_log_starts(directory)
    if log_starts is None:
        yield Finding(
            Kind.NOTE,
            str(directory),
            "a broker has it open: whether log and archive join was not checked",
        )
    show_progress = progress_on_stderr()
    total = sum(
        manifest.size
        for partition in partitions
        if (manifest := _manifest_if_readable(archived, partition))
    )
    for partition in partitions:
        tally.partitions += 1
        verification = _PartitionVerification(
            archived, partition, tally, lambda: show_progress(tally.bytes, total)
        )
        yield from verification.findings()
        # A damaged manifest does not say where the archive ends.
        if log_starts is not None and not verification.is_damaged:
            yield from _check_join(archived, partition, verification.manifest, log_starts)


def _check_join(
    archived: ArchiveDirectory,
    partition: ArchivedPartition,
    manifest: Manifest | None,
    log_starts: LogStarts,
) -> Iterator[Finding]:
    """Yield the gap between archive and log as damage. If there is none, yield notes about unlisted
    files."""
    if manifest is not None:
        # A partition without a log gets 0, so no gap is found: no archive ends before offset 0.
        log_start = log_starts.get(manifest.key, 0)
        archive_end = manifest.next_offset
        description = f"neither archive nor log has them: the log starts at {log_start}"
    else:
        try:
            topic_id = archived.owner(partition.topic)
        except DamagedData as error:
            # Without the topic's id, its log is not known.
            yield _damage_finding(error)
            return
        log_start = log_starts.get(PartitionKey(topic_id, partition.partition), 0)
        # Without a manifest, none of the archive's files counts: everything from the first of them
        # up to the log is missing.
        first_file_offset = archived.first_file(partition)
        archive_end = log_start if first_file_offset is None else first_file_offset
        description = (
            "_manifest.json is missing, and the log no longer has these records: restore it "
            "from a backup"
        )
    if archive_end < log_start:
        yield Finding(
            Kind.DAMAGE,
            partition.path,
            description,
            first_offset=archive_end,
            next_offset=log_start,
        )
        return
    yield from archived.unlisted_files(partition, manifest)


def _read_log_starts(directory: Path) -> LogStarts | None:
    """Return the first offset of each partition's log, or None while a broker has the directory
    open. The lock is released at once, because the rest may take long and needs no lock."""
    disk = RealDisk(directory, read_only=True)
    try:
        inspection = Inspection(disk)
        log_starts = {key: log.first_offset for key, log in inspection.logs.items()}
        inspection.close()
        return log_starts
    except StoreLocked:
        return None
    except UnusableDirectory:  # an archive that was copied without its log
        return {}
    finally:
        disk.close()


def _manifest_if_readable(
    archived: ArchiveDirectory, partition: ArchivedPartition
) -> Manifest | None:
    """Return the manifest, or None if it is damaged; the damage is reported later."""
    try:
        return archived.manifest(partition)
    except DamagedData:
        return None


class _PartitionVerification:
    """Check the files of one partition one by one; its manifest may change meanwhile."""

    def __init__(
        self,
        archived: ArchiveDirectory,
        partition: ArchivedPartition,
        tally: _Tally,
        show_progress: Callable[[], None],
    ) -> None:
        self.manifest: Manifest | None = None
        #: Whether the manifest is damaged.
        self.is_damaged = False
        self._archived = archived
        self._partition = partition
        self._tally = tally
        self._show_progress = show_progress
        self._checked: set[str] = set()

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of this partition. Start again with the new manifest whenever a broker
        replaces it; files that are already checked are not checked again."""
        while True:
            try:
                self.manifest = self._archived.manifest(self._partition)
            except DamagedData as error:
                self.is_damaged = True
                yield _damage_finding(error)
                return
            if self.manifest is None:
                return
            try:
                yield from self._check_all(self.manifest)
                return
            except _ManifestReplaced:
                continue

    def _check_all(self, manifest: Manifest) -> Iterator[Finding]:
        """Yield the findings of all files of the manifest. Raises _ManifestReplaced if a file has
        findings and the manifest is no longer the current one: the broker may have removed the
        file."""
        everything: list[ArchiveFile | Quarantined] = [*manifest.files, *manifest.quarantined]
        for file in everything:
            if file.name in self._checked:
                continue
            # Collect the findings first: they are void if the manifest was replaced meanwhile.
            findings = list(self._check(manifest, file))
            if findings and self._has_changed(manifest):
                raise _ManifestReplaced
            yield from findings
            self._checked.add(file.name)
            self._tally.files += 1
            self._tally.bytes += file.size
            self._show_progress()

    def _check(self, manifest: Manifest, file: ArchiveFile | Quarantined) -> Iterator[Finding]:
        """Yield the findings of one file: damaged row groups, and rows that do not belong there.
        Raises UnusableDirectory if the file cannot be read."""
        reader = self._archived.reader
        try:
            if isinstance(file, Quarantined):
                reader.verify(manifest, file)
                yield _quarantine_finding(manifest, file)
                return
            offset = file.first_offset
            for rows in reader.scan(manifest, file):
                if isinstance(rows, DamagedData):
                    yield _damage_finding(rows)
                    continue
                if wrong := _describe_wrong_rows(rows, file, offset, self._partition):
                    yield Finding(
                        Kind.DAMAGE,
                        f"{self._partition.path}/{file.name}",
                        wrong,
                        first_offset=file.first_offset,
                        next_offset=file.next_offset,
                    )
                    return
                self._tally.records += rows.num_rows
                # The lowest offset that the next row group may start with.
                offset = rows.column("offset")[-1].as_py() + 1
        except DamagedData as error:
            yield _damage_finding(error)
        except StorageError as error:  # unreadable for us, so its state is unknown
            raise UnusableDirectory(str(error)) from error

    def _has_changed(self, manifest: Manifest) -> bool:
        """Return whether the manifest has changed since: a broker has replaced it, or it is damaged
        now. Then a missing file is not damage; `findings` reads the manifest again."""
        try:
            now = self._archived.manifest(self._partition)
        except DamagedData:
            return True
        return now is not None and now.version != manifest.version


class _ManifestReplaced(Exception):
    """The manifest has been replaced."""


def _describe_wrong_rows(
    rows: pa.RecordBatch, file: ArchiveFile, offset: int, expected: ArchivedPartition
) -> str | None:
    """Return how the rows of a row group violate the archive's format, or None. Their checksum
    is right, so they were written like this."""
    offsets = rows.column("offset")
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if not offset <= first <= last < file.next_offset:
        return f"offsets {first} to {last} are outside {offset} to {file.next_offset - 1}"
    steps = pc.subtract(offsets.slice(1), offsets.slice(0, len(offsets) - 1))
    if rows.num_rows > 1 and pc.min(steps).as_py() < 1:
        return f"offsets {first} to {last} are not ascending"
    owners = {(topic.as_py(), partition.as_py()) for topic, partition in _first_and_last_rows(rows)}
    if owners != {expected}:
        names = [f"{topic}:{partition}" for topic, partition in sorted(owners)]
        return f"the rows belong to {', '.join(names)}"
    return None


def _first_and_last_rows(rows: pa.RecordBatch) -> Iterator[tuple[pa.Scalar, pa.Scalar]]:
    for name in (0, rows.num_rows - 1):
        yield rows.column("topic")[name], rows.column("partition")[name]


def _damage_finding(error: DamagedData) -> Finding:
    """Return the finding for an error, whose text starts with the path."""
    path, _, description = str(error).partition(": ")
    return Finding(Kind.DAMAGE, path, description)


def _summary_line(tally: _Tally) -> str:
    """Return the last line: how much was found, and how much was checked."""
    results = [
        pluralize(tally.damage, "damaged range") if tally.damage else "no damage",
        *([pluralize(tally.poison, "quarantined batch", "es")] if tally.poison else []),
        *([pluralize(tally.notes, "note")] if tally.notes else []),
    ]
    checked = [
        pluralize(tally.partitions, "partition"),
        pluralize(tally.files, "file"),
        pluralize(tally.records, "record"),
        pluralize(tally.bytes, "byte"),
    ]
    return f"{', '.join(results)} in {', '.join(checked)}"
