"""Disks that fill up: a bound on the size of files, and a small file system in memory.

The first works everywhere. The second is a tmpfs in a mount namespace of its own, held by a process
that ends with us, so that nothing is ever left mounted. Whoever is not root needs a user namespace
for that too; where the system allows neither, it cannot be had (`needs("tmpfs")`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from quackmq import limits
from tests.real.broker import QUACKMQ

SMALL_BYTES: Final = 3 * limits.MIB
LARGE_BYTES: Final = 64 * limits.MIB


class FullDisk(Protocol):
    """`command` runs a broker that meets this disk as it was left: with little room at first."""

    directory: Path
    #: What the system says when there is no room.
    complaint: str

    @property
    def command(self) -> list[str]: ...

    def leave_no_room(self) -> None:
        """Not for one byte more. For a disk that was filled up already."""

    def make_room(self) -> None: ...


#: Python ignores the signal that goes with the bound, so a write gets EFBIG.
_WITH_A_BOUND: Final = """
import os, resource, sys
bound = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound))
os.execv(sys.argv[2], sys.argv[2:])
"""


class BoundedFiles(AbstractContextManager["BoundedFiles"]):
    """No file may grow beyond a size."""

    complaint = "File too large"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._bound_bytes = SMALL_BYTES

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", _WITH_A_BOUND, str(self._bound_bytes), *QUACKMQ]

    def leave_no_room(self) -> None:
        self._bound_bytes = 0

    def make_room(self) -> None:
        self._bound_bytes = LARGE_BYTES


_IS_ROOT: Final = os.geteuid() == 0
_HOLD_A_MOUNT: Final = 'mount -t tmpfs -o size="$1" tmpfs "$0" && echo mounted && exec cat'


class SmallFileSystem(AbstractContextManager["SmallFileSystem"]):
    """A tmpfs of its own."""

    complaint = "No space left on device"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._holder = subprocess.Popen(
            ["unshare", "--mount", *([] if _IS_ROOT else ["--user", "--map-root-user"])]
            + ["sh", "-c", _HOLD_A_MOUNT, str(directory), str(SMALL_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self.mounted = self._holder.stdout.readline() == "mounted\n"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The mount goes with the last process that sees it."""
        self._holder.kill()
        self._holder.communicate()

    @property
    def command(self) -> list[str]:
        assert self.mounted, "a tmpfs cannot be mounted here, not even in a namespace"
        return [*self._inside, *QUACKMQ]

    def leave_no_room(self) -> None:
        used = ["sh", "-c", 'cat /dev/zero >"$0"/filler; true', str(self.directory)]
        subprocess.run([*self._inside, *used], check=True, stderr=subprocess.DEVNULL)

    def make_room(self) -> None:
        remount = ["mount", "-o", f"remount,size={LARGE_BYTES}", str(self.directory)]
        subprocess.run([*self._inside, *remount], check=True)

    @property
    def _inside(self) -> list[str]:
        user = [] if _IS_ROOT else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holder.pid), "--mount", *user, "--wd", "--"]
