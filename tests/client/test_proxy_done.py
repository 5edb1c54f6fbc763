"""What a reliable subscriber is done with: on disk before it counts, whole after any crash."""

from __future__ import annotations

import errno
import os
import random
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq.client.files import durable
from quackmq.client.zeromq import received_offsets
from quackmq.client.zeromq.received_offsets import ProcessedOffsets
from quackmq.errors import NewerFormat, StoreLocked, UnusableDirectory
from quackmq.model.subscription import RecordPosition

TOPIC = uuid.UUID(int=7)
OTHER = uuid.UUID(int=8)


def offsets(
    done: ProcessedOffsets, most: int, topic_id: uuid.UUID = TOPIC, partition: int = 0
) -> set[int]:
    return {each for each in range(most) if done.has(topic_id, RecordPosition(partition, each))}


def file_of(directory: Path) -> Path:
    return directory / "donald" / "done"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 60), max_size=60),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_offsets_are_done_one_by_one_and_before_marks(singles: list[int], marks: list[int]) -> None:
    done = ProcessedOffsets(None, "donald")
    for offset in singles:
        done.add(TOPIC, RecordPosition(0, offset))
    for mark in marks:
        done.add_before(TOPIC, RecordPosition(0, mark))
    assert offsets(done, 70) == {*singles, *range(max(marks, default=0))}
    assert offsets(done, 70, OTHER) == offsets(done, 70, partition=1) == set()


def test_what_is_done_is_done_after_a_restart(tmp_path: Path) -> None:
    done = ProcessedOffsets(tmp_path, "donald")
    for offset in (0, 1, 2, 7):
        done.add(TOPIC, RecordPosition(0, offset))
    done.add(TOPIC, RecordPosition(3, 5))
    done.add(OTHER, RecordPosition(0, 1))
    done.close()
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 10) == {0, 1, 2, 7}
    assert offsets(again, 10, partition=3) == {5}
    assert offsets(again, 10, OTHER) == {1}
    again.close()


def test_a_file_cut_at_any_byte_has_what_came_before(tmp_path: Path) -> None:
    done = ProcessedOffsets(tmp_path, "donald")
    for offset in range(3):
        done.add(TOPIC, RecordPosition(0, offset))
    done.close()
    file = file_of(tmp_path)
    whole = file.read_bytes()
    head, record = 8, (len(whole) - 8) // 3
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        again = ProcessedOffsets(tmp_path, "donald")
        kept = max(0, size - head) // record
        assert offsets(again, 10) == set(range(kept)), size
        again.add(TOPIC, RecordPosition(0, 9))
        again.close()
        third = ProcessedOffsets(tmp_path, "donald")
        assert offsets(third, 10) == {*range(kept), 9}
        third.close()


def test_a_torn_record_is_known_by_its_checksum(tmp_path: Path) -> None:
    done = ProcessedOffsets(tmp_path, "donald")
    for offset in range(2):
        done.add(TOPIC, RecordPosition(0, offset))
    done.close()
    file = file_of(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[-10] ^= 1
    file.write_bytes(whole)
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 10) == {0}
    again.close()


@pytest.mark.parametrize("place", [0, 20, 50])
def test_a_file_that_is_damaged_before_its_last_record_is_named_and_left_alone(
    tmp_path: Path, place: int
) -> None:
    """No crash does that. Cutting it off there would forget the records behind."""
    done = ProcessedOffsets(tmp_path, "donald")
    for offset in range(3):
        done.add(TOPIC, RecordPosition(0, offset))
    done.close()
    file = file_of(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1
    file.write_bytes(whole)
    with pytest.raises(UnusableDirectory, match="done is damaged.*or remove it"):
        ProcessedOffsets(tmp_path, "donald")
    assert file.read_bytes() == whole
    file.unlink()
    ProcessedOffsets(tmp_path, "donald").close()


def test_a_long_file_is_written_anew_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_offsets, "_MANY_RECORDS", 20)
    numbers = list(range(100))
    random.Random(1).shuffle(numbers)
    done = ProcessedOffsets(tmp_path, "donald")
    sizes = set()
    for number in numbers:
        done.add(TOPIC, RecordPosition(0, number))
        sizes.add(file_of(tmp_path).stat().st_size)
    assert len(sizes) < 100, "it became shorter at times"
    done.close()
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 200) == set(range(100))
    again.close()


@pytest.mark.parametrize("opened", range(4))
def test_a_long_file_is_written_anew_when_descriptors_are_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: int
) -> None:
    """However many files can be opened before there are no descriptors."""
    monkeypatch.setattr(received_offsets, "_MANY_RECORDS", 20)
    done = ProcessedOffsets(tmp_path, "donald")
    for number in range(20):
        done.add(TOPIC, RecordPosition(0, number))
    known = set(range(20))
    really_open, room = os.open, iter(range(opened))

    def open_few(*arguments: Any) -> int:
        if next(room, None) is None:
            raise OSError(errno.EMFILE, "too many open files")
        return really_open(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_few)
        for number in (30, 31):
            try:
                done.add(TOPIC, RecordPosition(0, number))
                known.add(number)
            except UnusableDirectory as error:
                assert "too many open files" in str(error)
    done.add(TOPIC, RecordPosition(0, 40))
    done.close()
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 100) == {*known, 40}
    again.close()


@pytest.mark.parametrize("step", ["write", "fdatasync", "rename", "sync_names"])
def test_a_failure_while_a_long_file_is_written_anew_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(received_offsets, "_MANY_RECORDS", 20)
    done = ProcessedOffsets(tmp_path, "donald")
    for number in range(20):
        done.add(TOPIC, RecordPosition(0, number))
    long_bytes = file_of(tmp_path).stat().st_size
    for _ in range(2):
        with monkeypatch.context() as patch:
            target: object = {"rename": Path, "sync_names": durable}.get(step, os)
            patch.setattr(target, "replace" if step == "rename" else step, fail)
            with pytest.raises(UnusableDirectory, match="no space"):
                done.add(TOPIC, RecordPosition(0, 50))
        assert offsets(done, 100) == set(range(20))
    for number in range(30, 33):
        done.add(TOPIC, RecordPosition(0, number))
    assert file_of(tmp_path).stat().st_size < long_bytes, "it was written anew"
    done.close()
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 100) == {*range(20), *range(30, 33)}
    again.close()


def test_a_directory_is_synced_before_records_are_appended_to_a_file_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a crash could bring the old file back, without these records."""
    monkeypatch.setattr(received_offsets, "_MANY_RECORDS", 20)
    done = ProcessedOffsets(tmp_path, "donald")
    for number in range(20):
        done.add(TOPIC, RecordPosition(0, number))
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_names", fail)
        with pytest.raises(UnusableDirectory, match="no space"):
            done.add(TOPIC, RecordPosition(0, 20))
        sync_again = Mock()
        patch.setattr(durable, "sync_names", sync_again)
        done.add(TOPIC, RecordPosition(0, 20))
    sync_again.assert_called_once()
    done.close()


def fail(*arguments: object) -> int:
    raise OSError(28, "no space left on device")


@pytest.mark.parametrize("step", ["write", "fdatasync"])
def test_what_could_not_be_noted_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    done = ProcessedOffsets(tmp_path, "donald")
    done.add(TOPIC, RecordPosition(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(UnusableDirectory, match="no space"):
            done.add(TOPIC, RecordPosition(0, 1))
    assert offsets(done, 10) == {0}
    done.add(TOPIC, RecordPosition(0, 2))
    done.close()
    again = ProcessedOffsets(tmp_path, "donald")
    assert offsets(again, 10) == {0, 2}
    again.close()


def test_one_process_uses_a_directory_and_a_later_versions_file_is_left_alone(
    tmp_path: Path,
) -> None:
    done = ProcessedOffsets(tmp_path, "donald")
    with pytest.raises(StoreLocked):
        ProcessedOffsets(tmp_path, "donald")
    ProcessedOffsets(tmp_path, "daisy").close()
    done.close()
    file_of(tmp_path).write_bytes(b"QMDONE2\nwhatever")
    with pytest.raises(NewerFormat):
        ProcessedOffsets(tmp_path, "donald")
    assert file_of(tmp_path).read_bytes() == b"QMDONE2\nwhatever"
