"""Remember the failures of work that is retried, so that each is logged once until it changes."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
FailureT = TypeVar("FailureT")


class FailureLog(Generic[KeyT, FailureT]):
    """The last failure of each key, for example of each topic, until the work succeeds."""

    def __init__(self) -> None:
        self._failures: dict[KeyT, FailureT] = {}
        self._kinds: dict[KeyT, object] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._failures

    def record(self, key: KeyT, failure: FailureT, kind: object = None) -> bool:
        """Record a failure in the place of the last one. Return whether the caller must log it: the
        key had no failure, or one of another kind."""
        is_new = key not in self._failures or self._kinds[key] != kind
        self._failures[key], self._kinds[key] = failure, kind
        return is_new

    def resolve(self, key: KeyT) -> None:
        """Forget the failure of a key, if it has one: the work succeeded, or is not needed."""
        self._failures.pop(key, None)
        self._kinds.pop(key, None)

    def keep_only(self, keys: Container[KeyT]) -> None:
        """Forget the failures of all other keys."""
        for key in [key for key in self._failures if key not in keys]:
            self.resolve(key)

    def failures(self) -> Iterable[FailureT]:
        """Return the failures, the oldest key first."""
        return self._failures.values()
