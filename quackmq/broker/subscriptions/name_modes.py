"""One name, one mode at a time: by the id of the last message, pushed, or as a Kafka group with
members.

The first and the last move the same cursors, by different rules. A group holds its name for as long
as it has members. Who uses a name by last id holds it while a call is under way and for a while
after it: between two calls there is the time in which a message is worked on. Nothing of this is
durable. A name that is pushed is so for as long as it has such a subscription (`Pushed`).

Who may call: the broker's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.settings import Caller
from quackmq.errors import NameInOtherMode
from quackmq.loop_clock import loop_clock


class Modes:
    def __init__(self, group_holder: Callable[[str], str | None]) -> None:
        """`group_holder` tells in words who the members of the group of a name are, None if there
        are none."""
        self._group_holder = group_holder
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def by_last_id(self, caller: Caller, name: str) -> Iterator[None]:
        """Around a call by last id. The name must be that of a subscription."""
        self.check_no_group(name)
        use = self._uses.setdefault(name, _Use())
        use.calls += 1
        use.who = _words(caller)
        try:
            yield
        finally:
            use.calls -= 1
            use.last_s = loop_clock().time()

    def check_no_group(self, name: str) -> None:
        """NameInOtherMode if a group of this name has members."""
        holder = self._group_holder(name)
        if holder is not None:
            raise NameInOtherMode(
                f"the name {name} is used as a Kafka group, by {holder}: stop its consumers, or "
                "use another name"
            )

    def check_group_may(self, name: str) -> None:
        """NameInOtherMode if a group of this name must not be joined, nor commit."""
        use = self._uses.get(name)
        if use is None:
            return
        ago_ms = use.ago_ms()
        if ago_ms < limits.MODE_LEASE_MS:
            last = "just now" if use.calls else f"{ago_ms} ms ago"
            raise NameInOtherMode(
                f"the name {name} is used by last id, {last} by {use.who}: stop that and wait "
                f"{limits.MODE_LEASE_MS // 1000} s, or use another name"
            )
        del self._uses[name]

    def clean(self) -> None:
        """Forget uses of long ago."""
        old = [name for name, use in self._uses.items() if use.ago_ms() >= limits.MODE_LEASE_MS]
        for name in old:
            del self._uses[name]


class _Use:
    __slots__ = ("calls", "last_s", "who")

    def __init__(self) -> None:
        self.calls = 0
        self.last_s = 0.0
        self.who = ""

    def ago_ms(self) -> int:
        if self.calls:
            return 0
        return int((loop_clock().time() - self.last_s) * 1000)


def _words(caller: Caller) -> str:
    client = f" ({caller.client[: shared_limits.NAME_BYTES]})" if caller.client else ""
    return f"{caller.address or caller.principal}{client}"
