"""A workshop in a process of its own, from the broker's side
(`quackmq.archive.archiving.worker_main`).

The process is started when there is something to do, and ends when there was nothing for a while.
If it ends by itself (the system may have killed it for its memory) or does not answer, the file in
the making is lost, whoever waits for it is told, and the next file starts another one.
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

#: The same modules as the broker's, wherever it was started.
_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r}; "
    "from quackmq.no_pandas import without_pandas; without_pandas(); "
    "from quackmq.archive.archiving.worker_main import main; main({descriptor})"
)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: Channel


class WorkerProcess:
    """Who may call: the disk's lane "archive"; `close` is the loop's."""

    def __init__(self) -> None:
        #: Held for as long as it takes to start or to end the process, not while it works.
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
            raise StorageError(f"the process that makes files answered {progress!r:.100}")
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
        """The process that is there now."""
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
                raise BrokerClosing("the broker is closing: no file is made any more") from error
            raise WorkerDied(
                "the process that makes files of the archive cannot be started, or has ended"
                f"{'' if code is None else f' (exit code {code})'}: {error}"
            ) from error
        if outcome != "done":
            raise StorageError(f"no file of the archive could be made: {answer}")
        return answer, content

    def _started(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise EOFError("the workshop is closed")
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
        worker.channel.receive()  # it has loaded its modules
        return worker

    def _end(self) -> int | None:
        """Its exit code, if there was one. A process has nothing that could be lost."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.process.kill()
        code = worker.process.wait()
        worker.channel.close()
        return code


def _launch(descriptor: int) -> subprocess.Popen[bytes]:
    """In a group of its own: an interrupt from the keyboard is for the broker, which ends it. Not
    in a session of its own, which Linux would give as much of the processor as the broker's."""
    program = _PROGRAM.format(path=sys.path, descriptor=descriptor)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        process_group=0,
    )
