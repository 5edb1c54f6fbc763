"""Compare the archive of an experiment with its accounts.

At the end of an experiment everything is archived, and the broker is closed. Then the archive must
hold the complete history of every topic. The Parquet files that the manifests list are read from
the data directory, without the broker and its log, and each entry is checked:

- The offsets of a topic are 0, 1, 2, ... up to the number of entries that the broker has accepted.
- The entries of each publisher and topic have the numbers 0, 1, 2, ... in order, up to the number
  of entries that the publisher has counted as accepted.
- Entries of programs of the user have no numbers. There are as many of each program as the broker
  has accepted from it.

The memory for this does not depend on the number of entries. Nothing is changed on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from quackmq.broker.topic_queue import PUBLISHER_HEADER
from quackmq.cli import limits
from quackmq.cli.experiment.peer import parse_content
from quackmq.cli.experiment.report import ArchiveResult, Outcome
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.cli.text import pluralize
from quackmq.errors import QuackError


class ArchivedEntry(NamedTuple):
    """An entry as the archive has it. `publisher` is None if it has no header with the id."""

    offset: int
    publisher: str | None
    content: bytes


def compare_archive(directory: Path, outcome: Outcome, archived_early: int) -> ArchiveResult:
    """Read the archive in a data directory and compare it with the accounts of the experiment.
    `archived_early` entries were archived before the end; the result passes it on."""
    comparison = _Comparison(directory, outcome)
    problems = tuple(_first_few(comparison.find_problems()))
    return ArchiveResult(
        entries=comparison.entries,
        files=comparison.files,
        archived_early=archived_early,
        problems=problems,
    )


def _read_entries(paths: Iterable[Path]) -> Iterator[ArchivedEntry]:
    """Yield the entries in these files. Raises OSError, or an error of pyarrow, for a file that
    cannot be read."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for rows in file.iter_batches(
                limits.EXPERIMENT_ARCHIVE_ROWS, columns=["offset", "headers", "value"]
            ):
                columns = (rows.column(name).to_pylist() for name in rows.schema.names)
                by_name = dict(zip(rows.schema.names, columns, strict=True))
                for offset, headers, value in zip(
                    by_name["offset"], by_name["headers"], by_name["value"], strict=True
                ):
                    yield ArchivedEntry(offset, _find_publisher(headers), value or b"")


def _find_publisher(headers: Sequence[dict[str, object]] | None) -> str | None:
    for header in headers or ():
        if header["key"] == PUBLISHER_HEADER and isinstance(header["value"], bytes):
            return header["value"].decode(errors="backslashreplace")
    return None


class _Comparison:
    """The counts of one comparison, topic after topic."""

    def __init__(self, directory: Path, outcome: Outcome) -> None:
        self._directory = directory
        self._outcome = outcome
        #: The publishers whose entries have numbers.
        self._numbered = {each.id for each in outcome.publishers if each.report is not None}
        #: The number that the next entry of a topic and publisher must have.
        self._next_numbers: Counter[tuple[str, str]] = Counter()
        #: How many entries there are of each publisher, in all topics.
        self._found: Counter[str] = Counter()
        self.entries = 0
        self.files = 0

    def find_problems(self) -> Iterator[str]:
        """Read and compare all topics, and yield a sentence for each difference."""
        with ArchiveDirectory(self._directory) as archive:
            for topic in self._outcome.held:
                try:
                    paths = self._list_files(archive, topic)
                    self.files += len(paths)
                    yield from self._compare_topic(topic, _read_entries(paths))
                except (OSError, QuackError, pa.ArrowException) as error:
                    yield f"the archive of topic {topic} cannot be read: {error}"
        yield from self._compare_publishers()

    def _list_files(self, archive: ArchiveDirectory, topic: str) -> list[Path]:
        """Return the files of a topic that count, in the order of offsets."""
        partition = ArchivedPartition(topic, 0)
        manifest = archive.manifest(partition)
        if manifest is None:
            return []
        return [self._directory / partition.path / file.name for file in manifest.files]

    def _compare_topic(self, topic: str, entries: Iterable[ArchivedEntry]) -> Iterator[str]:
        """Count the entries of a topic, and yield a sentence for each one that is missing, double
        or in the wrong place."""
        where = f"the archive of topic {topic}"
        expected = 0
        for entry in entries:
            self.entries += 1
            yield from _describe_gap(where, "", expected, entry.offset)
            expected = max(expected, entry.offset + 1)
            if entry.publisher is not None:
                self._found[entry.publisher] += 1
            if entry.publisher in self._numbered:
                yield from self._compare_number(where, topic, entry.publisher, entry.content)
        if expected < (held := self._outcome.held[topic]):
            yield from _describe_gap(where, "", expected, held)
        elif expected > held:
            yield f"{where} has {expected} entries, but the broker accepted {held}"

    def _compare_publishers(self) -> Iterator[str]:
        """Yield a sentence for each publisher of which the archive lacks the last entries, or has
        too many."""
        for account in self._outcome.publishers:
            if account.program is not None:
                if (found := self._found[account.id]) != account.published:
                    yield (
                        f"the archive has {found} entries of publisher {account.id}, but the "
                        f"broker accepted {account.published}"
                    )
                continue
            for topic, accepted in (account.report.entries if account.report else {}).items():
                where = f"the archive of topic {topic}"
                found = self._next_numbers[topic, account.id]
                yield from _describe_gap(where, f" of {account.id}", found, accepted)

    def _compare_number(
        self, where: str, topic: str, publisher: str, content: bytes
    ) -> Iterator[str]:
        """Yield a sentence if an entry does not have the next number of its publisher."""
        parsed = parse_content(content)
        if parsed is None or parsed[0] != publisher:
            yield f"{where} has an entry of {publisher} with the content {content[:60]!r}"
            return
        expected, number = self._next_numbers[topic, publisher], parsed[1]
        yield from _describe_gap(where, f" of {publisher}", expected, number)
        self._next_numbers[topic, publisher] = max(expected, number + 1)


def _describe_gap(where: str, owner: str, expected: int, found: int) -> Iterator[str]:
    """Yield a sentence if the index of an entry is not the expected one. `owner` is " of" and a
    publisher, or empty. Indexes begin at 0; the sentence counts from 1, as entry numbers do."""
    if found == expected + 1:
        yield f"{where} lacks entry {found}{owner}"
    elif found > expected:
        yield f"{where} lacks entries {expected + 1} to {found}{owner}"
    elif found < expected:
        yield f"{where} has entry {found + 1}{owner} twice, or too late"


def _first_few(problems: Iterator[str]) -> Iterator[str]:
    """Yield the first problems, and how many more there are."""
    yield from islice(problems, limits.EXPERIMENT_ARCHIVE_PROBLEMS)
    if more := sum(1 for _ in problems):
        yield f"the archive differs from the accounts in {pluralize(more, 'more way')}"
