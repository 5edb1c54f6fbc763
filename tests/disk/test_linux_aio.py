"""A sync by the system's own workers: it comes to its end on the loop, or is not begun at all."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from quackmq.disk import linux_aio as kernel_sync
from quackmq.disk.linux_aio import KernelSync
from quackmq.disk.real import RealDisk
from quackmq.errors import InternalError

DEADLINE_S = 20.0


@pytest_asyncio.fixture
async def kernel() -> KernelSync:
    opened = KernelSync.open()
    assert opened is not None, "this system cannot do it: Linux on x86_64 or aarch64 can"
    return opened


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


async def ended(kernel: KernelSync, descriptor: int) -> OSError | None:
    future: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert kernel.begin(descriptor, future.set_result)
    async with asyncio.timeout(DEADLINE_S):
        return await future


async def test_one_sync_after_the_other_comes_to_its_end(
    kernel: KernelSync, descriptor: int
) -> None:
    for number in range(20):
        os.pwrite(descriptor, b"quack", number)
        assert await ended(kernel, descriptor) is None
    kernel.close()


async def test_what_cannot_be_synced_is_not_begun(kernel: KernelSync, descriptor: int) -> None:
    reading, writing = os.pipe()
    assert not kernel.begin(writing, mock.Mock())
    os.close(reading)
    os.close(writing)
    assert not kernel.begin(writing, mock.Mock())
    assert await ended(kernel, descriptor) is None
    kernel.close()


async def test_an_error_number_is_told_as_the_error_that_it_is(
    kernel: KernelSync, descriptor: int
) -> None:
    failed = mock.Mock(wraps=kernel_sync._IO_EVENT)
    failed.unpack.return_value = (0, 0, -5, 0)
    with mock.patch.object(kernel_sync, "_IO_EVENT", failed):
        error = await ended(kernel, descriptor)
    assert isinstance(error, OSError) and error.errno == 5
    assert await ended(kernel, descriptor) is None
    kernel.close()


@pytest.mark.parametrize("answer", [0, OSError(errno.EINVAL, "no")], ids=["nothing", "error"])
async def test_a_sync_of_which_the_system_tells_nothing_has_failed(
    kernel: KernelSync, descriptor: int, answer: object
) -> None:
    future: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert kernel.begin(descriptor, future.set_result)
    with mock.patch.object(kernel, "_system_call", side_effect=[answer]):
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await future, OSError)
    kernel.close()


async def test_a_wake_up_for_nothing_ends_no_sync(kernel: KernelSync, descriptor: int) -> None:
    kernel._on_event()
    assert await ended(kernel, descriptor) is None
    kernel.close()


async def test_a_second_sync_is_not_begun_before_the_first_has_ended(
    kernel: KernelSync, descriptor: int
) -> None:
    future: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    assert kernel.begin(descriptor, future.set_result)
    with pytest.raises(InternalError):
        kernel.begin(descriptor, mock.Mock())
    async with asyncio.timeout(DEADLINE_S):
        assert await future is None
    kernel.close()


async def test_closing_waits_for_a_sync_that_is_on_its_way(
    kernel: KernelSync, descriptor: int
) -> None:
    os.pwrite(descriptor, bytes(1_000_000), 0)
    told = mock.Mock()
    assert kernel.begin(descriptor, told)
    kernel.close()
    await asyncio.sleep(0)
    told.assert_not_called()


@pytest.mark.parametrize("known", ["elsewhere", "forbidden", "refused"])
async def test_where_the_system_does_not_do_it_a_thread_does(tmp_path: Path, known: str) -> None:
    disk = RealDisk(tmp_path)
    file = disk.open("file", create=True)
    file.write_some(b"quack", 0)
    patches: dict[str, AbstractContextManager[Any]] = {
        "elsewhere": mock.patch.object(sys, "platform", "plan9"),
        "forbidden": mock.patch.object(KernelSync, "_system_call", side_effect=PermissionError),
        "refused": mock.patch.object(KernelSync, "begin", return_value=False),
    }
    future: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    with patches[known]:
        disk.sync_soon(file, future.set_result, allow_blocking=False)
    async with asyncio.timeout(DEADLINE_S):
        assert await future is None
    file.close()
    disk.close()
