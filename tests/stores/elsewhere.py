"""Run a module as on a system without the calls that only Linux has, such as macOS.

    python tests/stores/elsewhere.py quackmq serve …

The calls are hidden before anything of QuackMQ is loaded. `F_FULLFSYNC` is there in their place.
The module ends with an error if that was never used: then something else has made bytes durable.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import runpy
import sys

#: What macOS does not have; the first three were used unguarded.
LINUX_ONLY = (
    *("fdatasync", "RWF_NOWAIT", "eventfd", "eventfd_read", "eventfd_write", "EFD_CLOEXEC"),
    *("EFD_NONBLOCK", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "O_DIRECT"),
    *("pidfd_open", "memfd_create", "splice", "copy_file_range", "getrandom", "O_TMPFILE"),
)
#: Its number on macOS, and 0 for success.
_FULL_SYNC, _DONE = 51, 0


def hide() -> None:
    for name in LINUX_ONLY:
        if hasattr(os, name):
            delattr(os, name)
    sys.platform = "darwin"
    real = fcntl.fcntl
    syncs = 0

    def fake(descriptor: int, command: int, *arguments: object) -> object:
        nonlocal syncs
        if command == _FULL_SYNC:
            os.fsync(descriptor)
            syncs += 1
            return _DONE
        return real(descriptor, command, *arguments)  # type: ignore[call-overload]

    def check() -> None:
        if not syncs:
            sys.stderr.write("nothing was synced with F_FULLFSYNC\n")
            sys.stderr.flush()
            os._exit(3)

    fcntl.F_FULLFSYNC = _FULL_SYNC  # type: ignore[attr-defined]
    fcntl.fcntl = fake  # type: ignore[assignment]
    atexit.register(check)


if __name__ == "__main__":
    # These decide by the system's name what to load, which is right only on the real one.
    import asyncio  # noqa: F401
    import ctypes  # noqa: F401
    import multiprocessing  # noqa: F401
    import subprocess  # noqa: F401
    import sysconfig

    import uvloop  # noqa: F401

    sysconfig.get_config_vars()
    hide()
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.getcwd()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
