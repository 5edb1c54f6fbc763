"""A file builder in its own process, seen from the broker
(`quackmq.archive.archiving.worker_main`).

The process is started when there is work, and ended after some time without work. If it dies (the
system may have killed it for its memory) or does not respond, the unfinished file is lost, the
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
    BuildProgress,
    BuiltFile,
    LogPiece,
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
    "from quackmq.no_pandas import hide_pandas; hide_pandas(); "
    "from quackmq.archive.archiving.worker_main import main; main({descriptor})"
)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: Channel


class WorkerProcess:
    """A `FileBuilder` that sends each step to a worker process. Call it in the disk's lane
    "archive", except `close`, which is for the event loop."""

    def __init__(self) -> None:
        #: Locked while the process is started or ended, not while it works.
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._request(("begin", key, topic, first_offset))

    def add(
        self, piece: LogPiece, publishers: Mapping[int, str | None]
    ) -> BuildProgress | UnknownProducers:
        """Send a piece of the log to the process. Its batches are sent as raw data after the
        message, so that they are not pickled."""
        request = ("add", piece._replace(data=b""), dict(publishers))
        progress, _ = self._request(request, [piece.data])
        if not isinstance(progress, BuildProgress | UnknownProducers):
            raise StorageError(f"the archive's worker process returned {progress!r:.100}")
        return progress

    def finish(self, version: int) -> BuiltFile:
        """Return the finished file. The response's data are the file and then the quarantined
        batches, one after the other; the entries have their sizes."""
        (file, entries), data = self._request(("finish", version))
        file_data, remaining = data[: file.size], data[file.size :]
        quarantined = []
        for entry in entries:
            quarantined.append(QuarantinedBatch(entry, bytes(remaining[: entry.size])))
            remaining = remaining[entry.size :]
        return BuiltFile(file, file_data, tuple(quarantined))

    def free_memory(self) -> None:
        self._kill()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._kill()

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    # --- the process -------------------------------------------------------------------------

    def _request(self, request: object, data: Sequence[Buffer] = ()) -> tuple[Any, memoryview]:
        """Send a request to the process, which is started if needed; return its result and data."""
        try:
            worker = self._ensure_started()
            worker.channel.send(request, data)
            (outcome, result), content = worker.channel.receive()
        except (OSError, EOFError) as error:
            # After an error the two ends may disagree about the next step: start afresh.
            code = self._kill()
            if self._is_closed:
                raise BrokerClosing("the broker is closing: no more files are archived") from error
            raise WorkerDied(
                "the archive's worker process cannot be started, or has died"
                f"{'' if code is None else f' (exit code {code})'}: {error}"
            ) from error
        if outcome != "done":
            raise StorageError(f"cannot build a file of the archive: {result}")
        return result, content

    def _ensure_started(self) -> _Worker:
        """Return the running process; start it if there is none, and wait until it is ready. Raises
        EOFError if the builder is closed, OSError if the process does not respond in time."""
        with self._lock:
            if self._is_closed:
                raise EOFError("the file builder is closed")
            if self._worker is not None:
                return self._worker
            broker_socket, worker_socket = socket.socketpair()
            with worker_socket:
                try:
                    worker = self._worker = _Worker(
                        _launch(worker_socket.fileno()), Channel(broker_socket)
                    )
                except BaseException:
                    broker_socket.close()
                    raise
        # Wait without the lock, so that `close` can kill a process that does not become ready.
        broker_socket.settimeout(limits.ARCHIVE_WORKER_MS / 1000)
        worker.channel.receive()  # the message "ready": it has loaded its modules
        return worker

    def _kill(self) -> int | None:
        """Kill the process, which has no state that could be lost; return its exit code. Return
        None if there is no process."""
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
