"""Match regular expressions against topic names, for subscriptions, and against other names.

The expressions come from clients, and a short one can keep Python's `re` busy for years. RE2 takes
time in proportion to the text, in bounded memory. Its syntax is the one of Kafka's RE2/J: no
look-around, no back references. One side thread matches one expression at a time. It stops after
limits.PATTERN_CPU_MS of processor time with InvalidPattern, which the client receives.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import re2

from quackmq.broker import limits
from quackmq.errors import GroupLoading, InvalidPattern
from quackmq.groups import PatternMatches
from quackmq.groups.consumer.messages import Catalog


class PatternThread:
    """A side thread that matches one regular expression at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def find_matches(self, patterns: Iterable[str], names: list[str]) -> list[frozenset[str]]:
        """Return, for each pattern, the names that it matches as a whole. Raise InvalidPattern or
        GroupLoading."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="patterns")
        if self._waiting >= limits.PATTERN_WAITERS:
            raise GroupLoading(
                f"{self._waiting} requests wait for regular expressions: try again later"
            )
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return [
                await loop.run_in_executor(self._thread, find_matches, pattern, names)
                for pattern in patterns
            ]
        finally:
            self._waiting -= 1

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


class TopicPatterns:
    """Matches the patterns of subscriptions against the names of the existing topics."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._thread = PatternThread()

    async def match(self, patterns: Iterable[str]) -> Mapping[str, PatternMatches]:
        """Return, for each pattern, the topics that it matches as a whole. Raise InvalidPattern or
        GroupLoading."""
        changes, names = self._catalog.changes, list(self._catalog.by_name)
        patterns = list(patterns)
        matches = await self._thread.find_matches(patterns, names)
        return {
            pattern: PatternMatches(matching_names, changes)
            for pattern, matching_names in zip(patterns, matches, strict=True)
        }

    def close(self) -> None:
        self._thread.close()


def find_matches(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names that a pattern matches as a whole. Raise InvalidPattern."""
    compiled = _compile(pattern)
    deadline_s = time.thread_time() + limits.PATTERN_CPU_MS / 1000
    matches = []
    for name in names:
        if compiled.fullmatch(name) is not None:
            matches.append(name)
        if time.thread_time() > deadline_s:
            raise InvalidPattern(
                f"{pattern[:100]!r} takes more than {limits.PATTERN_CPU_MS} ms to match all names: "
                "use a simpler regular expression"
            )
    return frozenset(matches)


def _compile(pattern: str) -> Any:
    """Compile a pattern with bounded memory. Raise InvalidPattern."""
    options = re2.Options()
    options.max_mem = limits.PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidPattern(f"invalid regular expression {pattern[:100]!r}: {error}") from None
