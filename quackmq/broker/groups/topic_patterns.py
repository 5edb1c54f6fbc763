"""Topics by regular expressions, as groups may subscribe to them; and other names likewise.

They come from clients, and Python's own `re` can be kept busy for years by a short one. RE2 takes
time in proportion to the text, in bounded memory; its syntax is the one that Kafka knows (RE2/J):
no look-around, no back references. It is tried in a thread of its own, on one expression at a time,
and gives up after so much of the processor's time; who brought the expression is told so.

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
from quackmq.groups import Matched
from quackmq.groups.consumer.messages import Catalog


class PatternThread:
    """Tries regular expressions beside the loop, one at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def matching(self, patterns: Iterable[str], names: list[str]) -> list[frozenset[str]]:
        """The names that each of the patterns fits as a whole. InvalidPattern, GroupLoading."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="patterns")
        if self._waiting >= limits.PATTERN_WAITERS:
            raise GroupLoading(f"{self._waiting} regular expressions are to be tried: ask again")
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return [
                await loop.run_in_executor(self._thread, matching, pattern, names)
                for pattern in patterns
            ]
        finally:
            self._waiting -= 1

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


class TopicPatterns:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._thread = PatternThread()

    async def match(self, patterns: Iterable[str]) -> Mapping[str, Matched]:
        """The topics that each of these fits as a whole. InvalidPattern, GroupLoading."""
        changes, names = self._catalog.changes, list(self._catalog.by_name)
        wanted = list(patterns)
        found = await self._thread.matching(wanted, names)
        return {
            pattern: Matched(fitting, changes)
            for pattern, fitting in zip(wanted, found, strict=True)
        }

    def close(self) -> None:
        self._thread.close()


def matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """The names that a pattern fits as a whole. InvalidPattern."""
    compiled = _compiled(pattern)
    end = time.thread_time() + limits.PATTERN_CPU_MS / 1000
    found = []
    for name in names:
        if compiled.fullmatch(name) is not None:
            found.append(name)
        if time.thread_time() > end:
            raise InvalidPattern(
                f"{pattern[:100]!r} takes too long over the names that there are: more than "
                f"{limits.PATTERN_CPU_MS} ms"
            )
    return frozenset(found)


def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = limits.PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise InvalidPattern(f"{pattern[:100]!r} is no regular expression: {error}") from None
