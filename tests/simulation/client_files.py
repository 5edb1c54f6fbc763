"""The files of client programs, in memory: what a killed program and a power cut leave of them.

A file has the bytes that programs see and those that were synced, and so has the directory its
names. The clients' own code runs on the parts of `os`, `fcntl` and `pathlib` below. A program may
be killed before each operation, and a write may fail because the disk is full.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from quackmq.client import queue
from quackmq.client.files import durable, own_directory
from tests.simulation.blocking import Program, running_program

_KILLED: Final = 0.01
_DISK_FULL: Final = 0.02


@dataclass(eq=False)
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass
class _Descriptor:
    program: Program
    path: str
    file: _File | None


@dataclass
class ClientFiles:
    source: random.Random
    names: dict[str, _File] = field(default_factory=dict)
    synced_names: dict[str, _File] = field(default_factory=dict)
    #: Whether programs may die and writes may fail at present.
    fails: bool = True
    _open: dict[int, _Descriptor] = field(default_factory=dict)
    _locked: dict[str, Program] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(100))

    # --- what happens to a program ------------------------------------------------------------

    def on_death(self, program: Program) -> None:
        """Release the locks of a dead program; sometimes its machine has lost its power."""
        self._open = {fd: each for fd, each in self._open.items() if each.program is not program}
        self._locked = {path: each for path, each in self._locked.items() if each is not program}
        if self.source.random() < 0.5:
            self._cut_power(f"/{program.name}/")

    def _cut_power(self, directory: str) -> None:
        """Keep any part of what was not synced in a directory."""
        for path in {*self.names, *self.synced_names}:
            if not path.startswith(directory):
                continue
            file = self.source.choice((self.names, self.synced_names)).get(path)
            self.names.pop(path, None)
            self.synced_names.pop(path, None)
            if file is not None:
                if file.content != file.synced:
                    kept = file.content[: self.source.randint(0, len(file.content))]
                    file.content = file.synced = self.source.choice((file.synced, kept))
                self.names[path] = self.synced_names[path] = file

    def _begin(self) -> Program:
        """Begin an operation of the running program, which may die now."""
        program = running_program()
        program.die_perhaps(_KILLED if self.fails else 0.0)
        return program

    # --- operations ---------------------------------------------------------------------------

    def open(self, path: object, flags: int, mode: int = 0) -> int:
        program, name = self._begin(), str(path)
        file = None
        if not flags & os.O_DIRECTORY:
            file = self.names.setdefault(name, _File())
            if flags & os.O_TRUNC:
                file.content = b""
        fd = next(self._numbers)
        self._open[fd] = _Descriptor(program, name, file)
        return fd

    def close(self, fd: int) -> None:
        closed = self._open.pop(fd, None)
        if closed is not None:
            self._locked.pop(closed.path, None)

    def write(self, fd: int, data: bytes) -> int:
        self._begin()
        file = self._open[fd].file
        assert file is not None
        if self.fails and self.source.random() < _DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = self.source.randint(1, len(data))
        file.content += data[:size]
        return size

    def sync_data(self, fd: int) -> None:
        self._begin()
        file = self._open[fd].file
        assert file is not None
        file.synced = file.content

    def sync_names(self, fd: int) -> None:
        self._begin()
        directory = self._open[fd].path
        for path in {*self.names, *self.synced_names}:
            if os.path.dirname(path) == directory:
                self.synced_names.pop(path, None)
                if path in self.names:
                    self.synced_names[path] = self.names[path]

    def flock(self, fd: int, _: int) -> None:
        program, path = self._begin(), self._open[fd].path
        if self._locked.setdefault(path, program) is not program:
            raise BlockingIOError

    def rename(self, old: str, new: str) -> None:
        self._begin()
        self.names[new] = self.names.pop(old)

    def read(self, path: str) -> bytes:
        self._begin()
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path].content

    def remove(self, path: str) -> None:
        self._begin()
        self.names.pop(path, None)


def _path_class(files: ClientFiles) -> type[PurePosixPath]:
    """Return a class of paths to these files."""

    class SimulatedPath(PurePosixPath):
        def mkdir(self, **_: Any) -> None:
            return

        def replace(self, target: PurePosixPath) -> None:
            files.rename(str(self), str(target))

        def read_bytes(self) -> bytes:
            return files.read(str(self))

        def unlink(self, **_: Any) -> None:
            files.remove(str(self))

        def iterdir(self) -> list[SimulatedPath]:
            return [type(self)(path) for path in sorted(files.names) if self == _parent(path)]

    def _parent(path: str) -> PurePosixPath:
        return SimulatedPath(path).parent

    return SimulatedPath


@contextmanager
def client_files(files: ClientFiles) -> Iterator[None]:
    """Let the client libraries use these files."""
    calls = SimpleNamespace(
        open=files.open,
        close=files.close,
        write=files.write,
        PathLike=os.PathLike,
        **{name: getattr(os, name) for name in dir(os) if name.startswith("O_")},
    )
    locks = SimpleNamespace(flock=files.flock, LOCK_EX=2, LOCK_NB=4)
    path_class = _path_class(files)
    with (
        mock.patch.multiple(
            durable, os=calls, sync_data=files.sync_data, sync_names=files.sync_names
        ),
        mock.patch.multiple(own_directory, os=calls, fcntl=locks, Path=path_class),
        mock.patch.object(queue, "Path", path_class),
    ):
        yield
