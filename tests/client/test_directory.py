"""What a client keeps on disk: positions that survive a kill, are there whole, have one owner."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import QuackTimeout, errors, limits
from quackmq.client.consuming.directory import Directory, default_directory
from quackmq.client.consuming.position_file import NotOwner, PositionFile
from quackmq.client.consuming.start import choose_position
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Committed

TOPIC = uuid.uuid4()
SOON = Deadline(60)


def taken(file: PositionFile, position: int | None = None) -> int:
    """Take a file over; it keeps its position unless it has none."""
    return file.take_over(lambda found: (position or 0) if found is None else found, SOON)


def test_a_position_is_found_again(tmp_path: Path) -> None:
    file = PositionFile(tmp_path / "p", TOPIC)
    assert taken(file, 5) == 5
    for position in (6, 7, 3, 2**40):
        file.write(position, SOON)
        again = PositionFile(tmp_path / "p", TOPIC)
        assert again.peek() == position
        again.close()
    file.close()


def test_a_position_that_was_noted_is_there_for_other_processes_at_once(tmp_path: Path) -> None:
    """That is what makes it survive a kill: it is in the kernel's memory, not in the process's."""
    file = PositionFile(tmp_path / "p", TOPIC)
    taken(file, 5)
    before = (tmp_path / "p").read_bytes()
    file.note(6)
    assert PositionFile(tmp_path / "p", TOPIC).peek() == 6
    after = (tmp_path / "p").read_bytes()
    changed = [
        index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    ]
    assert changed
    assert changed[0] // 8 == changed[-1] // 8  # one aligned word, so never half of a position
    file.close()
    file.note(7)  # by a thread that has not heard of it
    assert PositionFile(tmp_path / "p", TOPIC).peek() == 6


def test_a_file_of_the_version_before_counts_as_none(tmp_path: Path) -> None:
    """The broker's cursor tells how far it is."""
    (tmp_path / "p").write_bytes(b"QPO1".ljust(1024, b"\0"))
    file = PositionFile(tmp_path / "p", TOPIC)
    assert file.peek() is None
    assert taken(file, 4) == 4
    assert file.peek() == 4
    file.close()


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    file = PositionFile(tmp_path / "p", TOPIC)
    taken(file, 4)
    file.close()
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "p").write_bytes(b"QPO9" + data[4:])
    with pytest.raises(errors.NewerFormat, match="QPO9"):
        file.peek()


@given(data=st.binary(max_size=1200))
def test_bytes_that_are_no_position_are_none(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "p"
    path.write_bytes(data)
    assert PositionFile(path, TOPIC).peek() is None


def test_who_is_no_longer_the_owner_writes_nothing(tmp_path: Path) -> None:
    """A process that slept must not write over the position of the one that has taken over."""
    sleeper = PositionFile(tmp_path / "p", TOPIC)
    taken(sleeper, 10)
    owner = PositionFile(tmp_path / "p", TOPIC)
    assert taken(owner) == 10
    owner.write(20, SOON)
    assert owner.is_ours
    assert not sleeper.is_ours
    with pytest.raises(NotOwner):
        sleeper.write(11, SOON)
    sleeper.note(12)
    assert owner.peek() == 20
    sleeper.close()
    owner.close()


def test_a_file_that_somebody_holds_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    file = PositionFile(tmp_path / "p", TOPIC)
    taken(file, 1)
    with open(tmp_path / "p") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(QuackTimeout, match="another process"):
            file.write(2, Deadline(0.05))
        with pytest.raises(QuackTimeout, match="another process"):
            PositionFile(tmp_path / "p", TOPIC).take_over(lambda found: 9, Deadline(0.05))
    file.write(2, SOON)
    file.close()


def test_a_process_killed_while_it_took_a_position_over_leaves_nothing(tmp_path: Path) -> None:
    left = tmp_path / "p.0123"
    left.write_bytes(b"half")
    file = PositionFile(tmp_path / "p", TOPIC)
    taken(file, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    file.close()


def test_a_position_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.UnusableDirectory, match=r"gone/p cannot be used"):
        taken(PositionFile(tmp_path / "gone" / "p", TOPIC), 1)


def test_a_position_that_cannot_be_read_or_removed_is_named(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    (tmp_path / f"{TOPIC.hex}-0.position").mkdir()
    with pytest.raises(errors.UnusableDirectory, match="position cannot be used: Is a directory"):
        directory.peek(TOPIC, 0)
    with pytest.raises(errors.UnusableDirectory, match="position cannot be removed"):
        directory.forget(TOPIC)
    directory.close()


def test_a_topic_of_another_id_has_positions_of_its_own(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    file = directory.position_file(TOPIC, 0)
    taken(file, 9)
    file.close()
    assert directory.peek(TOPIC, 0) == 9
    assert directory.peek(uuid.uuid4(), 0) is None
    (path,) = tmp_path.glob("*.position")
    assert PositionFile(path, uuid.uuid4()).peek() is None
    assert directory.peek(TOPIC, 1) is None
    directory.forget(TOPIC)
    assert directory.peek(TOPIC, 0) is None
    directory.close()


def test_processes_have_numbers_and_who_comes_again_has_its_own(tmp_path: Path) -> None:
    first, second = Directory(tmp_path), Directory(tmp_path)
    assert (first.process, second.process) == (0, 1)
    assert first.id == second.id
    first.close()
    third = Directory(tmp_path)
    assert (third.process, third.id) == (0, second.id)
    second.close()
    third.close()


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("not an id")
    with pytest.raises(errors.UnusableDirectory, match="damaged"):
        Directory(tmp_path)


def test_the_default_directory_is_the_users_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_directory("billing") == tmp_path / "quackmq" / "billing"
    names = ["a/b", "..", "ä" * 100, "x" * limits.NAME_BYTES, "."]
    found = {default_directory(name) for name in names}
    assert len(found) == len(names)
    for path in found:
        assert path.parent == tmp_path / "quackmq"
        assert len(os.fsencode(path.name)) < limits.NAME_BYTES


@pytest.mark.parametrize(
    ("cursor", "position", "expected"),
    [
        (Committed(5, "ours"), 9, 9),  # our commit was on its way
        (Committed(5, "ours"), None, 5),  # the file is lost
        (Committed(9, "ours"), 5, 9),  # the file is an old one
        (Committed(5, ""), 9, 5),  # moved by somebody else
        (Committed(5, "theirs"), 9, 5),  # another machine went on
    ],
)
def test_the_brokers_cursor_beats_the_file_unless_it_is_ours(
    cursor: Committed, position: int | None, expected: int
) -> None:
    assert choose_position(cursor, position, "ours") == expected


def test_members_of_dead_processes_are_told_from_those_of_running_ones(tmp_path: Path) -> None:
    first, second = Directory(tmp_path), Directory(tmp_path)
    names = [first.instance(TOPIC), second.instance(TOPIC)]
    strangers = ["", "x", f"{first.id}.1", f"{first.id}.x.y", f"{first.id}.7.y", "other.1.y"]
    with first.dead_instances([*names, *strangers]) as dead:
        assert dead == names[:1], "it knows itself which members it has"
    second.close()
    with first.dead_instances([*names, *strangers]) as dead:
        assert dead == names
        third = Directory(tmp_path)
        assert third.process == 2, "nobody becomes a process that is being buried"
    fourth = Directory(tmp_path)
    assert fourth.process == 1
    for each in (first, third, fourth):
        each.close()
