"""Series of stages: every turn counts once, and the last one is remembered for long."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from quackmq.broker import Broker, CommittedTurn, PartSummary, Turn
from quackmq.broker import limits as broker_limits
from quackmq.broker.staging.series import SeriesRegistry
from quackmq.errors import (
    DamagedStore,
    InvalidRequest,
    LimitReached,
    StageCommitted,
    StageConflict,
    TurnOutdated,
    UnknownStage,
)
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond
from tests.broker.stages import OTHER_TOPIC, staged, topics
from tests.broker.support import CALLER, TOPIC, open_broker
from tests.broker.transacting import committed_values
from tests.kit.support import Clock

SERIES = "query"


async def write(broker: Broker, value: bytes, turn: int, run: str = "a") -> PartSummary:
    key, part = f"{turn}/{run}", uuid4().hex
    batches = [staged(broker, value)]
    return await broker.staging.stage(CALLER, key, part, 0, batches, Turn(SERIES, turn))


async def commit(broker: Broker, turn: int, *summaries: PartSummary, run: str = "a") -> bool:
    """Whether it was made before."""
    committed = await broker.staging.commit(
        CALLER, f"{turn}/{run}", summaries, turn=Turn(SERIES, turn)
    )
    return committed.repeated


async def test_a_turn_counts_once_whoever_stages_and_commits_it(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        first = await write(broker, b"first", 7)
        other = await write(broker, b"other", 7, run="b")
        assert not await commit(broker, 7, first)
        assert await commit(broker, 7, first)
        assert await commit(broker, 7, other, run="b")
        with pytest.raises(StageCommitted):
            await write(broker, b"late", 7, run="c")
        assert await committed_values(broker) == [b"first"]
        assert broker.staging.all(CALLER) == [], "nothing is left of what came too late"
    async with pond.open() as broker:
        assert await commit(broker, 7, first)
        with pytest.raises(StageCommitted):
            await write(broker, b"late", 7)
        assert broker.staging.series(CALLER)[SERIES].number == 7
        assert await committed_values(broker) == [b"first"]


async def test_a_turn_before_the_last_one_is_refused_and_some_may_be_left_out(
    pond: Pond,
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        for turn in (0, 1, 5):
            assert not await commit(broker, turn, await write(broker, b"%d" % turn, turn))
    async with pond.open() as broker:
        for turn in range(5):
            with pytest.raises(TurnOutdated, match=f"turn {turn} of .* turn 5 was committed"):
                await write(broker, b"again", turn)
            with pytest.raises(TurnOutdated):
                await commit(broker, turn)
        with pytest.raises(StageCommitted):
            await write(broker, b"again", 5)
        assert await commit(broker, 5)
        assert await committed_values(broker) == [b"0", b"1", b"5"]
        assert len(broker.staging.series(CALLER)) == 1


async def test_a_stage_that_a_later_turn_has_overtaken_cannot_be_committed(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        late = await write(broker, b"late", 3)
        await commit(broker, 4, await write(broker, b"4", 4))
        with pytest.raises(TurnOutdated):
            await commit(broker, 3, late)
        assert broker.staging.all(CALLER) == []
        assert await committed_values(broker) == [b"4"]


async def test_a_series_tells_the_topics_of_its_last_turn(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        turn = Turn(SERIES, 0)
        batches = [
            staged(broker, b"a", topic=OTHER_TOPIC),
            staged(broker, b"b"),
            staged(broker, b"c", partition=1),
        ]
        summary = await broker.staging.stage(CALLER, "k", "p", 0, batches, turn)
        await broker.staging.commit(CALLER, "k", [summary], turn=turn)
    async with pond.open() as broker:
        last = broker.staging.series(CALLER)[SERIES]
        assert (last.records, last.topics) == (3, tuple(sorted((TOPIC, OTHER_TOPIC))))
        await commit(broker, 1)
        assert broker.staging.series(CALLER)[SERIES].topics == ()


async def test_two_that_commit_a_turn_at_once_add_it_once(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summaries = {run: await write(broker, run.encode(), 0, run) for run in "abc"}
        repeated = await asyncio.gather(
            *(commit(broker, 0, summary, run=run) for run, summary in summaries.items())
        )
        assert sorted(repeated) == [False, True, True]
        assert len(await committed_values(broker)) == 1


async def test_a_turn_with_nothing_in_it_is_committed_too(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        assert not await commit(broker, 3)
        assert await commit(broker, 3)
        with pytest.raises(UnknownStage):
            await broker.staging.commit(CALLER, "4/a", turn=Turn(SERIES, 4))


async def test_stages_that_writers_left_make_room_for_new_ones(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        for run in range(broker_limits.STAGES_PER_SERIES + 2):
            summary = await write(broker, b"%d" % run, 0, str(run))
            pond.clock.advance(1)
        runs = sorted(each.key for each in broker.staging.all(CALLER))
        assert runs == ["0/2", "0/3", "0/4", "0/5"]
        with pytest.raises(UnknownStage):
            await broker.staging.commit(CALLER, "0/0", turn=Turn(SERIES, 0))
        assert not await commit(broker, 0, summary, run="5")
        assert broker.staging.all(CALLER) == []
        assert await committed_values(broker) == [b"5"]


async def test_a_stage_of_a_series_survives_a_restart_as_what_it_is(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summary = await write(broker, b"x", 2)
    async with pond.open() as broker:
        (stage,) = broker.staging.all(CALLER)
        assert stage.turn == Turn(SERIES, 2)
        with pytest.raises(StageConflict):
            await broker.staging.commit(CALLER, "2/a", [summary])
        with pytest.raises(StageConflict):
            await broker.staging.commit(CALLER, "2/a", [summary], turn=Turn(SERIES, 3))
        with pytest.raises(StageConflict):
            await broker.staging.stage(CALLER, "2/a", "p", 0, [staged(broker, b"y")])
        assert not await commit(broker, 2, summary)
        assert await committed_values(broker) == [b"x"]


async def test_a_series_is_remembered_longer_than_a_key_and_forgotten_when_told(
    pond: Pond,
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summary = await write(broker, b"x", 0)
        await commit(broker, 0, summary)
        pond.clock.advance(broker_limits.STAGE_SERIES_REMEMBERED_MS - 1)
        await broker.clean()
        assert await commit(broker, 0, summary)
        pond.clock.advance(broker_limits.STAGE_EXPIRY_INTERVAL_MS)
        await broker.clean()
        assert broker.staging.series(CALLER) == {}
        await commit(broker, 0, await write(broker, b"y", 0))
        assert await broker.staging.forget_series(CALLER, SERIES)
        assert not await broker.staging.forget_series(CALLER, SERIES)
    async with pond.open() as broker:
        assert broker.staging.series(CALLER) == {}
        assert not await commit(broker, 0, await write(broker, b"z", 0))


async def test_series_have_a_bound_and_turns_a_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "STAGE_SERIES", 1)
    async with open_broker() as broker:
        await topics(broker)
        await commit(broker, 0, await write(broker, b"x", 0))
        for turn, error in (
            (Turn("another", 0), LimitReached),
            (Turn(SERIES, -1), InvalidRequest),
            (Turn("", 0), InvalidRequest),
        ):
            with pytest.raises(error):
                await broker.staging.stage(CALLER, "k", "p", 0, [staged(broker, b"x")], turn)
            with pytest.raises(error):
                await broker.staging.commit(CALLER, "k", [], turn=turn)
        assert not await commit(broker, 1, await write(broker, b"y", 1))


async def test_what_is_kept_of_a_series_comes_back_and_damage_is_named() -> None:
    store = MemoryStore(Clock())
    book, turn = SeriesRegistry(store), Turn("ein Name/1", 17)
    committed = CommittedTurn(17, "contents", 3, 5, ("a", "b"))
    await store.put_state(*book.make_put(turn, committed))
    book.set_last(turn, committed)
    again = SeriesRegistry(store)
    await again.load()
    assert again.all() == book.all() == {"ein Name/1": committed}
    older = b'{"number": 1, "contents": "c", "records": 2, "committed_ms": 3}'
    await store.put_state("stage-series/older", older, 0)
    await again.load()
    assert again.last("older") == CommittedTurn(1, "c", 2, 3, None), "no topics were noted then"
    for damage in (b"no json", b"[]", b'{"number": "x"}'):
        version = (await store.state("stage-series/bad")).version
        await store.put_state("stage-series/bad", damage, version)
        with pytest.raises(DamagedStore):
            await SeriesRegistry(store).load()
