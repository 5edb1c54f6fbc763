"""One name has one mode at a time: pull (by last id), push, or a Kafka group with members.

Pull subscriptions and groups move the same cursors by different rules. A group uses its name while
it has members. A pull subscriber uses its name during a call and for `limits.MODE_LEASE_MS` after
it, because between two calls it works on a message. A push subscription uses its name for as long
as it exists. Only push subscriptions are durable; other uses are kept in memory.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.errors import NameInOtherMode
from quackmq.loop_clock import loop_clock


class NameModes:
    """Records how each name is used, and refuses a use in another mode."""

    def __init__(self, registry: SubscriptionRegistry, coordinator: Coordinator) -> None:
        self._registry = registry
        self._coordinator = coordinator
        self._uses: dict[str, _Use] = {}

    def check_pull(self, name: str) -> None:
        """Raise NameInOtherMode if a name has push subscriptions."""
        subscriptions = self._registry.push.by_name.get(name)
        if subscriptions is not None:
            topic = next(iter(subscriptions.values())).topic
            raise NameInOtherMode(
                f"the name {name} is used for a push subscription to topic {topic.name}: "
                "unsubscribe it, or use another name"
            )

    def check_push(self, name: str) -> None:
        """Raise NameInOtherMode if a name has pull subscriptions, or is a group with members."""
        if name in self._registry.pull.by_name:
            raise NameInOtherMode(
                f"the name {name} has a subscription by last id: unsubscribe it, or use another "
                "name"
            )
        self._check_no_members(name)

    def check_group(self, name: str) -> None:
        """Raise NameInOtherMode if members may not join a group of this name, nor commit to it."""
        self.check_pull(name)
        if name not in self._registry.pull.by_name or self._coordinator.is_live(name):
            return
        use = self._uses.get(name)
        if use is None:
            return
        idle_ms = use.idle_ms()
        if idle_ms < limits.MODE_LEASE_MS:
            last_use = "just now" if use.calls else f"{idle_ms} ms ago"
            raise NameInOtherMode(
                f"the name {name} is used by last id, {last_use} by {use.caller}: stop that and "
                f"wait {limits.MODE_LEASE_MS // 1000} s, or use another name"
            )
        del self._uses[name]

    @contextmanager
    def use_for_pull(self, caller: Caller, name: str) -> Iterator[None]:
        """Mark a name as used by last id for the duration of a call. Raise NameInOtherMode if a
        group of this name has members."""
        self._check_no_members(name)
        use = self._uses.setdefault(name, _Use())
        use.calls += 1
        use.caller = _describe(caller)
        try:
            yield
        finally:
            use.calls -= 1
            use.last_s = loop_clock().time()

    def _check_no_members(self, name: str) -> None:
        """Raise NameInOtherMode if a Kafka group of this name has members."""
        holder = self._coordinator.describe_members(name)
        if holder is not None:
            raise NameInOtherMode(
                f"the name {name} is used as a Kafka group, by {holder}: stop its consumers, or "
                "use another name"
            )

    def clean(self) -> None:
        """Forget uses that are longer ago than the lease."""
        old = [name for name, use in self._uses.items() if use.idle_ms() >= limits.MODE_LEASE_MS]
        for name in old:
            del self._uses[name]


class _Use:
    """The use of a name by last id: the running calls, the end of the last one, and its caller."""

    __slots__ = ("calls", "last_s", "caller")

    def __init__(self) -> None:
        self.calls = 0
        self.last_s = 0.0
        self.caller = ""

    def idle_ms(self) -> int:
        """Return how long ago the last call ended; 0 while a call runs."""
        if self.calls:
            return 0
        return int((loop_clock().time() - self.last_s) * 1000)


def _describe(caller: Caller) -> str:
    client = f" ({caller.client[: shared_limits.NAME_BYTES]})" if caller.client else ""
    return f"{caller.address or caller.principal}{client}"
