"""A group of the newer kind on a stage: topics to make, a clock to move, and clients that do as
they are told, no faster than they like.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from quackmq.errors import (
    FencedMemberEpoch,
    GroupLoading,
    InstanceInUse,
    MemberFenced,
    QuackError,
    UnknownMember,
)
from quackmq.groups import (
    ConsumerGroup,
    ConsumerMemberDescription,
    FormerMembers,
    Heartbeat,
    HeartbeatResponse,
    PatternMatches,
    Timing,
)
from quackmq.groups.consumer.messages import JOIN_EPOCH
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic

TIMING = Timing(session_timeout_ms=10_000, heartbeat_interval_ms=1_000)
REBALANCE_MS = 30_000


class Topics:
    """A catalog."""

    def __init__(self, **partitions: int) -> None:
        self.by_name: dict[str, Topic] = {}
        self.changes = 0
        self._ids = count(1)
        for name, number in partitions.items():
            self.make(name, number)

    def make(self, name: str, partitions: int = 1) -> None:
        """A new topic, or more partitions for one that is there."""
        known = self.by_name.get(name)
        topic_id = uuid.UUID(int=next(self._ids)) if known is None else known.id
        self.by_name[name] = Topic(topic_id, name, partitions, Policy(), 0)
        self.changes += 1

    def remove(self, name: str) -> None:
        del self.by_name[name]
        self.changes += 1

    def keys(self, *names: str) -> set[PartitionKey]:
        return {
            PartitionKey(topic.id, partition)
            for topic in (self.by_name[name] for name in names)
            for partition in range(topic.partitions)
        }

    def shown(self, keys: Iterable[PartitionKey]) -> list[str]:
        """Like "news-0", in order."""
        names = {topic.id: name for name, topic in self.by_name.items()}
        return sorted(f"{names.get(key.topic_id, 'gone')}-{key.partition}" for key in keys)


class Stage:
    def __init__(self, topics: Topics | None = None, **options: Any) -> None:
        self.now_ms = 1_000_000
        self.topics = Topics(news=6) if topics is None else topics
        self.ids = count(1)
        options.setdefault("timing", TIMING)
        self.group = ConsumerGroup("readers", self.new_id, self.topics, **options)

    def new_id(self, name: str) -> str:
        return f"{name}-{next(self.ids)}"

    def beat(
        self, beat: Heartbeat, matches: Mapping[str, PatternMatches] | None = None
    ) -> HeartbeatResponse:
        ((waiter, outcome),) = self.group.heartbeat(self.now_ms, beat, "waiter", matches or {})
        assert waiter == "waiter"
        if isinstance(outcome, QuackError):
            raise outcome
        assert isinstance(outcome, HeartbeatResponse)
        return outcome

    def restart(self) -> None:
        """The group goes on from what has to last of it."""
        old = self.group
        until_ms = self.now_ms + TIMING.session_timeout_ms
        self.group = ConsumerGroup(
            old.name,
            self.new_id,
            self.topics,
            generation=old.generation,
            static_members=old.static_members,
            former=FormerMembers(old.member_ids, old.generation, until_ms),
            timing=TIMING,
        )

    def client(self, member_id: str, *topics: str, **more: Any) -> Client:
        """One that has joined."""
        client = Client(self, member_id, *(topics or ("news",)), **more)
        client.beat()
        return client

    def settle(self, *clients: Client) -> None:
        """Heartbeats until nothing changes any more."""
        for _ in range(10):
            for client in clients:
                client.beat()
                client.let_go()

    def advance(self, by_ms: int) -> None:
        """Time passes, and the group is asked at each of its deadlines."""
        end_ms = self.now_ms + by_ms
        while (deadline_ms := self.group.next_deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            assert self.group.tick(self.now_ms) == []
        self.now_ms = end_ms

    def member(self, member_id: str) -> ConsumerMemberDescription:
        """As the group describes it."""
        members = self.group.description().members
        (found,) = [member for member in members if member.member_id == member_id]
        return found


class Client:
    """What it `reads` it was told to; what it was told to let go of, it reads until `let_go`."""

    def __init__(
        self,
        stage: Stage,
        member_id: str,
        *topics: str,
        instance_id: str | None = None,
        rebalance_ms: int = REBALANCE_MS,
        assignor: str | None = None,
        pattern: str | None = None,
    ) -> None:
        self.stage = stage
        self.id = member_id
        self.instance_id = instance_id
        self.topics = frozenset(topics)
        self.pattern = pattern
        self.assignor = assignor
        self.rebalance_ms = rebalance_ms
        self.epoch = JOIN_EPOCH
        self.reads: frozenset[PartitionKey] = frozenset()
        self.wanted: frozenset[PartitionKey] = frozenset()
        self.interval_ms = 0
        #: What it has not said since it was last heard, or for sure.
        self.says_all = True
        self.said: frozenset[PartitionKey] | None = None

    def request(self) -> Heartbeat:
        everything = self.says_all or self.epoch == JOIN_EPOCH
        return Heartbeat(
            self.id,
            self.epoch,
            f"client of {self.id}",
            "/127.0.0.1",
            instance_id=self.instance_id,
            rebalance_timeout_ms=self.rebalance_ms if everything else None,
            topics=self.topics if everything else None,
            pattern=self.pattern if everything else None,
            assignor=self.assignor if everything else None,
            owned=self.reads if everything or self.reads != self.said else None,
        )

    def beat(
        self, *, lost: bool = False, matches: Mapping[str, PatternMatches] | None = None
    ) -> HeartbeatResponse:
        """With `lost` it never gets the answer, and says all of it again the next time."""
        said = self.reads
        answer = self.stage.beat(self.request(), matches)
        if lost:
            self.says_all = True
            return answer
        assert answer.epoch >= self.epoch, "epochs grow"
        self.epoch, self.interval_ms = answer.epoch, answer.heartbeat_interval_ms
        self.says_all, self.said = False, said
        if answer.assignment is not None:
            self.wanted = answer.assignment
            if self.reads <= self.wanted:
                self.reads = self.wanted
        return answer

    def let_go(self) -> None:
        """Of what it was told to, and then it begins with what is new."""
        self.reads = self.wanted

    def lose(self) -> None:
        """It is no member: it reads nothing, and will join anew."""
        self.reads = self.wanted = frozenset()
        self.epoch = JOIN_EPOCH

    def try_to_beat(self, *, lost: bool = False) -> bool:
        """Whether there is any sense in trying again."""
        try:
            self.beat(lost=lost)
        except GroupLoading:
            self.says_all = True
        except (UnknownMember, FencedMemberEpoch):
            self.lose()
        except (MemberFenced, InstanceInUse):
            self.lose()
            return False
        return True

    def leave(self, epoch: int = -1) -> HeartbeatResponse:
        self.reads = self.wanted = frozenset()
        beat = Heartbeat(self.id, epoch, instance_id=self.instance_id)
        self.epoch = JOIN_EPOCH
        self.says_all = True
        return self.stage.beat(beat)

    def change(self, *topics: str, pattern: str | None = None) -> None:
        """Other topics, told with the next heartbeat."""
        self.topics, self.pattern = frozenset(topics), pattern
        self.says_all = True

    @property
    def shown(self) -> list[str]:
        return self.stage.topics.shown(self.reads)
