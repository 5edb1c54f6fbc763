"""Which of a subscriber's topics is served next. Pure.

A topic is a number: its place among the topics that the subscriber has chosen. Topics that may have
an entry are ready. After each entry the turn goes to the next ready topic in that order, and from
the last topic to the first. So a ready topic waits for at most one entry of each other topic.

A topic can be put before all others: its entry was sent before and must come first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Turns:
    """The topics that are ready, and whose turn it is."""

    __slots__ = ("_last", "_preferred", "ready")

    def __init__(self) -> None:
        #: The ready topics, in order and without repetition. Callers only look whether there are
        #: any; the list stays the same object.
        self.ready: list[int] = []
        #: Ready topics that come before the others.
        self._preferred: list[int] = []
        #: The topic that was served last.
        self._last = -1

    def add(self, topic: int) -> None:
        """Add a topic that may have an entry. Do nothing if it is ready already."""
        ready = self.ready
        if not ready:
            ready.append(topic)
            return
        index = bisect_left(ready, topic)
        if index == len(ready) or ready[index] != topic:
            ready.insert(index, topic)

    def prefer(self, topic: int) -> None:
        """Make a topic ready. Let it be served before all others, except those that were preferred
        earlier."""
        self.add(topic)
        if topic not in self._preferred:
            self._preferred.append(topic)

    def next(self) -> int:
        """Return the topic whose turn it is; it is not ready any more. There must be one."""
        ready = self.ready
        if self._preferred:
            self._last = topic = self._preferred.pop(0)
            ready.remove(topic)
        elif len(ready) == 1:
            self._last = topic = ready.pop()
        else:
            index = bisect_right(ready, self._last)
            self._last = topic = ready.pop(index if index < len(ready) else 0)
        return topic
