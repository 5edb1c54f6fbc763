"""A file builder in its own process, seen from the broker
(`quackmq.archive.archiving.worker_main`).

The process is started when there is work, and ended after some time without work. If it dies (the
system may have killed it for its memory) or does not answer, the unfinished file is lost, the
waiting caller gets an error, and the next file starts another process.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from quackmq.archive import limits
from quackmq.archive.archiving.builder import WorkerDied
from quackmq.archive.archiving.pieces import (
    BuiltFile,
    Piece,
    Progress,
    QuarantinedBatch,
    UnknownProducers,
)
from quackmq.archive.archiving.worker_main import Channel
from quackmq.errors import BrokerClosing, StorageError
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Buffer

#: Imports the same modules as the broker, wherever it was started.
_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r}; "
    "from quackmq.no_pandas import without_pandas; without_pandas(); "
    "from quackmq.archive.archiving.worker_main import main; main({descriptor})"
)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: Channel


class WorkerProcess:
    """Call in the disk's lane "archive"; `close` from the event loop."""

    def __init__(self) -> None:
        #: Held while the process is started or ended, not while it works.
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._ask(("begin", key, topic, first_offset))

    def add(
        self, piece: Piece, publishers: Mapping[int, str | None]
    ) -> Progress | UnknownProducers:
        request = ("add", piece._replace(data=b""), dict(publishers))
        progress, _ = self._ask(request, [piece.data])
        if not isinstance(progress, Progress | UnknownProducers):
            raise StorageError(f"the archive's worker process answered {progress!r:.100}")
        return progress

    def finish(self, version: int) -> BuiltFile:
        (file, lines), data = self._ask(("finish", version))
        content, rest = data[: file.size], data[file.size :]
        aside = []
        for line in lines:
            aside.append(QuarantinedBatch(line, bytes(rest[: line.size])))
            rest = rest[line.size :]
        return BuiltFile(file, content, tuple(aside))

    def rest(self) -> None:
        self._end()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._end()

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    # --- the process -------------------------------------------------------------------------

    def _ask(self, request: object, data: Sequence[Buffer] = ()) -> tuple[Any, memoryview]:
        try:
            worker = self._started()
            worker.channel.send(request, data)
            (outcome, answer), content = worker.channel.receive()
        except (OSError, EOFError) as error:
            code = self._end()
            if self._is_closed:
                raise BrokerClosing("the broker is closing: no more files are archived") from error
            raise WorkerDied(
                "the archive's worker process cannot be started, or has died"
                f"{'' if code is None else f' (exit code {code})'}: {error}"
            ) from error
        if outcome != "done":
            raise StorageError(f"cannot build a file of the archive: {answer}")
        return answer, content

    def _started(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise EOFError("the file builder is closed")
            if self._worker is not None:
                return self._worker
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    worker = self._worker = _Worker(_launch(theirs.fileno()), Channel(ours))
                except BaseException:
                    ours.close()
                    raise
        ours.settimeout(limits.ARCHIVE_WORKER_MS / 1000)
        worker.channel.receive()  # wait until it has loaded its modules
        return worker

    def _end(self) -> int | None:
        """End the process; return its exit code, or None. It has no state that could be lost."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.process.kill()
        code = worker.process.wait()
        worker.channel.close()
        return code


def _launch(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process in its own process group: an interrupt from the keyboard is for the broker,
    which ends the process. Not in its own session, which Linux would give as much processor time as
    the broker's."""
    program = _PROGRAM.format(path=sys.path, descriptor=descriptor)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,
    )
