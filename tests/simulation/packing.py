"""Packs so small that they are closed, joined, moved, written again and removed within one seed.

Half of the seeds shrink all limits of packs at once, since few of them matter alone. What the store
then does with packs is counted, and a seed that crashes does so in the middle of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from quackmq.stores.local.files.packs import Packs, Run
from tests.kit.limits import home_of
from tests.simulation.platter import Counts

_SMALL: Final = {
    "PACK_BYTES": (400, 1_500, 6_000),
    "PACK_JOINS": (0, 1, 100),
    "PACK_WRITE_BYTES": (100, 800, 10_000),
    "PATH_EXTENTS": (0, 1, 3),
    "MOVED_BYTES": (300, 1_500, 100_000),
    "MOVED_PATHS": (1, 3),
    "PACK_WASTE_BYTES": (1, 300),
    "REWRITTEN_BYTES": (100, 1_000),
}
#: Each must have happened in a run of the simulation.
MUST_HAPPEN: Final = (
    "packs closed",
    "extents joined",
    "paths moved to files of their own",
    "packs written again",
    "packs removed",
    "packs that a crash left",
)


@contextmanager
def small_packs(seed: int, counts: Counts) -> Iterator[None]:
    source = random.Random(f"{seed}/packs")
    with ExitStack() as patches:
        if source.random() < 0.5:
            for name, values in _SMALL.items():
                patches.enter_context(mock.patch.object(home_of(name), name, source.choice(values)))
        for name, counted in _COUNTED.items():
            patches.enter_context(mock.patch.object(Packs, name, counted(counts)))
        yield


def _counted_append(counts: Counts) -> Callable[[Packs, list[Run]], None]:
    append = Packs._append

    def counted(packs: Packs, batch: list[Run]) -> None:
        before = packs._active
        append(packs, batch)
        counts["packs closed"] += packs._active > before

    return counted


def _counted_joined(counts: Counts) -> Callable[[Packs, Run], Run]:
    joined = Packs._join_with_extents

    def counted(packs: Packs, run: Run) -> Run:
        result = joined(packs, run)
        counts["extents joined"] += result is not run
        return result

    return counted


def _counted_content(counts: Counts) -> Callable[[Packs, Iterable[Any]], list[bytes] | None]:
    content = Packs._read_extents

    def counted(packs: Packs, some: Iterable[Any]) -> list[bytes] | None:
        result = content(packs, some)
        what = "extents that could not be read when they were to be joined"
        counts[what] += result is None
        return result

    return counted


def _counted_move(counts: Counts) -> Callable[[Packs, Iterable[str]], None]:
    move = Packs.move

    def counted(packs: Packs, paths: Iterable[str]) -> None:
        paths = [path for path in paths if packs.rows(path)]
        move(packs, paths)
        moved = sum(not packs.rows(path) for path in paths)
        counts["paths moved to files of their own"] += moved

    return counted


def _counted_emptiest(counts: Counts) -> Callable[[Packs], set[int]]:
    emptiest = Packs._emptiest

    def counted(packs: Packs) -> set[int]:
        chosen = emptiest(packs)
        counts["packs written again"] += len(chosen)
        return chosen

    return counted


def _counted_remove(counts: Counts) -> Callable[[Packs, list[int]], None]:
    remove = Packs.remove_packs

    def counted(packs: Packs, numbers: list[int]) -> None:
        remove(packs, numbers)
        counts["packs removed"] += len(numbers)

    return counted


def _counted_leftover(counts: Counts) -> Callable[[Packs, str], None]:
    remove = Packs.remove

    def counted(packs: Packs, path: str) -> None:
        counts["packs that a crash left"] += path.startswith("log/packs/")
        remove(packs, path)

    return counted


_COUNTED: Final[dict[str, Callable[[Counts], Any]]] = {
    "_append": _counted_append,
    "_join_with_extents": _counted_joined,
    "_read_extents": _counted_content,
    "move": _counted_move,
    "_emptiest": _counted_emptiest,
    "remove_packs": _counted_remove,
    "remove": _counted_leftover,
}
