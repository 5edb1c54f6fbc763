"""Budgets over all peers: what is reserved is never more than there is, and who waits gets it."""

from __future__ import annotations

from quackmq.serving.budgets import ReceiveBudget, SendBudget
from quackmq.serving.waiting_line import WaitingLine, is_too_slow
from tests.kit.tables import each
from tests.kit.waiting import until
from tests.protocols.kafka.client import on_both_loops


def test_memory_is_reserved_up_to_the_bound_and_can_be_given_back() -> None:
    released: list[int] = []
    budget = ReceiveBudget(100, lambda: released.append(budget.used_bytes))
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.reserve(40)
    had_room = budget.has_room
    budget.release(60)
    assert released == [40]
    assert (had_room, budget.has_room) == (False, True)
    assert budget.reserve(60)


def test_who_sends_hears_when_there_is_no_room_and_when_there_is_again() -> None:
    heard: list[bool] = []
    budget = SendBudget(100, heard.append)
    for change_bytes in (60, 40, 10, -5, -6, -99):
        budget.add(change_bytes)
    assert heard == [False, True]
    assert (budget.unsent_bytes, budget.has_room) == (0, True)


@each(
    ("share", "passed_ms", "is_slow"),
    [
        (0.0, 1_999, False),
        (0.0, 2_000, True),
        (0.19, 2_000, True),
        (0.2, 2_000, False),
        (0.5, 5_001, True),
    ],
)
def test_a_request_may_be_slow_for_a_moment_and_must_be_whole_in_time(
    share: float, passed_ms: float, is_slow: bool
) -> None:
    assert is_too_slow(share, passed_ms, pace_ms=2_000, wait_ms=10_000) is is_slow


class Peer:
    """It takes so much when it is its turn, or waits again."""

    def __init__(self, budget: ReceiveBudget, line: WaitingLine, size: int) -> None:
        self.budget = budget
        self.line = line
        self.size = size
        self.has_memory = False
        self.is_slow = False
        self.reason = ""

    def pump(self) -> None:
        self.has_memory = self.budget.reserve(self.size)
        if not self.has_memory:
            self.line.add(self)

    def is_behind(self, now: float) -> bool:
        return self.has_memory and self.is_slow

    def disconnect(self, reason: str) -> None:
        self.reason = reason
        self.has_memory = False
        self.budget.release(self.size)


def peers(line: WaitingLine, sizes: list[int]) -> list[Peer]:
    budget = ReceiveBudget(100, line.wake_soon)
    made = [Peer(budget, line, size) for size in sizes]
    for peer in made:
        peer.pump()
    return made


@on_both_loops
async def test_memory_goes_to_those_who_wait_in_the_order_of_their_asking() -> None:
    line = WaitingLine(60_000)
    first, second, third, fourth = peers(line, [100, 60, 60, 40])
    assert len(line) == 3
    first.disconnect("")
    await until(lambda: second.has_memory)
    assert (third.has_memory, fourth.has_memory, len(line)) == (False, True, 1)
    line.discard(third)
    assert len(line) == 0


@on_both_loops
async def test_while_somebody_waits_those_who_hold_memory_keep_pace() -> None:
    line = WaitingLine(1)
    holders, others = set[Peer](), set[Peer]()
    line.watch(holders)
    line.watch(others)
    slow, other, waiting = peers(line, [50, 50, 50])
    holders.add(slow)
    others.add(other)
    slow.is_slow = True
    await until(lambda: waiting.has_memory)
    assert "too slowly" in slow.reason
    assert other.reason == ""


async def test_nobody_is_checked_while_nobody_waits() -> None:
    line = WaitingLine(1)
    (slow,) = peers(line, [100])
    line.watch({slow})
    slow.is_slow = True
    line.wake_soon()
    await until(lambda: not line._is_wake_scheduled)
    assert line._timer is None
    assert slow.reason == ""
