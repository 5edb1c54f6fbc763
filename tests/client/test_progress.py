"""A message is done when its holder asks for the next one, and never before. Pure."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.client.consuming.progress import Mode, Progress
from quackmq.client.consuming.start import PartitionPosition

BUSY_S = 300.0


class FakeRecord:
    def __init__(self, offset: int, partition: int = 0) -> None:
        self._offset = offset
        self._partition = partition

    def offset(self) -> int:
        return self._offset

    def partition(self) -> int:
        return self._partition


class FakeFile:
    """A position in memory."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.is_ours = True

    def note(self, position: int) -> None:
        self.position = position

    def close(self) -> None:
        pass


def records(*offsets: int, partition: int = 0) -> Any:
    return [FakeRecord(offset, partition) for offset in offsets]


def begun(
    mode: Mode = Mode.REPEAT, *, busy_s: float = BUSY_S, partitions: int = 1
) -> tuple[Progress, list[Any]]:
    progress = Progress(mode, busy_s)
    files: list[Any] = [FakeFile(0) for _ in range(partitions)]
    for partition, file in enumerate(files):
        state = PartitionPosition(0, file)
        state.is_claimed = True
        progress.add_partition(partition, state)
    return progress, files


def taken(progress: Progress, holder: object) -> int | None:
    record = progress.deliver_next(holder, time.monotonic())
    return None if record is None else record.offset()


def test_a_message_is_done_when_the_next_one_is_asked_for() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1))
    assert taken(progress, "loop") == 0
    assert file.position == 0
    assert taken(progress, "loop") == 1
    assert file.position == 1
    assert taken(progress, "loop") is None
    assert file.position == 2


def test_messages_that_wait_are_not_done() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1, 2))
    taken(progress, "loop")
    progress.finish("loop")
    assert file.position == 1
    state = progress.position_in(0)
    assert state is not None
    assert (state.done, state.delivered_end, state.fetched_end) == (1, 1, 3)


def test_a_partition_is_done_up_to_the_first_message_in_hand() -> None:
    """Holders finish in any order."""
    progress, (file,) = begun()
    progress.add(records(0, 1, 2, 3))
    assert [taken(progress, each) for each in "abc"] == [0, 1, 2]
    progress.finish("b")
    assert file.position == 0
    progress.finish("a")
    assert file.position == 2
    progress.finish("c")
    assert file.position == 3


def test_holders_of_one_partition_do_not_hold_another_back() -> None:
    progress, files = begun(partitions=2)
    progress.add(records(0))
    progress.add(records(0, 1, partition=1))
    taken(progress, "slow")
    taken(progress, "fast")
    taken(progress, "fast")
    progress.finish("fast")
    assert [file.position for file in files] == [0, 2]


def test_with_skip_a_message_is_behind_once_it_is_given() -> None:
    progress, (file,) = begun(Mode.SKIP)
    progress.add(records(0, 1))
    taken(progress, "loop")
    assert file.position == 1


def test_a_message_that_nobody_has_seen_comes_again() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1))
    taken(progress, "a")
    progress.finish("a")
    taken(progress, "a")
    progress.put_back("a")
    assert file.position == 1
    assert taken(progress, "b") == 1


def test_a_message_put_back_behind_others_holds_the_position_until_it_is_done() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1))
    assert [taken(progress, each) for each in "ab"] == [0, 1]
    progress.put_back("a")
    progress.finish("b")
    assert file.position == 0
    assert taken(progress, "b") == 0
    assert file.position == 0
    progress.finish("b")
    assert file.position == 2


def test_a_thread_that_has_ended_is_done_with_its_message() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1))
    thread = threading.Thread(target=lambda: taken(progress, threading.current_thread()))
    thread.start()
    thread.join()
    assert taken(progress, "other") == 1
    assert file.position == 0
    progress.finish("other")
    assert file.position == 2


def test_the_last_message_of_a_loop_is_done_when_its_thread_asks_again() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1))
    me = threading.current_thread()
    taken(progress, "loop")
    progress.end_loop("loop", me)
    assert file.position == 0
    progress.finish(me)
    assert file.position == 1


def test_a_message_held_for_too_long_is_given_again() -> None:
    progress, (file,) = begun(busy_s=0)
    progress.add(records(0, 1))
    assert taken(progress, "asleep") == 0
    progress.finish("awake")
    assert taken(progress, "awake") == 0
    progress.finish("asleep")  # too late: it is another's
    assert file.position == 0


def test_a_partition_that_another_process_has_is_let_go_of_with_its_messages() -> None:
    progress, (file,) = begun()
    progress.add(records(0))
    assert progress.release_lost() == []
    file.is_ours = False
    assert progress.release_lost() == [0]
    assert taken(progress, "loop") is None


def test_nothing_is_given_before_the_brokers_cursor_bears_our_note() -> None:
    """Without it the file would not count after a crash."""
    progress, _ = begun()
    state = progress.position_in(0)
    assert state is not None
    state.is_claimed = False
    progress.add(records(0))
    assert taken(progress, "loop") is None


def test_a_move_forgets_what_waits_and_what_is_in_hand() -> None:
    progress, (file,) = begun()
    progress.add(records(0, 1, 2))
    taken(progress, "loop")
    progress.seek(0, 0)
    progress.finish("loop")
    assert file.position == 0
    progress.add(records(0))
    assert taken(progress, "loop") == 0


def test_messages_that_come_twice_are_given_once() -> None:
    progress, _ = begun()
    progress.add(records(0, 1))
    progress.add(records(1, 2))
    progress.add(records(7, partition=5))
    assert [taken(progress, "loop") for _ in range(4)] == [0, 1, 2, None]


@pytest.mark.parametrize("mode", [Mode.REPEAT, Mode.SKIP])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["take", "settle", "put_back"]), st.sampled_from("abc"))
    )
)
def test_the_position_is_at_the_first_message_that_is_not_done(
    mode: Mode, steps: list[tuple[str, str]]
) -> None:
    """Whatever holders do: after a crash nothing is missing, and nothing done comes again, unless
    it lies behind a message in hand."""
    progress, (file,) = begun(mode)
    progress.add(records(*range(10)))
    held: dict[str, int] = {}
    done: set[int] = set()
    for step, holder in steps:
        before = held.pop(holder, None)
        if step == "put_back":
            progress.put_back(holder)
        elif before is not None:
            done.add(before)
        if step == "settle":
            progress.finish(holder)
        elif step == "take" and (offset := taken(progress, holder)) is not None:
            held[holder] = offset
        behind = done | set(held.values()) if mode is Mode.SKIP else done
        assert file.position == min(set(range(11)) - behind)
