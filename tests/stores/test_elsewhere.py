"""Where calls are missing that only Linux has, the broker uses those that there are."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quackmq
from quackmq.cli import limits as cli_limits
from quackmq.cli.broker import process
from quackmq.disk.real import RealDisk
from quackmq.disk.syncing import sync_data, sync_names
from quackmq.model.topic import PartitionKey
from quackmq.stores.local import LocalStore
from tests.kit.server import Server
from tests.stores.calls import read_all

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = [sys.executable, str(Path(__file__).with_name("elsewhere.py"))]
#: The parts of the contract that write, read in every way and restart.
CONTRACT = [
    str(Path(__file__).with_name(f"test_contract_{part}.py"))
    for part in ("append", "read", "restart")
]
FULL_SYNC = 51


class System:
    """Records the calls that sync; `answer` is what the strongest of them raises, if anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.answer: OSError | None = None
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", self._fcntl)
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, lambda _, name=name: self.calls.append(name))

    def _fcntl(self, descriptor: int, command: int) -> None:
        assert command == FULL_SYNC
        self.calls.append("F_FULLFSYNC")
        if self.answer is not None:
            raise self.answer


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


# --- syncing ---------------------------------------------------------------------------------


def test_the_call_that_empties_the_devices_cache_is_used_where_there_is_one(
    system: System,
) -> None:
    sync_data(0)
    sync_names(0)
    assert system.calls == ["F_FULLFSYNC", "F_FULLFSYNC"]


def test_a_file_system_that_does_not_know_that_call_gets_a_weaker_one(system: System) -> None:
    system.answer = OSError(errno.ENOTSUP, "not supported")
    sync_data(0)
    sync_names(0)
    assert system.calls == ["F_FULLFSYNC", "fdatasync", "F_FULLFSYNC", "fsync"]


def test_an_error_of_the_device_is_not_hidden_by_a_weaker_call(system: System) -> None:
    system.answer = OSError(errno.EIO, "the device is broken")
    for sync in (sync_data, sync_names):
        with pytest.raises(OSError, match="the device is broken"):
            sync(0)
    assert system.calls == ["F_FULLFSYNC", "F_FULLFSYNC"]


def test_without_fdatasync_and_full_syncs_fsync_is_used(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fcntl, "F_FULLFSYNC")
    sync_data(0)
    monkeypatch.delattr(os, "fdatasync")
    sync_data(0)
    assert system.calls == ["fdatasync", "fsync"]


# --- what else is different ------------------------------------------------------------------


def test_a_directory_is_removed_where_the_system_forbids_to_unlink_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS does. A file that may not be removed is no directory, and stays an error."""

    def forbid(path: str) -> None:
        raise PermissionError(errno.EPERM, "not permitted", path)

    monkeypatch.setattr(os, "unlink", forbid)
    disk = RealDisk(tmp_path)
    disk.make_directory("empty")
    disk.remove("empty")
    assert not (tmp_path / "empty").exists()
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        disk.remove("file")


@pytest.mark.parametrize("granted", [cli_limits.OPEN_FILES, 0])
def test_where_no_limit_of_files_is_named_a_number_that_is_granted_is_asked_for(
    granted: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = (256, resource.RLIM_INFINITY)

    def set_limit(kind: int, wanted: tuple[int, int]) -> None:
        nonlocal now
        if not 0 <= wanted[0] <= granted:
            raise ValueError("current limit exceeds maximum limit")
        now = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda kind: now)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    with caplog.at_level(logging.WARNING):
        process._allow_open_files()
    assert now[0] == (granted or 256)
    assert ("at most 256 files" in caplog.text) is (not granted)


# --- everything ------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_store_writes_reads_and_recovers_without_the_calls_of_linux() -> None:
    inner = ["pytest", "-q", "-x", "-pno:cacheprovider", "-k", "small and not reopened"]
    done = subprocess.run(
        [*ELSEWHERE, *inner, *CONTRACT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-1_000:]
    assert " passed" in done.stdout


@pytest.mark.processes
def test_the_broker_starts_and_keeps_messages_without_the_calls_of_linux(tmp_path: Path) -> None:
    listeners = ("kafka", "http", "zmq", "line")
    listening = [each for listener in listeners for each in (f"--{listener}", "127.0.0.1:0")]
    for number in range(2):
        with Server(
            *("serve", "--data", tmp_path / "data", *listening),
            command=[*ELSEWHERE, "quackmq"],
            environment={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as server:
            opened = server.listeners()
            assert {*listeners} <= {*opened}
            with quackmq.Client(opened["kafka"]) as client:
                client.put("news", b"message %d" % number)
            server.send(signal.SIGTERM)
            assert server.exit_code() == 0, server.errors()
    assert asyncio.run(values_in(tmp_path / "data")) == [b"message 0", b"message 1"]


async def values_in(directory: Path) -> list[bytes]:
    """What a store finds there, with the calls of the system that this is."""
    store = await LocalStore.open(directory)
    topic = (await store.topics())["news"]
    records = await read_all(store, PartitionKey(topic.id, 0))
    await store.close()
    return [value for _, value in records]
