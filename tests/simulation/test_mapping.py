"""Simulated mappings show what real ones show: the file as it is now, as long as somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from quackmq.disk.interface import write_all
from quackmq.disk.real import Disk, File, RealDisk
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.test_disk import live, machine_of

#: Long enough to be viewed in a real file, short enough for a window of every simulated one.
REAL_BYTES, SIMULATED_BYTES = 300_000, 1_000

Act = Callable[[Disk, int], None]


@pytest.fixture(params=["real", "simulated"])
def on_a_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Act], None]:
    """Run something on a disk, with a length that is viewed there."""

    def run(act: Act) -> None:
        if request.param == "real":
            disk = RealDisk(tmp_path)
            act(disk, REAL_BYTES)
            disk.close()
            return

        async def life(disk: SimulatedDisk) -> None:
            disk.windows.is_supported = True
            act(disk, SIMULATED_BYTES)
            await asyncio.sleep(0)

        live(machine_of(1), life, Faults(write_backs=0.0))

    return run


def viewed(file: File, length: int, position: int) -> memoryview:
    """A view; the system may take a moment until it has the bytes."""
    for _ in range(100):
        view = file.view(length, position)
        if view is not None:
            return view
    raise AssertionError("there is no view")


def test_a_view_shows_what_is_written_later(on_a_disk: Callable[[Act], None]) -> None:
    def act(disk: Disk, length: int) -> None:
        file = disk.open("a", create=True)
        write_all(file, b"a" * length, 0)
        view = viewed(file, length, 0)
        before = bytes(view)
        write_all(file, b"b" * 10, 5)
        assert before == b"a" * length
        assert view[:20] == b"a" * 5 + b"b" * 10 + b"a" * 5
        del view
        file.close()

    on_a_disk(act)


def test_a_view_stays_good_when_its_file_is_closed_and_removed(
    on_a_disk: Callable[[Act], None],
) -> None:
    def act(disk: Disk, length: int) -> None:
        file = disk.open("a", create=True)
        write_all(file, b"a" * length, 0)
        view = viewed(file, length, 0)
        file.close()
        disk.remove("a")
        assert view == b"a" * length

    on_a_disk(act)


def test_there_is_no_view_behind_the_end_of_a_file_that_was_cut_off(
    on_a_disk: Callable[[Act], None],
) -> None:
    def act(disk: Disk, length: int) -> None:
        file = disk.open("a", create=True)
        write_all(file, b"a" * 2 * length, 0)
        viewed(file, length, 0)
        file.truncate(length)
        assert all(file.view(length, length) is None for _ in range(100))
        file.close()

    on_a_disk(act)


def test_to_cut_off_a_mapped_file_is_a_misuse() -> None:
    async def life(disk: SimulatedDisk) -> None:
        disk.windows.is_supported = True
        file = disk.open("a", create=True)
        write_all(file, b"a" * SIMULATED_BYTES, 0)
        file.truncate(SIMULATED_BYTES - 1)
        assert not disk.misuses
        view = viewed(file, SIMULATED_BYTES - 1, 0)
        file.truncate(1)
        assert "was cut off while it was mapped" in disk.misuses[0]
        assert view[1:] != b"a" * (SIMULATED_BYTES - 2)

    live(machine_of(2), life)


def test_a_removed_file_that_is_open_or_looked_at_is_held() -> None:
    async def life(disk: SimulatedDisk) -> None:
        disk.windows.is_supported = True
        file = disk.open("a", create=True)
        write_all(file, b"a" * SIMULATED_BYTES, 0)
        view = viewed(file, SIMULATED_BYTES, 0)
        assert disk.held_for_nothing() == []
        disk.remove("a")
        assert disk.held_for_nothing() == ["a"]
        file.close()
        assert disk.held_for_nothing() == ["a"]
        del view
        assert disk.held_for_nothing() == []

    live(machine_of(2), life)
