"""Memory that comes back when nobody looks at it any more, and not before."""

from __future__ import annotations

import threading

import pytest

from quackmq import limits
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.codec.buffer_pool import BufferPool

SIZE = 200_000


def filled(view: memoryview, byte: bytes) -> memoryview:
    view[:] = byte * len(view)
    return view


def test_memory_is_at_least_as_large_as_asked_for_and_hardly_larger() -> None:
    for size in (1, SIZE, kafka_limits.KAFKA_LENT_BYTES, kafka_limits.KAFKA_LENT_BYTES + 1):
        assert size <= len(BufferPool().acquire(size)) <= size + 16 * limits.KIB


def test_memory_that_somebody_still_sees_is_not_lent_again() -> None:
    lending = BufferPool()
    seen = filled(lending.acquire(SIZE), b"a")[1000:2000].toreadonly()
    for byte in (b"b", b"c"):
        filled(lending.acquire(SIZE), byte)
    assert seen == b"a" * 1000


def test_memory_that_nobody_sees_is_lent_again() -> None:
    lending = BufferPool()
    filled(lending.acquire(SIZE), b"a")
    assert lending.acquire(SIZE - 1)[:1000] == b"a" * 1000


def test_the_last_view_may_go_in_another_thread() -> None:
    lending = BufferPool()
    views = [filled(lending.acquire(SIZE), b"a")]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert lending.acquire(SIZE)[:1000] == b"a" * 1000


def test_memory_of_another_size_is_not_in_the_way() -> None:
    lending = BufferPool()
    filled(lending.acquire(SIZE), b"a")
    filled(lending.acquire(5 * SIZE), b"b")
    assert lending.acquire(SIZE)[:1000] == b"a" * 1000
    assert lending.acquire(5 * SIZE)[:1000] == b"b" * 1000


@pytest.mark.parametrize("size", [SIZE, kafka_limits.KAFKA_LENT_BYTES + 1])
def test_a_bounded_number_of_them_waits_for_the_next(size: int) -> None:
    lending = BufferPool()
    views = [filled(lending.acquire(size), b"a") for _ in range(kafka_limits.KAFKA_IDLE_LENT + 5)]
    views.clear()
    again = [lending.acquire(size) for _ in range(kafka_limits.KAFKA_IDLE_LENT + 5)]
    used = sum(view[0] == ord("a") for view in again)
    assert used == (kafka_limits.KAFKA_IDLE_LENT if size == SIZE else 0)
