"""A plugin of pytest for `make check`: tests that do not wait for the disk.

What a sync promises shows only after a power cut. No test cuts the power of a real disk; the
simulation (`tests/simulation/`) does so with its own. So `make check` makes real syncs in a few
tests only. In the others a sync makes nothing durable and returns at once, or says on the loop that
it has ended. It still fails if the file is closed. `make test` does without this plugin.

It is not in `tests/kit`, because pytest imports its plugins before `tests/conftest.py` asks for the
asserts of that package to be rewritten.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from quackmq.disk.linux_aio import KernelSync, Synced

#: Tests of the disk itself.
_REAL_TESTS = "tests/disk/"
#: The kind of store that the contract suite tries with real syncs (tests/stores/conftest.py).
_REAL_STORE = "local"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not may_go_unsynced(item):
        return (yield)
    with unsynced():
        return (yield)


def may_go_unsynced(item: pytest.Item) -> bool:
    """Whether this test is not among those that make real syncs."""
    case = getattr(item, "callspec", None)
    store = case.params.get("store") if case is not None else None
    return not item.nodeid.startswith(_REAL_TESTS) and store != _REAL_STORE


@contextmanager
def unsynced() -> Iterator[None]:
    """Within this block, nothing that this process writes is synced."""
    with (
        mock.patch.object(os, "fsync", _check),
        mock.patch.object(os, "fdatasync", _check, create=True),
        mock.patch.object(KernelSync, "open", InstantSync),
    ):
        yield


def _check(file: int) -> None:
    """Raise what a sync would raise if there is no such file."""
    os.fstat(file)


class InstantSync:
    """In place of `KernelSync`: a sync ends in the loop's next turn."""

    def __init__(self) -> None:
        self._on_its_way: asyncio.Handle | None = None

    def begin(self, descriptor: int, done: Synced) -> bool:
        assert self._on_its_way is None, "a sync was begun while another one was on its way"
        self._on_its_way = asyncio.get_running_loop().call_soon(self._ended, done)
        return True

    def _ended(self, done: Synced) -> None:
        self._on_its_way = None
        done(None)

    def close(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.cancel()
