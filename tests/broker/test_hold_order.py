"""Cursors that hold retention, in order: the same answers as by walking over all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.broker import Broker, Commit, GroupSettings, MemberRef
from quackmq.broker.retention.hold_order import HoldOrder
from quackmq.broker.retention.holds import Holds
from quackmq.errors import QuackError
from quackmq.model.leases import Leases
from quackmq.model.policy import Policy
from quackmq.model.subscription import Offset
from quackmq.model.topic import Cursor, PartitionKey
from quackmq.stores.memory import MemoryStore
from tests.broker.pushed_peer import PATIENT, Peer
from tests.broker.support import CALLER, TOPIC, open_broker, publish
from tests.kit import effort

PARTITIONS = 2
NAMES = ("ada", "bob", "cyd", "dee")
_offsets = st.integers(0, 6)


@given(
    st.dictionaries(st.sampled_from(NAMES), _offsets),
    st.lists(st.tuples(st.sampled_from(NAMES), st.none() | _offsets)),
)
def test_an_order_knows_what_its_changes_come_to(
    first: dict[str, int], changes: list[tuple[str, int | None]]
) -> None:
    order, plain = HoldOrder(first), dict(first)
    for name, offset in [("ada", first.get("ada")), *changes]:
        order.move(name, offset)
        if offset is None:
            plain.pop(name, None)
        else:
            plain[name] = offset
        assert len(order) == len(plain)
        assert order.lowest == min(((each, who) for who, each in plain.items()), default=None)
        for bound in range(8):
            before = [who for who, each in plain.items() if each < bound]
            assert order.count_before(bound) == len(before)
            assert sorted(order.names_before(bound)) == sorted(before)


def walked(broker: Broker, key: PartitionKey) -> dict[str, int]:
    """The cursors that hold a partition, found by walking over all subscriptions and groups."""
    subscriptions = broker._registry.pull.of_topic(key.topic_id)
    found = {each.name: each.progress.cursors[key.partition] for each in subscriptions}
    for name in broker._coordinator.names():
        kept, cursor = broker._coordinator.stored(name), broker._cursors.at(name, key)
        if kept is not None and kept.settings.holds_retention:
            if cursor is not None and cursor.offset is not None:
                found[name] = cursor.offset
    return found


def check(broker: Broker) -> None:
    """Compare with what the subscriptions and groups themselves say."""
    holds = broker._holds
    topic = broker.topic(TOPIC)
    for partition in range(topic.partitions):
        key = PartitionKey(topic.id, partition)
        cursors = walked(broker, key)
        of_topic = broker._push.of_topic(topic.id)
        marks = {each.name: each.partition_progress[partition].durable_mark for each in of_topic}
        every = [*cursors.values(), *marks.values()]
        assert holds.lowest_hold(key) == min(every, default=None)
        offsets = range(8)
        pushed = [each.partition_progress[partition].leases for each in of_topic]
        unacknowledged = [sum(not each.is_done(offset) for each in pushed) for offset in offsets]
        assert holds.consumers_left(key, offsets) == [
            sum(cursor <= each for cursor in cursors.values()) + others
            for each, others in zip(offsets, unacknowledged, strict=True)
        ]
        for offset in offsets:
            named = {who for each in (cursors, marks) for who in each if each[who] < offset}
            assert list(holds.names_behind(key, offset)) == sorted(named)
            found = holds.holders(key, offset)
            assert (found is None) == (not named)
            if found is not None:
                assert (found.offset, found.total) == (min(every), sum(x < offset for x in every))


class CheckingStore(MemoryStore):
    """Compares in the midst of a change, too: when cursors are about to be set."""

    check: Callable[[], None] | None = None

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        if self.check is not None:
            self.check()
        await super().set_cursors(cursors)


async def change(broker: Broker, by: random.Random) -> None:
    name = by.choice(NAMES)
    group = f"group-{name}"
    partition = by.randrange(PARTITIONS)
    what = by.randrange(12)
    key = PartitionKey(broker.topic(TOPIC).id, partition)
    if what == 0:
        await broker.subscribe(CALLER, name, TOPIC, by.choice(("beginning", "end", Offset(2))))
    elif what == 1:
        await broker.unsubscribe(CALLER, name, TOPIC)
    elif what == 2:
        await broker.seek(CALLER, name, TOPIC, by.choice(("beginning", "end", Offset(1))))
    elif what in (3, 4):
        message = await broker.get(CALLER, name, TOPIC, None)
        if message is not None:
            await broker.get(CALLER, name, TOPIC, message.id)
    elif what == 5:
        who = by.choice((name, group))
        commits = [Commit(key, by.choice((None, 0, 1, 2, 3, 4)))]
        await broker.groups.commit(CALLER, who, MemberRef("", -1), commits)
    elif what == 6:
        settings = GroupSettings(holds_retention=by.random() < 0.7)
        await broker.groups.alter(CALLER, by.choice((name, group)), settings)
    elif what == 7:
        await broker.groups.delete_offsets(CALLER, by.choice((name, group)), [key])
    elif what == 8:
        await broker.pushing.subscribe(CALLER, f"pushed-{name}", TOPIC, PATIENT, "beginning")
    elif what == 9 and broker._registry.push.count_in(key.topic_id):
        held = by.choice(list(broker._push.of_topic(key.topic_id)))
        if by.random() < 0.3:
            await broker.pushing.unsubscribe(CALLER, held.name, TOPIC)
        else:
            peer = Peer()
            await peer.open(broker, held.name)
            taken = await peer.take()
            peer.ack(by.sample(taken, min(2, len(taken))))
            check(broker)
            if by.random() < 0.5:
                await broker.pushing.flush()
            await peer.channel.close()
    elif what == 10:
        partitions = min(broker.topic(TOPIC).partitions + 1, 2 * PARTITIONS)
        await broker.alter_topic(CALLER, TOPIC, partitions=partitions)
    else:
        await publish(broker, b"x", partition=partition)


@pytest.mark.parametrize("seed", range(effort.of(12)))
async def test_holds_follow_every_change_of_subscriptions_and_groups(seed: int) -> None:
    by = random.Random(seed)
    store = CheckingStore()
    async with open_broker(store) as broker:
        policy = Policy(keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, partitions=PARTITIONS, policy=policy)
        store.check = lambda: check(broker)
        for partition in range(PARTITIONS):
            for _ in range(4):
                await publish(broker, b"x", partition=partition)
        done, refused = 0, Counter[str]()
        for _ in range(120):
            try:
                await change(broker, by)
                done += 1
            except QuackError as error:
                refused[type(error).__name__] += 1
            check(broker)
        assert done > 40, refused


async def test_asking_again_does_not_walk_over_all_subscriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first question does; a get, which moves a cursor and asks how many are left, does not."""
    async with open_broker() as broker:
        policy = Policy(keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        names = [f"reader-{number}" for number in range(20)]
        for name in names:
            await broker.subscribe(CALLER, name, TOPIC, "beginning")
        await publish(broker, b"a")
        await publish(broker, b"b")
        first = await broker.get(CALLER, names[0], TOPIC, None)
        assert first is not None and first.consumers_left == len(names)
        walks: list[str] = []
        monkeypatch.setattr(broker._holds, "pull_cursors", lambda key: walks.append("walked"))
        second = await broker.get(CALLER, names[0], TOPIC, first.id)
        assert second is not None and second.consumers_left == len(names)
        again = await broker.get(CALLER, names[1], TOPIC, None)
        assert again is not None and again.consumers_left == len(names) - 1
        assert isinstance(broker._holds, Holds)
        assert broker._holds.lowest_hold(PartitionKey(broker.topic(TOPIC).id, 0)) == 0
        assert walks == []


async def test_only_push_subscriptions_that_acknowledged_out_of_order_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others count by their low-water marks, though all of them are behind."""
    async with open_broker() as broker:
        policy = Policy(keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        names = [f"pushed-{number}" for number in range(20)]
        for name in names:
            await broker.pushing.subscribe(CALLER, name, TOPIC, PATIENT, "beginning")
        for value in (b"a", b"b", b"c"):
            await publish(broker, value)
        key = PartitionKey(broker.topic(TOPIC).id, 0)
        assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [20, 20, 20]
        for each in broker._push.of_topic(key.topic_id):  # changes of the same flush follow
            broker._flusher.mark_dirty(each.partition_progress[0])
        assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [20, 20, 20]
        peers = [Peer(), Peer()]
        for name, peer in zip(names, peers, strict=False):
            await peer.open(broker, name)
        in_order, out_of_order = [await peer.take() for peer in peers]
        peers[0].ack(in_order[:1])
        peers[1].ack(out_of_order[1:2])
        assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [19, 19, 20]
        await broker.pushing.flush()
        assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [19, 19, 20]
        asked: list[int] = []
        is_done = Leases.is_done

        def note(leases: Leases, offset: int) -> bool:
            asked.append(offset)
            return is_done(leases, offset)

        monkeypatch.setattr(Leases, "is_done", note)
        assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [19, 19, 20]
        assert asked == [0, 1, 2], "only the one that acknowledged the second entry first"
        for peer in peers:
            await peer.channel.close()
