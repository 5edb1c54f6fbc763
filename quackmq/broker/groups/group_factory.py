"""Makes the active group of either kind from a group's stored state."""

from __future__ import annotations

import uuid

from quackmq import limits as shared_limits
from quackmq.broker.groups.state import StoredGroup
from quackmq.groups import ConsumerGroup, FormerMembers, Group, GroupKind
from quackmq.groups.consumer.messages import Catalog


class GroupFactory:
    """Knows what all groups share: the catalog of topics and the initial rebalance delay."""

    def __init__(self, topics: Catalog, initial_delay_ms: int) -> None:
        self._topics = topics
        self._initial_delay_ms = initial_delay_ms

    def make(
        self, name: str, stored: StoredGroup, former_members: FormerMembers | None, now_ms: int
    ) -> Group | ConsumerGroup:
        """Return a new active group. A classic group has its stored members; a consumer group waits
        for its former members to return."""
        if stored.kind is GroupKind.CONSUMER:
            return ConsumerGroup(
                name,
                _new_member_id,
                self._topics,
                generation=stored.generation,
                static_members=stored.static_members,
                former=former_members,
                timing=stored.settings.timing,
            )
        return Group(
            name,
            _new_member_id,
            generation=stored.generation,
            protocol_type=stored.protocol_type,
            static_members=stored.static_members,
            stored_members=stored.members,
            now_ms=now_ms,
            initial_delay_ms=self._initial_delay_ms,
        )


def _new_member_id(client: str) -> str:
    """Return a unique member id that begins with the client's name."""
    return f"{client[: shared_limits.NAME_BYTES]}-{uuid.uuid4()}"
