"""What a reliable subscriber is done with: on disk before it counts, whole after any crash."""

from __future__ import annotations

import os
import random
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq.client.zeromq import received_offsets as proxy_done
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


def test_a_long_file_is_written_anew_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_done, "_MANY_RECORDS", 20)
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


@pytest.mark.parametrize("step", ["write", "fdatasync"])
def test_what_could_not_be_noted_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(28, "no space left on device")

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
