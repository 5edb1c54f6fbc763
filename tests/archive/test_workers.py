"""Files made in a process of its own: the same files, and nothing lost if the process is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving import worker_process as workers
from quackmq.archive.archiving.builder import FileBuilder, LocalFileBuilder
from quackmq.archive.archiving.pieces import BuildProgress, BuiltFile, LogPiece, UnknownProducers
from quackmq.archive.archiving.worker_main import Channel
from quackmq.archive.archiving.worker_process import WorkerProcess
from quackmq.errors import BrokerClosing, StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import OffsetTime
from quackmq.records.batch import Record
from tests.archive.pond import pond
from tests.archive.support import KEY, NOON_MS, TOPIC, committed, plain
from tests.kit.batches import sealed

pytestmark = pytest.mark.processes

#: Others go before such a process, and the machine can be busy with them.
DEADLINE_S = 120
TIMES = (OffsetTime(0, NOON_MS),)


@pytest.fixture
def file_builder() -> Iterator[WorkerProcess]:
    made = WorkerProcess()
    yield made
    made.close()


def piece(*batches: bytes) -> LogPiece:
    return LogPiece(b"".join(batches), 0, (), TIMES)


def some(first: int, count: int) -> bytes:
    return bytes(plain(first, count).batch.view)


def make(file_builder: FileBuilder) -> BuiltFile:
    file_builder.begin(KEY, TOPIC, 0)
    poison = sealed(b"\x01no", base_offset=300)
    progress = file_builder.add(piece(some(0, 100), some(100, 200), poison), {})
    assert progress == BuildProgress(301, 301, False)
    return file_builder.finish(1)


def test_a_process_makes_the_same_file_as_a_thread(file_builder: WorkerProcess) -> None:
    here, there = make(LocalFileBuilder()), make(file_builder)
    assert there.file == here.file
    assert bytes(there.data) == bytes(here.data)
    assert there.quarantined == here.quarantined and len(there.quarantined) == 1
    assert bytes(make(file_builder).data) == bytes(here.data), (
        "the next file is not made of the last"
    )


def test_names_are_asked_for(file_builder: WorkerProcess) -> None:
    file_builder.begin(KEY, TOPIC, 0)
    records = [Record(0, NOON_MS, None, b"quack")]
    entry = committed(records, 0, producer_id=5, producer_epoch=0, transactional=True)
    batch = bytes(entry.batch.view)
    assert file_builder.add(piece(batch), {}) == UnknownProducers(frozenset({5}))
    assert file_builder.add(piece(batch), {5: "mill"}) == BuildProgress(1, 1, False)
    assert file_builder.finish(1).file.records == 1


def test_a_process_that_is_killed_is_named_and_the_next_file_has_another(
    file_builder: WorkerProcess,
) -> None:
    file_builder.begin(KEY, TOPIC, 0)
    first = file_builder.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(StorageError, match="exit code -9"):
        file_builder.add(piece(some(0, 10)), {})
    make(file_builder)
    assert file_builder.pid not in (None, first)


def test_a_process_that_does_not_answer_in_time_is_ended(
    file_builder: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(file_builder)
    pid = file_builder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert file_builder._worker is not None
    file_builder._worker.channel._socket.settimeout(0.01)
    with pytest.raises(StorageError, match="exit code -9.*timed out"):
        file_builder.begin(KEY, TOPIC, 0)
    make(file_builder)


def test_a_process_that_cannot_be_started_is_a_failure_that_passes(
    file_builder: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(StorageError, match="cannot be started"):
            file_builder.begin(KEY, TOPIC, 0)
    make(file_builder)


def test_a_process_that_cannot_load_its_modules_is_a_failure_that_passes(
    file_builder: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(workers, "_PROGRAM", "raise SystemExit(3)")
        with pytest.raises(StorageError, match="cannot be started, or has died"):
            file_builder.begin(KEY, TOPIC, 0)
    make(file_builder)


def test_what_goes_wrong_there_is_told_here_and_the_process_serves_on(
    file_builder: WorkerProcess,
) -> None:
    file_builder.begin(KEY, TOPIC, 10)
    pid = file_builder.pid
    with pytest.raises(StorageError, match="InvalidRequest.*cannot end at 10"):
        file_builder.finish(1)
    make(file_builder)
    assert file_builder.pid == pid


def test_at_rest_there_is_no_process(file_builder: WorkerProcess) -> None:
    make(file_builder)
    pid = file_builder.pid
    file_builder.free_memory()
    assert file_builder.pid is None
    assert pid is not None and not _is_there(pid)
    make(file_builder)


def test_closing_ends_whatever_goes_on() -> None:
    file_builder = WorkerProcess()
    make(file_builder)
    pid = file_builder.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it will never answer
    outcome: list[Exception] = []

    def wait() -> None:
        try:
            file_builder.begin(KEY, TOPIC, 0)
        except Exception as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    file_builder.close()
    waiting.join(DEADLINE_S)
    assert [type(error) for error in outcome] == [BrokerClosing]
    assert not _is_there(pid)
    with pytest.raises(BrokerClosing):
        file_builder.begin(KEY, TOPIC, 0)


def test_a_process_ends_with_the_broker_that_started_it() -> None:
    """However that ends: the system closes its end of the connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = workers._launch(theirs.fileno())
    try:
        channel = Channel(ours)
        ours.settimeout(DEADLINE_S)
        assert channel.receive()[0] == "ready"
        assert (
            os.getpriority(os.PRIO_PROCESS, process.pid) >= archive_limits.ARCHIVE_WORKER_NICENESS
        )
        assert os.getpgid(process.pid) != os.getpgid(0), "an interrupt would reach it"
        assert os.getsid(process.pid) == os.getsid(0), "it would be served as well as the broker"
        channel.close()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


async def test_an_archiver_whose_process_is_killed_again_and_again_loses_nothing(
    tmp_path: Path,
) -> None:
    file_builder = WorkerProcess()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = {}
        for number in range(3):
            put[await home.put(key, b"%d" % number)] = b"%d" % number
            archiving = asyncio.create_task(home.archiver.archive_due())
            if (pid := file_builder.pid) is not None:
                os.kill(pid, signal.SIGKILL)
            await archiving
            home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
            await home.archiver.archive_due()
            assert home.manifest(key).next_offset == number + 1
        assert await home.values(key) == put
        assert home.archiver.state().failing == 0


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
