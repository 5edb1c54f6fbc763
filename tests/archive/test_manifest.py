"""Manifests: ranges without gap or overlap, whatever is added, replaced and trimmed."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quackmq import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import (
    ArchiveFile,
    Manifest,
    Quarantined,
    add,
    broken_rule,
    decode,
    dropped_names,
    empty,
    encode,
    file_name,
    replace,
    trim,
)
from quackmq.errors import DamagedData, InvalidRequest, LimitReached, NewerFormat, StateChanged
from quackmq.model.topic import PartitionKey
from tests.archive.support import KEY, TOPIC
from tests.kit import effort
from tests.kit.tables import each

#: No test asserts a time: a busy machine is no bug.
UNTIMED = settings(deadline=None)


def file_of(first: int, end: int, version: int, records: int | None = None) -> ArchiveFile:
    records = end - first if records is None else records
    bounds = (first, end - 1, first, end - 1) if records else (None, None, None, None)
    return ArchiveFile(file_name(first, version), first, end, records, 1000, 100, 5, *bounds)


def aside_of(first: int, end: int, version: int) -> Quarantined:
    return Quarantined(manifests.quarantine_name(first, version), first, end, 70, 9, "no zstd")


def of_ranges(*ends: int) -> Manifest:
    """Files from 0 to each of these."""
    listed = empty(KEY, TOPIC, 0)
    for end in ends:
        listed = add(listed, file_of(listed.next_offset, end, listed.version + 1))
    return listed


def names(listed: Manifest) -> list[str]:
    return [file.name for file in listed.files]


# --- adding --------------------------------------------------------------------------------------


def test_files_follow_on_each_other() -> None:
    listed = of_ranges(10, 25)
    assert (listed.version, listed.first_offset, listed.next_offset) == (2, 0, 25)
    assert names(listed) == [
        "00000000000000000000-00000001.parquet",
        "00000000000000000010-00000002.parquet",
    ]
    assert (listed.records, listed.size) == (25, 2000)
    assert [listed.file_at(offset) for offset in (0, 9, 10, 24)] == [0, 0, 1, 1]


@pytest.mark.parametrize("first", [9, 11])
def test_a_file_that_leaves_a_gap_or_overlaps_is_refused(first: int) -> None:
    with pytest.raises(InvalidRequest, match="the archive ends at 10"):
        add(of_ranges(10), file_of(first, 30, 2))


def test_a_file_may_hold_no_records_and_is_still_a_range() -> None:
    listed = add(of_ranges(10), file_of(10, 30, 2, records=0))
    assert (listed.next_offset, listed.records) == (30, 10)


def test_what_is_quarantined_lies_within_the_file_it_comes_with() -> None:
    listed = add(of_ranges(10), file_of(10, 30, 2, records=15), [aside_of(12, 15, 2)])
    assert [listed.quarantined_from(offset) for offset in (14, 15)] == [aside_of(12, 15, 2), None]
    with pytest.raises(InvalidRequest, match="not in the range"):
        add(listed, file_of(30, 40, 3), [aside_of(29, 31, 3)])


def test_more_files_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARCHIVE_FILES", 2)
    with pytest.raises(LimitReached, match="merge"):
        of_ranges(1, 2, 3)


# --- replacing -----------------------------------------------------------------------------------


def test_small_files_are_replaced_by_a_large_one() -> None:
    listed = of_ranges(10, 20, 30, 40)
    merged = replace(listed, names(listed)[1:3], [file_of(10, 30, 5)], listed.version)
    assert [(file.first_offset, file.next_offset) for file in merged.files] == [
        (0, 10),
        (10, 30),
        (30, 40),
    ]
    assert merged.version == 5
    assert list(dropped_names(listed, merged)) == names(listed)[1:3]


def test_what_was_planned_by_an_older_version_holds_while_its_files_are_listed() -> None:
    """Archiving goes on while a merge takes an hour; it must not have been for nothing."""
    planned = of_ranges(10, 20, 30)
    later = add(planned, file_of(30, 40, 4))
    merged = replace(later, names(planned)[:2], [file_of(0, 20, 5)], planned.version)
    assert [file.next_offset for file in merged.files] == [20, 30, 40]
    cut = trim(later, 12)
    with pytest.raises(StateChanged, match="plan again"):
        replace(cut, names(planned)[:2], [file_of(0, 20, 6)], planned.version)
    with pytest.raises(StateChanged, match="plan again"):
        replace(merged, names(planned)[:2], [file_of(0, 20, 6)], planned.version)


def test_a_plan_by_a_version_that_has_not_been_is_refused() -> None:
    listed = of_ranges(10, 20)
    with pytest.raises(StateChanged, match="plan again"):
        replace(listed, names(listed), [file_of(0, 20, 3)], 3)


def test_an_edge_that_moved_on_since_the_plan_is_replaced_by_what_was_planned() -> None:
    planned = trim(of_ranges(10, 20), 4)
    later = trim(planned, 7)
    again = replace(later, names(planned), [file_of(4, 20, 5)], planned.version)
    assert (again.first_offset, again.edge) == (7, again.files[0])


@each(
    ("old", "new"),
    [
        ([0, 1], [file_of(0, 15, 4)]),
        ([0, 1], [file_of(5, 20, 4)]),
        ([0, 1], [file_of(0, 10, 4), file_of(11, 20, 4)]),
        ([0, 1], [file_of(0, 11, 4), file_of(10, 20, 4)]),
        ([1, 0], [file_of(0, 20, 4)]),
        ([0, 2], [file_of(0, 30, 4)]),
        ([0, 1], [file_of(0, 20, 4, records=19)]),
        ([0], []),
        ([], [file_of(0, 10, 4)]),
    ],
)
def test_ranges_and_records_must_match(old: list[int], new: list[ArchiveFile]) -> None:
    listed = of_ranges(10, 20, 30)
    with pytest.raises(InvalidRequest):
        replace(listed, [names(listed)[index] for index in old], new, listed.version)


def test_a_name_that_is_not_listed_is_refused() -> None:
    listed = of_ranges(10)
    with pytest.raises(InvalidRequest, match="not in the manifest"):
        replace(listed, [file_name(0, 9)], [file_of(0, 10, 2)], listed.version)


# --- trimming ------------------------------------------------------------------------------------


def test_whole_files_go_and_the_one_that_is_cut_is_the_edge() -> None:
    listed = add(of_ranges(10, 20), file_of(20, 30, 3, records=7), [aside_of(21, 24, 3)])
    cut = trim(listed, 22)
    assert (cut.first_offset, cut.next_offset, names(cut)) == (22, 30, names(listed)[2:])
    assert cut.edge == listed.files[2]
    assert cut.quarantined == listed.quarantined
    whole = trim(listed, 20)
    assert (whole.edge, whole.first_offset) == (None, 20)
    assert trim(listed, 24).quarantined == ()
    assert trim(listed, 0) is listed


def test_the_edge_may_be_rewritten_without_what_is_gone() -> None:
    cut = trim(of_ranges(10, 20), 4)
    again = replace(cut, names(cut)[:1], [file_of(4, 10, 4)], cut.version)
    assert (again.edge, again.first_offset, again.files[0].first_offset) == (None, 4, 4)
    with pytest.raises(InvalidRequest):
        replace(cut, names(cut)[:1], [file_of(5, 10, 4)], cut.version)


def test_trimmed_beyond_its_end_an_archive_begins_there() -> None:
    cut = trim(of_ranges(10), 50)
    assert (cut.first_offset, cut.next_offset, cut.files) == (50, 50, ())
    assert add(cut, file_of(50, 60, 3)).first_offset == 50


# --- bytes ---------------------------------------------------------------------------------------


def test_a_manifest_is_json_with_a_file_a_line() -> None:
    listed = add(of_ranges(10), file_of(10, 30, 2, records=15), [aside_of(12, 15, 2)])
    data = encode(listed)
    parsed = json.loads(data)
    assert parsed["topic"] == TOPIC
    assert [file["next_offset"] for file in parsed["files"]] == [10, 30]
    lines = data.decode().splitlines()
    assert sum(".parquet" in line for line in lines) == 2
    assert decode(data, "here") == listed


def test_any_bit_that_flips_is_noticed() -> None:
    data = encode(of_ranges(10, 20))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DamagedData, match="here"):
            decode(bytes(damaged), "here")
    for size in range(len(data)):
        with pytest.raises(DamagedData):
            decode(data[:size], "here")


def resealed(fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()[:-1] + b",\n"
    return body + b'"crc32c":"%08x"}\n' % crc32c(body)


def test_bytes_with_a_good_checksum_that_are_no_manifest_are_damage() -> None:
    sound = json.loads(encode(of_ranges(10, 20)))
    del sound["crc32c"]
    assert decode(resealed(sound), "here") == of_ranges(10, 20)
    for changes in (
        {"files": sound["files"][1:]},
        {"files": sound["files"][::-1]},
        {"files": [{"name": "../../elsewhere"}]},
        {"files": [{**sound["files"][0], "name": "../x"}, sound["files"][1]]},
        {"files": [{**sound["files"][0], "records": "many"}, sound["files"][1]]},
        {"first_offset": 11},
        {"topic_id": "none"},
        {"version": None},
    ):
        with pytest.raises(DamagedData, match="here"):
            decode(resealed({**sound, **changes}), "here")
    with pytest.raises(
        NewerFormat, match="has format 2, this program knows 1: use a newer QuackMQ"
    ):
        decode(resealed({**sound, "format": 2}), "here")


@UNTIMED
@given(
    key=st.builds(PartitionKey, st.uuids(), st.integers(0, 2**31 - 1)),
    first=st.integers(0, 2**60),
    sizes=st.lists(st.integers(1, 2**40), max_size=5),
)
def test_any_manifest_comes_back(key: PartitionKey, first: int, sizes: Sequence[int]) -> None:
    listed = empty(key, "a.topic-of_ours", first)
    for size in sizes:
        end = listed.next_offset + size
        listed = add(listed, file_of(listed.next_offset, end, listed.version + 1))
    assert decode(encode(listed), "here") == listed


# --- everything together -------------------------------------------------------------------------


class Changes(RuleBasedStateMachine):
    """Against a model that is nothing but the records that must be found, by offset."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = empty(PartitionKey(uuid.UUID(int=1), 0), TOPIC, 0)
        self.held: dict[str, set[int]] = {}
        self.model: set[int] = set()
        self.seen: set[str] = set()

    def file(self, first: int, end: int, records: set[int]) -> ArchiveFile:
        file = file_of(first, end, self.listed.version + 1, len(records))
        assert file.name not in self.seen, "a name is never given twice"
        self.seen.add(file.name)
        self.held[file.name] = records
        return file

    @rule(size=st.integers(1, 9), holes=st.sets(st.integers(0, 8)))
    def add(self, size: int, holes: set[int]) -> None:
        first = self.listed.next_offset
        records = {first + index for index in range(size) if index not in holes}
        self.listed = add(self.listed, self.file(first, first + size, records))
        self.model |= records

    @rule(by=st.integers(0, 25))
    def trim(self, by: int) -> None:
        before = self.listed.first_offset + by
        self.listed = trim(self.listed, before)
        self.model = {offset for offset in self.model if offset >= before}

    @precondition(lambda self: self.listed.files)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.listed.files) - 1))
        stop = data.draw(st.integers(start + 1, len(self.listed.files)))
        old = self.listed.files[start:stop]
        begin = old[0].first_offset
        if data.draw(st.booleans()):
            begin = max(begin, self.listed.first_offset)
        records = {offset for file in old for offset in self.held[file.name] if offset >= begin}
        new = self.file(begin, old[-1].next_offset, records)
        with pytest.raises(StateChanged):
            replace(self.listed, [file.name for file in old], [new], self.listed.version + 1)
        self.listed = replace(self.listed, [file.name for file in old], [new], self.listed.version)

    @invariant()
    def every_record_is_in_one_file_and_nothing_is_missing(self) -> None:
        listed = self.listed
        assert broken_rule(listed) is None
        for left, right in pairwise(listed.files):
            assert left.next_offset == right.first_offset
        found = [
            offset
            for file in listed.files
            for offset in self.held[file.name]
            if offset >= listed.first_offset
        ]
        assert len(found) == len(set(found))
        assert set(found) == self.model
        for offset in found:
            assert offset in self.held[listed.files[listed.file_at(offset)].name]
        assert decode(encode(listed), "here") == listed


TestChanges = Changes.TestCase
TestChanges.settings = settings(UNTIMED, max_examples=effort.of(50))


def test_a_sound_manifest_that_is_made_unsound_is_told() -> None:
    listed = of_ranges(10, 20)
    for changes in (
        {"first_offset": 20},
        {"next_offset": 21},
        {"files": ()},
        {"files": (listed.files[0], listed.files[0])},
        {"files": (listed.files[1],)},
        {"quarantined": (aside_of(19, 21, 1),)},
        {"quarantined": (aside_of(3, 6, 1), aside_of(5, 7, 1))},
        {"version": -1},
    ):
        assert broken_rule(dataclasses.replace(listed, **changes)) is not None
