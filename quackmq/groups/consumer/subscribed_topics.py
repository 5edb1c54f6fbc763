"""The topics that the members of one newer group (KIP-848) subscribe to, by name or pattern. Pure.

Regular expressions are not matched here, which may take a while: `patterns_to_match` returns those
that the caller must match, and `store_matches` takes the result.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping

from quackmq.groups import limits
from quackmq.groups.consumer.assignors import Pool
from quackmq.groups.consumer.members import ConsumerMembers
from quackmq.groups.consumer.messages import Catalog, PatternMatches, Subscription


class SubscribedTopics:
    """The topics of each subscription with their numbers of partitions, as of the last refresh."""

    def __init__(self, catalog: Catalog, members: ConsumerMembers) -> None:
        self._catalog = catalog
        self._members = members
        self._topics_by_subscription: dict[Subscription, dict[uuid.UUID, int]] = {}
        #: The versions of the catalog and of the pattern matches at the last refresh.
        self._seen_versions: tuple[int, int] | None = None
        self._matches_by_pattern: dict[str, PatternMatches] = {}
        self._matches_version = 0
        self._next_match_ms = 0

    @property
    def match_count(self) -> int:
        """The number of topic names that all patterns match."""
        return sum(len(matches.names) for matches in self._matches_by_pattern.values())

    def has_reader(self, topic_name: str) -> bool:
        """Return whether a member subscribes to a topic, by name or by pattern."""
        return any(
            topic_name in topics or (pattern and topic_name in self._matching_topics(pattern))
            for topics, pattern in self._members.members_by_subscription
        )

    # --- patterns ---

    def patterns_to_match(self, now_ms: int, pattern: str | None) -> list[str]:
        """Return the regular expressions that the caller must match before it passes a heartbeat
        with `pattern`. These are `pattern`, if it is new, and at intervals the ones in use, if
        topics have changed."""
        unmatched = [pattern] if pattern and pattern not in self._matches_by_pattern else []
        if now_ms >= self._next_match_ms:
            changes = self._catalog.changes
            unmatched += [
                used_pattern
                for used_pattern, matches in self._matches_by_pattern.items()
                if matches.changes != changes
            ]
        return unmatched

    def store_matches(self, now_ms: int, matches: Mapping[str, PatternMatches]) -> None:
        """Add the matching topics of patterns; drop those of patterns that no member uses."""
        if not matches and not self._matches_by_pattern:
            return
        used_patterns = {each.pattern for each in self._members.members_by_subscription} - {""}
        self._matches_by_pattern = {
            pattern: pattern_matches
            for pattern, pattern_matches in {**self._matches_by_pattern, **matches}.items()
            if pattern in used_patterns
        }
        if matches:
            self._matches_version += 1
            self._next_match_ms = now_ms + limits.PATTERN_REFRESH_MS

    def _matching_topics(self, pattern: str) -> Iterable[str]:
        matches = self._matches_by_pattern.get(pattern)
        return () if matches is None else matches.names

    # --- topics ---

    def refresh(self) -> bool:
        """Look up the topics again if the catalog or the matches have changed. Return whether
        topics or their partitions are different now; changed subscriptions do not count."""
        versions = (self._catalog.changes, self._matches_version)
        if versions == self._seen_versions:
            return False
        self._seen_versions = versions
        before, self._topics_by_subscription = self._topics_by_subscription, {}
        return any(
            before.get(subscription, topics) != topics
            for subscription in self._members.members_by_subscription
            for topics in [self.resolve(subscription)]
        )

    def resolve(self, subscription: Subscription) -> dict[uuid.UUID, int]:
        """Return the existing topics of a subscription, with their numbers of partitions."""
        topics = self._topics_by_subscription.get(subscription)
        if topics is None:
            names = subscription.topics.union(self._matching_topics(subscription.pattern))
            named_topics = (self._catalog.by_name.get(name) for name in sorted(names))
            topics = {topic.id: topic.partitions for topic in named_topics if topic is not None}
            self._topics_by_subscription[subscription] = topics
        return topics

    def make_pools(self) -> list[Pool]:
        """Make one pool of all topics that the same subscriptions contain, with their members."""
        members_by_subscription = self._members.members_by_subscription
        self._topics_by_subscription = {
            subscription: self.resolve(subscription) for subscription in members_by_subscription
        }
        # Below, a subscription is identified by its position in these two dictionaries.
        members_by_position = list(members_by_subscription.values())
        positions_by_topic: dict[uuid.UUID, list[int]] = {}
        partitions_by_topic: dict[uuid.UUID, int] = {}
        for position, topics in enumerate(self._topics_by_subscription.values()):
            partitions_by_topic |= topics
            for topic_id in topics:
                positions_by_topic.setdefault(topic_id, []).append(position)
        topics_by_positions: dict[tuple[int, ...], dict[uuid.UUID, int]] = {}
        for topic_id, all_positions in positions_by_topic.items():
            topics = topics_by_positions.setdefault(tuple(all_positions), {})
            topics[topic_id] = partitions_by_topic[topic_id]
        pools = []
        for positions, topics in topics_by_positions.items():
            members = [
                member
                for position in positions
                for member in members_by_position[position].values()
            ]
            members.sort(key=lambda member: member.sort_key)
            pools.append(Pool([member.id for member in members], topics))
        return pools
