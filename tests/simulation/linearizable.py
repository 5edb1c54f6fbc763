"""Was a history of concurrent operations on one value possible? A checker after Wing and Gong.

An operation has a beginning and an end, in ticks of a clock that never stands still. A history is
*linearizable* if each operation can be given one instant between the two, so that all results are
those of the operations carried out one after the other at these instants. The search takes, at each
point, any operation that began before every other open one ended, and gives up states that it has
seen before (Lowe's refinement). Histories of single keys are checked by themselves. That is enough,
since linearizability is a property of each object.

An operation of unknown outcome may have happened, at any time up to its end, or not at all. The end
is the crash that cut it short: what a recovery has not brought to light will never happen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

#: States looked at before a history is called too long to check.
_MOST_STATES = 200_000


@dataclass(eq=False)
class Operation(Generic[S]):
    """`apply` says what the value is after the operation, of what it was before; None if the result
    that was seen is impossible then."""

    name: str
    began: int
    apply: Callable[[S], S | None]
    ended: float = float("inf")
    is_unknown: bool = False

    def __str__(self) -> str:
        return f"{self.name} [{self.began}, {self.ended}]{'?' if self.is_unknown else ''}"


def final_states(first: S, history: Sequence[Operation[S]]) -> set[S]:
    """Return every value that may be there in the end; none if the history is impossible."""
    operations = sorted(history, key=lambda each: each.began)
    everyone = frozenset(range(len(operations)))
    seen: set[tuple[frozenset[int], S]] = set()
    found: set[S] = set()
    stack: list[tuple[frozenset[int], S]] = [(everyone, first)]
    while stack:
        left, value = stack.pop()
        if (left, value) in seen:
            continue
        seen.add((left, value))
        if len(seen) > _MOST_STATES:
            raise AssertionError(f"a history of {len(operations)} operations takes too long")
        if not left:
            found.add(value)
            continue
        # Nothing that is left can come after the end of something else that is left.
        horizon = min(operations[each].ended for each in left)
        for each in left:
            operation = operations[each]
            after = operation.apply(value) if operation.began <= horizon else None
            if after is not None:
                stack.append((left - {each}, after))
            if operation.is_unknown:
                stack.append((left - {each}, value))
    return found
