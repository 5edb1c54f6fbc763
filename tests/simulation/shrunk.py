"""Limits shrunk by the seed, so that a run of seconds reaches what a broker reaches in years.

`LIMITS` has a row for each: its name in `quackmq.limits`, and small values for it. A seed shrinks
some of them. That a limit was reached is seen where it is compared: the shrunk number counts every
comparison with something that lies beyond it. A limit that no seed reaches fails the test of the
simulation, so that a new client or a new limit cannot silently miss it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest import mock

from tests.kit.limits import home_of
from tests.simulation.platter import Counts

_SHRUNK = 0.3
#: How the counts of limits begin.
REACHED = "limit reached: "

Table = Mapping[str, tuple[int, ...]]


@contextmanager
def shrunk(seed: int, table: Table, counts: Counts) -> Iterator[None]:
    """Shrink some limits of a table while a seed runs."""
    source = random.Random(f"{seed}/limits")
    with ExitStack() as stack:
        for name, values in table.items():
            if source.random() < _SHRUNK:
                value = _Shrunk(source.choice(values))
                value.name, value.counts = REACHED + name, counts
                stack.enter_context(mock.patch.object(home_of(name), name, value))
        yield


def missing(table: Table, counts: Counts) -> list[str]:
    """Return the limits of a table that nothing has reached."""
    return [name for name in table if not counts[REACHED + name]]


class _Shrunk(int):
    """A number that notices what lies beyond it. `value > limit` asks the limit whether it is less,
    since its class overrides that."""

    name: str
    counts: Counts

    def __lt__(self, other: float) -> bool:
        return self._note(int(self) < other)

    def __le__(self, other: float) -> bool:
        return self._note(int(self) <= other)

    def __gt__(self, other: float) -> bool:
        return not self._note(int(self) <= other)

    def __ge__(self, other: float) -> bool:
        return not self._note(int(self) < other)

    def __rsub__(self, other: int) -> int:
        """As in `len(held) - limit`, for how many are too many."""
        self._note(other > int(self))
        return other - int(self)

    def _note(self, is_beyond: bool) -> bool:
        if is_beyond:
            self.counts[self.name] += 1
        return is_beyond
