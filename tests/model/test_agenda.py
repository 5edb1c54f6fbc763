"""An agenda gives each thing once, at the time that was said last."""

from __future__ import annotations

import math
import random

from quackmq.model.agenda import Agenda
from quackmq.model.limits import AGENDA_SPARE as SPARE


def test_each_is_given_once_at_the_time_that_was_said_last() -> None:
    agenda: Agenda[str] = Agenda()
    for key in "abcd":
        agenda.put(key, 10)
    agenda.put("a", 20)
    agenda.put("b", 5)
    agenda.drop("c")
    assert agenda.pop_due(4) == []
    assert agenda.pop_due(5) == ["b"]
    assert agenda.pop_due(15) == ["d"]
    assert agenda.pop_due(100) == ["a"]
    assert agenda.pop_due(math.inf) == []
    agenda.put("b", 5)
    assert agenda.pop_due(5) == ["b"], "one that was taken can be put again"


def test_times_that_do_not_count_any_more_take_little_memory() -> None:
    agenda: Agenda[str] = Agenda()
    agenda.put("other", 0)
    for time_ms in range(3 * SPARE):
        agenda.put("moved", 1_000_000 - time_ms)
    assert len(agenda._heap) <= 2 * 2 + SPARE
    assert agenda.pop_due(2_000_000) == ["other", "moved"]


def test_those_of_one_time_come_in_the_order_in_which_they_were_put() -> None:
    agenda: Agenda[int] = Agenda()
    order = list(range(3 * SPARE))
    random.Random(1).shuffle(order)
    for key in order:
        agenda.put(key, 99)
    for key in order:
        agenda.put(key, 7)
    assert agenda.pop_due(7) == order
