"""One name has one mode per topic: pull (by last id), push, or a Kafka group whose members read it.

Pull subscriptions and groups move the same cursors by different rules. A group uses its name in the
topics that its members subscribe to. If these are unknown, it uses its name in every topic. A pull
subscriber uses its name in a topic during a call and for `limits.MODE_LEASE_MS` after it, because
between two calls it works on a message. A push subscription uses its name in its topic for as long
as it exists. Only push subscriptions are durable; other uses are kept in memory.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from uuid import UUID

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.errors import NameInOtherMode
from quackmq.loop_clock import loop_clock
from quackmq.model.topic import Topic


class NameModes:
    """Records how each name is used in each topic, and refuses a use in another mode."""

    def __init__(self, registry: SubscriptionRegistry, coordinator: Coordinator) -> None:
        self._registry = registry
        self._coordinator = coordinator
        #: The uses by last id, by name and topic id. Empty dictionaries are removed.
        self._uses: dict[str, dict[UUID, _Use]] = {}

    def check_pull(self, name: str, topic: Topic) -> None:
        """Raise NameInOtherMode if a name has a push subscription to this topic."""
        if self._registry.push.find(topic.id, name) is not None:
            raise _pushed_error(name, topic)

    def check_push(self, name: str, topic: Topic) -> None:
        """Raise NameInOtherMode if a name has a pull subscription to this topic, or is a group
        whose members read it."""
        if self._registry.pull.find(topic.id, name) is not None:
            raise NameInOtherMode(
                f"the name {name} has a subscription by last id to topic {topic.name}: unsubscribe "
                "it, or use another name"
            )
        self._check_no_readers(name, topic)

    def may_refuse_group(self, name: str) -> bool:
        """Return whether `check_group` could raise an error for a group of this name. It is cheap,
        so that callers find out the topics of a request only if they matter."""
        return name in self._uses or name in self._registry.push.by_name

    def check_group(self, name: str, topic_names: Collection[str] | None) -> None:
        """Raise NameInOtherMode if a group of this name may not read these topics or commit
        offsets in them. None as `topic_names` stands for every topic, for a caller that does not
        know them."""
        for subscription in self._registry.push.by_name.get(name, {}).values():
            if topic_names is None or subscription.topic.name in topic_names:
                raise _pushed_error(name, subscription.topic)
        for topic_id, use in self._uses.get(name, {}).items():
            subscription_by_id = self._registry.pull.find(topic_id, name)
            if subscription_by_id is None or use.idle_ms() >= limits.MODE_LEASE_MS:
                continue
            topic = subscription_by_id.topic
            if topic_names is not None and topic.name not in topic_names:
                continue
            # If members of the group read the topic already, no pull subscriber uses the name any
            # more.
            if not self._may_read(name, topic):
                last_use = "just now" if use.calls else f"{use.idle_ms()} ms ago"
                raise NameInOtherMode(
                    f"the name {name} is used by last id in topic {topic.name}, {last_use} by "
                    f"{use.caller}: stop that and wait {limits.MODE_LEASE_MS // 1000} s, or use "
                    "another name"
                )

    @contextmanager
    def use_for_pull(self, caller: Caller, name: str, topic: Topic) -> Iterator[None]:
        """Mark a name as used by last id in a topic for the duration of a call. Raise
        NameInOtherMode if members of a group of this name read the topic."""
        self._check_no_readers(name, topic)
        use = self._uses.setdefault(name, {}).setdefault(topic.id, _Use())
        use.calls += 1
        use.caller = _describe(caller)
        try:
            yield
        finally:
            use.calls -= 1
            use.last_s = loop_clock().time()

    def _check_no_readers(self, name: str, topic: Topic) -> None:
        """Raise NameInOtherMode if members of a Kafka group of this name read the topic, or if it
        is unknown which topics they read."""
        if self._may_read(name, topic):
            holder = self._coordinator.describe_members(name)
            raise NameInOtherMode(
                f"the name {name} is used as a Kafka group, by {holder}: stop its consumers, or "
                "use another name"
            )

    def _may_read(self, name: str, topic: Topic) -> bool:
        """Return whether members of a group of this name read a topic, as far as that is known."""
        group = self._coordinator.group(name)
        is_live = self._coordinator.is_live(name)
        return is_live and group is not None and group.reads_topic(topic.name) is not False

    def clean(self) -> None:
        """Forget uses that are longer ago than the lease."""
        for name, uses in list(self._uses.items()):
            recent = {
                topic_id: use
                for topic_id, use in uses.items()
                if use.idle_ms() < limits.MODE_LEASE_MS
            }
            if recent:
                self._uses[name] = recent
            else:
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


def _pushed_error(name: str, topic: Topic) -> NameInOtherMode:
    return NameInOtherMode(
        f"the name {name} is used for a push subscription to topic {topic.name}: unsubscribe it, "
        "or use another name"
    )


def _describe(caller: Caller) -> str:
    client = f" ({caller.client[: shared_limits.NAME_BYTES]})" if caller.client else ""
    return f"{caller.address or caller.principal}{client}"
