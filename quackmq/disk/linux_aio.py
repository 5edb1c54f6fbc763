"""Sync a file without a thread of ours: a worker of the Linux kernel does it (io_submit).

The cost of a single small append is mostly its sync. Handing the sync to a thread wakes a processor
for the thread and then one for the loop, and passes the interpreter's lock back and forth. The
kernel's worker runs where the loop runs, and reports its end on a descriptor that the loop watches.

    iocb      data u64 | key u32 | rw flags u32 | opcode u16 | priority i16 | descriptor u32
              | buffer u64 | bytes u64 | offset i64 | reserved u64 | flags u32 | event u32
    io_event  data u64 | iocb u64 | result i64 | result2 i64

`result` is 0 or a negative error number, the same as that of fdatasync. Where the call does not
exist (another system or processor, a sandbox that forbids it), `open` returns None.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from quackmq.errors import InternalError

_IOCB: Final = struct.Struct("<QIIHhIQQqQII")
_IO_EVENT: Final = struct.Struct("<QQqq")
#: The opcode and the flag of Linux (IOCB_CMD_FDSYNC, IOCB_FLAG_RESFD).
_FDATASYNC: Final = 3
_NOTIFY_BY_EVENTFD: Final = 1

#: Called on the loop with the error of a sync, or None.
Synced = Callable[[OSError | None], None]


class _SystemCallNumbers(NamedTuple):
    """The system calls' numbers; the C library has no functions for them."""

    setup: int
    destroy: int
    submit: int
    events: int


_NUMBERS: Final = {
    "x86_64": _SystemCallNumbers(setup=206, destroy=207, submit=209, events=208),
    "aarch64": _SystemCallNumbers(setup=0, destroy=1, submit=2, events=4),
}


class KernelSync:
    """Runs one sync at a time. Not thread-safe: call from the event loop."""

    def __init__(self, numbers: _SystemCallNumbers, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError if the system does not have these calls, or forbids them."""
        self._numbers = numbers
        self._loop = loop
        # None of these calls blocks, so none releases the interpreter's lock.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        # The context has room for one request.
        self._system_call(
            ctypes.c_long(numbers.setup), ctypes.c_long(1), ctypes.byref(self._context)
        )
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.add_reader(self._event, self._on_event)
        self._on_synced: Synced | None = None
        self._request_buffer = ctypes.create_string_buffer(_IOCB.size)
        self._event_buffer = ctypes.create_string_buffer(_IO_EVENT.size)
        # The arguments are built once: building them costs more than the calls.
        one = ctypes.c_long(1)
        requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request_buffer))
        no_wait = (ctypes.c_long * 2)(0, 0)
        self._submit_arguments = (ctypes.c_long(numbers.submit), self._context, one, requests)
        self._get_events_arguments = (
            *(ctypes.c_long(numbers.events), self._context, one, one),
            *(self._event_buffer, no_wait),
        )

    @classmethod
    def open(cls) -> KernelSync | None:
        """Return a KernelSync for the running loop; None if the system does not have the calls, or
        forbids them."""
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None or not hasattr(os, "eventfd"):
            return None
        try:
            return cls(numbers, asyncio.get_running_loop())
        except OSError:
            return None

    def begin(self, descriptor: int, on_synced: Synced) -> bool:
        """Start a sync, one at a time. Return whether the system accepted it. Call `on_synced` when
        it ends."""
        if self._on_synced is not None:
            raise InternalError("a sync was started while another one was running")
        _IOCB.pack_into(
            self._request_buffer,
            0,
            *(0, 0, 0, _FDATASYNC, 0, descriptor, 0, 0, 0, 0),
            _NOTIFY_BY_EVENTFD,
            self._event,
        )
        try:
            self._system_call(*self._submit_arguments)
        except OSError:
            return False
        self._on_synced = on_synced
        return True

    def _on_event(self) -> None:
        """Call the callback of the sync that has ended with its error, or with None."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return  # nothing has ended
        on_synced, self._on_synced = self._on_synced, None
        if on_synced is None:
            raise InternalError("a sync ended that was never started")
        on_synced(self._read_result())

    def _read_result(self) -> OSError | None:
        """Return the error of the sync that ended, or None. An unknown result counts as failed."""
        try:
            count = self._system_call(*self._get_events_arguments)
        except OSError as error:
            return error
        if count != 1:
            return OSError(errno.EIO, "the system did not report the result of a sync")
        _, _, result, _ = _IO_EVENT.unpack(self._event_buffer)
        return OSError(-result, os.strerror(-result)) if result else None

    def close(self) -> None:
        """Wait for a running sync, then close."""
        self._loop.remove_reader(self._event)
        self._system_call(ctypes.c_long(self._numbers.destroy), self._context)
        os.close(self._event)

    def _system_call(self, *arguments: object) -> int:
        """Make a system call and return its result. Raises OSError if that is negative."""
        result: int = self._syscall(*arguments)
        if result < 0:
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number))
        return result
