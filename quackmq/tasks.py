"""Derive one future from another, without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_result(source: asyncio.Future[T], convert: Callable[[T], R]) -> asyncio.Future[R]:
    """Return a future of `convert(result)`, where `result` is the result of `source`. An error or a
    cancellation of `source` is passed on. Cancelling the returned future does not cancel
    `source`."""
    converted: asyncio.Future[R] = source.get_loop().create_future()
    source.add_done_callback(partial(_pass_on, converted, convert))
    return converted


def _pass_on(
    converted: asyncio.Future[R], convert: Callable[[T], R], source: asyncio.Future[T]
) -> None:
    """Give `converted` the outcome of `source`, which has ended."""
    if converted.cancelled():
        if not source.cancelled():
            source.exception()  # mark it as retrieved: no caller is left
    elif source.cancelled():
        converted.cancel()
    elif (error := source.exception()) is not None:
        converted.set_exception(error)
    else:
        converted.set_result(convert(source.result()))
