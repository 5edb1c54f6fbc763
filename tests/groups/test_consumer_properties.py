"""Whatever members of the newer protocol do, no partition has two readers, and in the end none is
without one.

The players are clients that do as they are told, sooner or later; answers that are lost; topics
that come, grow and go; and a clock. After every step it is looked at what the members really read.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quackmq.errors import (
    InstanceInUse,
    MemberFenced,
    QuackError,
    StaleMemberEpoch,
    UnknownMember,
)
from quackmq.groups import GroupState, LeaveRequest, MemberRef
from tests.groups.consumer_stage import REBALANCE_MS, TIMING, Client, Stage, Topics
from tests.kit import effort

NAMES = ["news", "weather", "sports"]
TOPICS = st.sets(st.sampled_from(NAMES), min_size=1).map(lambda names: tuple(sorted(names)))
PICKS = st.integers(0, 30)
STEPS_MS = st.sampled_from([1, 500, 1_000, TIMING.session_timeout_ms // 2])


class ConsumerGroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(Topics(news=4, weather=1))
        self.clients: list[Client] = []
        self.epoch = 0
        self.number = 0

    @initialize(
        assignor=st.sampled_from([None, "uniform", "range"]),
        clients=st.lists(st.tuples(TOPICS, st.sampled_from([1_000, REBALANCE_MS])), max_size=3),
    )
    def begin(self, assignor: str | None, clients: list[tuple[tuple[str, ...], int]]) -> None:
        self.assignor = assignor
        for topics, rebalance_ms in clients:
            self.somebody_joins(topics, None, False, rebalance_ms)
        self.stage.settle(*self.clients)

    # --- players ---

    @precondition(lambda self: len(self.clients) < 6)
    @rule(
        topics=TOPICS,
        instance_id=st.sampled_from([None, None, None, "one", "two"]),
        lost=st.booleans(),
        rebalance_ms=st.sampled_from([1_000, REBALANCE_MS]),
    )
    def somebody_joins(
        self, topics: tuple[str, ...], instance_id: str | None, lost: bool, rebalance_ms: int
    ) -> None:
        self.number += 1
        client = Client(
            self.stage,
            f"member {self.number}",
            *topics,
            instance_id=instance_id,
            assignor=self.assignor,
            rebalance_ms=rebalance_ms,
        )
        try:
            client.beat(lost=lost)
        except InstanceInUse:
            return
        self.clients.append(client)

    @precondition(lambda self: self.clients)
    @rule(pick=PICKS, lost=st.booleans())
    def somebody_is_heard(self, pick: int, lost: bool) -> None:
        self.hear(self.pick(pick), lost=lost)

    @precondition(lambda self: self.clients)
    @rule(times=st.integers(1, 3))
    def everybody_is_heard(self, times: int) -> None:
        for client in self.clients * times:
            if client in self.clients:
                self.hear(client)

    @precondition(lambda self: self.clients)
    @rule(pick=PICKS)
    def somebody_lets_go(self, pick: int) -> None:
        self.pick(pick).let_go()

    @precondition(lambda self: self.clients)
    @rule(pick=PICKS, topics=TOPICS)
    def somebody_reads_something_else(self, pick: int, topics: tuple[str, ...]) -> None:
        self.pick(pick).change(*topics)

    @precondition(lambda self: self.clients)
    @rule(pick=PICKS, how=st.sampled_from(["leaves", "leaves for a while", "dies", "is removed"]))
    def somebody_goes(self, pick: int, how: str) -> None:
        client = self.pick(pick)
        is_back_soon = how == "leaves for a while" and client.instance_id is not None
        if how != "is removed":
            self.clients.remove(client)
        try:
            if how == "is removed":
                self.stage.group.leave(
                    self.stage.now_ms, LeaveRequest(client.id, client.instance_id)
                )
            elif how != "dies" and client.epoch > 0:
                client.leave(-2 if is_back_soon else -1)
        except QuackError as error:
            assert isinstance(error, UnknownMember | MemberFenced), error

    @precondition(lambda self: self.clients)
    @rule(pick=PICKS)
    def somebody_starts_afresh(self, pick: int) -> None:
        self.pick(pick).lose()

    @rule(name=st.sampled_from(NAMES), more=st.integers(0, 3))
    def a_topic_changes(self, name: str, more: int) -> None:
        known = self.stage.topics.by_name.get(name)
        if more:
            self.stage.topics.make(name, more + (0 if known is None else known.partitions))
        elif known is not None:
            self.stage.topics.remove(name)

    @rule(hung_up=st.booleans())
    def the_broker_is_started_again(self, hung_up: bool) -> None:
        self.stage.restart()
        for client in self.clients:
            # Who was waiting for an answer says everything again.
            client.says_all = client.says_all or hung_up

    @rule(step_ms=STEPS_MS)
    def time_passes(self, step_ms: int) -> None:
        self.stage.advance(step_ms)

    # --- what holds ---

    @invariant()
    def no_partition_has_two_readers(self) -> None:
        group = self.stage.group
        # Who has not been heard since a restart may be reading all the same.
        alive = set(group.member_ids)
        readers = Counter(
            key for client in self.clients if client.id in alive for key in client.reads
        )
        assert [key for key, number in readers.items() if number > 1] == []
        told = Counter(key for member in group.description().members for key in member.assigned)
        assert [key for key, number in told.items() if number > 1] == []

    @invariant()
    def epochs_grow(self) -> None:
        group = self.stage.group
        described = group.description()
        assert self.epoch <= described.epoch == group.generation
        self.epoch = described.epoch
        assert described.assignment_epoch <= described.epoch
        for member in described.members:
            assert member.epoch <= described.assignment_epoch

    @invariant()
    def only_members_of_the_present_epoch_commit(self) -> None:
        for member in self.stage.group.description().members:
            for epoch in (member.epoch - 1, member.epoch + 1):
                try:
                    self.stage.group.check_commit(0, MemberRef(member.member_id, epoch))
                except StaleMemberEpoch:
                    continue
                raise AssertionError(f"{member} commits in epoch {epoch}")

    @invariant()
    def it_is_seen_to_in_time(self) -> None:
        assert self.stage.group.is_empty or self.stage.group.next_deadline_ms is not None

    def teardown(self) -> None:
        """All is quiet, and heartbeats go on: everything has a reader."""
        stage = self.stage
        for _ in range(4):
            stage.advance(TIMING.session_timeout_ms // 2)
            for client in list(self.clients):
                self.hear(client)
                client.let_go()
        for _ in range(10):
            for client in list(self.clients):
                self.hear(client)
                client.let_go()
        there = [
            client
            for client in self.clients
            if client.id in {member.member_id for member in stage.group.description().members}
        ]
        if not there:
            assert stage.group.state is GroupState.EMPTY
            return
        assert stage.group.state is GroupState.STABLE
        subscribed = {
            name for client in there for name in client.topics if name in stage.topics.by_name
        }
        read = Counter(key for client in there for key in client.reads)
        assert read == Counter(stage.topics.keys(*subscribed))
        for client in there:
            assert client.reads == stage.member(client.id).target
            assert client.reads <= stage.topics.keys(*(client.topics & subscribed))
        if len({client.topics for client in there}) == 1 and self.assignor != "range":
            sizes = [len(client.reads) for client in there]
            assert max(sizes) - min(sizes) <= 1

    def hear(self, client: Client, *, lost: bool = False) -> None:
        if not client.try_to_beat(lost=lost):
            self.clients.remove(client)

    def pick(self, pick: int) -> Client:
        return self.clients[pick % len(self.clients)]


TestConsumerGroup = ConsumerGroupMachine.TestCase
TestConsumerGroup.settings = settings(
    max_examples=effort.of(120), stateful_step_count=40, deadline=None
)
