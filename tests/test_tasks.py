"""A future that is made from another one, and its outcomes."""

from __future__ import annotations

import asyncio
import gc

import pytest

from quackmq.tasks import map_result
from tests.kit.support import let_others_run


class Ended(Exception):
    """The error of a future."""


def new_future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def test_the_result_is_converted() -> None:
    source = new_future()
    converted = map_result(source, str)
    source.set_result(7)
    assert await converted == "7"


async def test_an_error_and_a_cancellation_are_passed_on() -> None:
    failing = new_future()
    converted = map_result(failing, str)
    failing.set_exception(Ended())
    with pytest.raises(Ended):
        await converted
    cancelled = new_future()
    converted = map_result(cancelled, str)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await converted


async def test_cancelling_the_converted_future_leaves_the_source_alone() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    source = new_future()
    map_result(source, str).cancel()
    assert not source.cancelled()
    source.set_exception(Ended())
    await let_others_run()
    del source
    gc.collect()
    assert reported == [], "nobody waits for the error"
