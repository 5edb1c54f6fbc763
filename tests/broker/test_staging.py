"""Staging: what many writers leave under a key is seen all at once, once, or never."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest
from crc32c import crc32c

from quackmq.broker import Broker, CommittedStage, StagedBatch, StageDescription
from quackmq.broker import limits as broker_limits
from quackmq.broker.staging.stage import digest_summaries
from quackmq.broker.topics import HIDDEN_PREFIX
from quackmq.errors import (
    StageConflict,
    StoreReadOnly,
    UnknownStage,
    UnknownTopic,
)
from quackmq.model.topic import Append, AppendResult, Cursor, StatePut
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from tests.broker.flock import Pond
from tests.broker.stages import KEY, OTHER_TOPIC, stage, staged, topics
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    SlowStore,
    get_all,
    key_of,
    open_broker,
    publish,
    values_of,
)
from tests.broker.transacting import committed_values
from tests.kit.limits import home_of
from tests.kit.support import START_MS, Clock, batch_of
from tests.kit.waiting import until


async def stable(broker: Broker) -> int:
    return (await broker.offsets(CALLER, key_of(broker.topic(TOPIC)))).stable


async def hidden(pond: Pond) -> list[str]:
    async with pond.open_store() as store:
        return [name for name in await store.topics() if name.startswith(HIDDEN_PREFIX)]


# --- staging and committing ------------------------------------------------------------------


async def test_what_is_staged_is_seen_by_nobody_and_holds_up_nobody(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await stage(broker, b"a", b"b")
        await publish(broker, b"plain")
        assert await committed_values(broker) == [b"plain"]
        assert await stable(broker) == 1
        assert set(broker.topics()) == {TOPIC, OTHER_TOPIC}


async def test_a_commit_shows_all_parts_at_once(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        summaries = [
            await broker.staging.stage(
                CALLER,
                KEY,
                part,
                0,
                [
                    staged(broker, part.encode() + b"1"),
                    staged(broker, part.encode() + b"2", topic=OTHER_TOPIC, partition=1),
                    staged(broker, part.encode() + b"3", part.encode() + b"4"),
                ],
            )
            for part in ("a", "b")
        ]
        committed = await broker.staging.commit(CALLER, KEY, summaries)
        assert committed == CommittedStage(
            digest_summaries(summaries), 8, pond.clock.now_ms, repeated=False
        )
        seen = [b"a1", b"a3", b"a4", b"b1", b"b3", b"b4"]
        assert await committed_values(broker) == seen
        assert await committed_values(broker, OTHER_TOPIC, 1) == [b"a2", b"b2"]
        assert values_of(await get_all(broker)) == seen
        assert broker.staging.all(CALLER) == []
    assert await hidden(pond) == []


async def test_parts_that_the_commit_does_not_name_come_to_nothing(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        first = await stage(broker, b"first try", part="task 1, attempt 1")
        await stage(broker, b"given up", part="task 2, attempt 1")
        second = await stage(broker, b"second try", part="task 2, attempt 2")
        await broker.staging.commit(CALLER, KEY, [second, first])
        assert await committed_values(broker) == [b"second try", b"first try"]


async def test_without_summaries_all_parts_are_committed(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await stage(broker, b"a", part="a")
        await stage(broker, b"b", part="b")
        await stage(broker, b"c", part="a", number=1)
        assert (await broker.staging.commit(CALLER, KEY)).records == 3
        assert await committed_values(broker) == [b"a", b"c", b"b"]
        assert (await broker.staging.commit(CALLER, KEY)).repeated


async def test_a_large_stage_is_copied_piece_by_piece(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "STAGE_COPY_BYTES", 500)
    async with pond.open() as broker:
        await topics(broker)
        values = [b"%d" % number for number in range(60)]
        for number in range(0, 60, 3):
            batches = [staged(broker, value) for value in values[number : number + 3]]
            await broker.staging.stage(CALLER, KEY, "a", number // 3, batches)
        await broker.staging.commit(CALLER, KEY)
        assert await committed_values(broker) == values


async def test_a_stage_of_more_records_than_there_are_sequence_numbers_is_committed(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are claimed by headers alone: nobody here opens the batches."""
    many = 2**29
    for name in ("RECORDS_PER_BATCH", "PUBLISHED_RECORDS_PER_BATCH"):
        monkeypatch.setattr(home_of(name), name, many)
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        batches = [StagedBatch(key_of(topic), _claiming(many)) for _ in range(6)]
        await broker.staging.stage(CALLER, KEY, "a", 0, batches)
        committed = await broker.staging.commit(CALLER, KEY)
        assert committed.records == 6 * many > 2**31
        assert await stable(broker) == 6 * many + 1, "and the marker"


def _claiming(records: int) -> Batch:
    data = bytearray(batch_of(b"x").view)
    data[23:27] = (records - 1).to_bytes(4, "big")
    data[57:61] = records.to_bytes(4, "big")
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return Batch.parse(bytes(data))


async def test_batches_are_taken_whatever_their_producer_and_compression(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        key = key_of(broker.topic(TOPIC))
        numbered = batch_of(b"numbered", producer_id=5, producer_epoch=2, base_sequence=70)
        records = [Record(0, START_MS, b"key", b"packed" * 100, (("h", b"x"),))]
        packed = Batch.parse(codec.encode(records, compression="zstd"))
        batches = [StagedBatch(key, numbered), StagedBatch(key, packed), StagedBatch(key, numbered)]
        await broker.staging.stage(CALLER, KEY, "a", 0, batches)
        await broker.staging.commit(CALLER, KEY)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        messages = await get_all(broker)
        assert values_of(messages) == [b"numbered", b"packed" * 100, b"numbered"]
        assert messages[1].record.headers == (("h", b"x"),)
        assert messages[1].record.key == b"key"


async def test_commits_at_the_same_time_do_not_mix(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        keys = [f"stage {number}" for number in range(10)]
        for key in keys:
            await stage(broker, key.encode(), key=key)
            await stage(broker, key.encode(), key=key, part="b", at=1)
        await asyncio.gather(*(broker.staging.commit(CALLER, key) for key in keys))
        for partition in range(2):
            seen = await committed_values(broker, partition=partition)
            assert sorted(seen) == sorted(key.encode() for key in keys)
        producers = await broker.producers(CALLER, key_of(broker.topic(TOPIC)))
        assert len(producers) <= broker_limits.STAGE_COMMITS_AT_ONCE, "they are used again"


# --- once ------------------------------------------------------------------------------------


async def test_a_repeated_commit_is_answered_like_the_first(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        first = await broker.staging.commit(CALLER, KEY, [summary])
        again = await broker.staging.commit(CALLER, KEY, [summary])
        assert again == first._replace(repeated=True)
    async with pond.open() as broker:
        again = await broker.staging.commit(CALLER, KEY, [summary])
        assert again == first._replace(repeated=True)
        assert broker.staging.describe(CALLER, KEY) == first
        assert await committed_values(broker) == [b"a"]


async def test_a_key_is_not_committed_with_other_contents(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        other = await stage(broker, b"b", key="other")
        await broker.staging.commit(CALLER, KEY, [summary])
        for wrong in ([other], [], [summary, other]):
            with pytest.raises(StageConflict):
                await broker.staging.commit(CALLER, KEY, wrong)
        with pytest.raises(StageConflict):
            await broker.staging.commit(CALLER, KEY, [summary], contents_digest="something else")
        with pytest.raises(StageConflict):
            await stage(broker, b"late", part="late")
        with pytest.raises(StageConflict):
            await broker.staging.abort(CALLER, KEY)
        assert await committed_values(broker) == [b"a"]


async def test_contents_that_are_named_may_be_staged_anew(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        first = await stage(broker, b"a", part="attempt 1")
        await broker.staging.commit(CALLER, KEY, [first], contents_digest="offsets 0 to 7")
        # Whoever repeats a job knows nothing of the parts that the first try staged.
        again = await broker.staging.commit(
            CALLER, KEY, [first._replace(part="attempt 2")], contents_digest="offsets 0 to 7"
        )
        assert again.repeated
        with pytest.raises(StageConflict):
            await broker.staging.commit(CALLER, KEY, [first], contents_digest="offsets 0 to 9")


async def test_nothing_can_be_committed_too(pond: Pond) -> None:
    async with pond.open() as broker:
        assert await broker.staging.commit(CALLER, KEY, []) == CommittedStage(
            digest_summaries([]), 0, pond.clock.now_ms
        )
        assert (await broker.staging.commit(CALLER, KEY, [])).repeated
        with pytest.raises(UnknownStage):
            await broker.staging.commit(CALLER, "another")


async def test_a_call_that_is_made_again_is_answered_like_the_first(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        first = await stage(broker, b"a")
        assert await stage(broker, b"a") == first
        both = await asyncio.gather(*(stage(broker, b"b", number=1) for _ in range(2)))
        assert both[0] == both[1]
        with pytest.raises(StageConflict):
            await stage(broker, b"other", number=1)
        with pytest.raises(StageConflict):
            await stage(broker, b"d", number=3)
    async with pond.open() as broker:
        assert await stage(broker, b"b", number=1) == both[0]
        await stage(broker, b"c", number=2)
        await broker.staging.commit(CALLER, KEY)
        assert await committed_values(broker) == [b"a", b"b", b"c"]


async def test_a_commit_names_parts_as_they_are(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        before = await stage(broker, b"a")
        now = await stage(broker, b"b", number=1)
        for wrong in (
            [before],
            [now._replace(digest="0")],
            [now._replace(part="nobody")],
            [now, now],
        ):
            with pytest.raises(StageConflict):
                await broker.staging.commit(CALLER, KEY, wrong)
        await broker.staging.commit(CALLER, KEY, [now])
        assert await committed_values(broker) == [b"a", b"b"]


# --- never -----------------------------------------------------------------------------------


async def test_an_aborted_stage_leaves_nothing_and_its_key_is_free(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await stage(broker, b"gone")
        assert await broker.staging.abort(CALLER, KEY)
        assert not await broker.staging.abort(CALLER, KEY)
        with pytest.raises(UnknownStage):
            broker.staging.describe(CALLER, KEY)
        with pytest.raises(UnknownStage):
            await broker.staging.commit(CALLER, KEY)
        await stage(broker, b"kept")
        await broker.staging.commit(CALLER, KEY)
        assert await committed_values(broker) == [b"kept"]
    assert await hidden(pond) == []


async def test_a_stage_that_is_left_goes_by_itself(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await stage(broker, b"left", key="left")
        pond.clock.advance(broker_limits.STAGE_EXPIRY_MS // 2)
        await stage(broker, b"a")
    async with pond.open() as broker:
        pond.clock.advance(broker_limits.STAGE_EXPIRY_MS // 2)
        await broker.clean()
        assert [each.key for each in broker.staging.all(CALLER)] == [KEY]
        await broker.staging.commit(CALLER, KEY)
        pond.clock.advance(broker_limits.STAGE_REMEMBERED_MS)
        await broker.clean()
        with pytest.raises(UnknownStage):
            broker.staging.describe(CALLER, KEY)
    assert await hidden(pond) == []


# --- restarts and failures -------------------------------------------------------------------


async def test_a_stage_survives_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        summaries = [
            await stage(broker, b"a", b"b"),
            await stage(broker, b"c", part="b", at=1),
        ]
        before = broker.staging.describe(CALLER, KEY)
        assert isinstance(before, StageDescription)
        assert before.parts == tuple(summaries)
        assert before.batches == 2
    async with pond.open() as broker:
        assert broker.staging.describe(CALLER, KEY) == before
        assert set(broker.topics()) == {TOPIC, OTHER_TOPIC}
        await broker.staging.commit(CALLER, KEY, summaries)
        assert await committed_values(broker) == [b"a", b"b"]
        assert await committed_values(broker, partition=1) == [b"c"]


async def test_a_crash_finds_a_stage_as_it_was_or_committed(tmp_path: Path) -> None:
    directory = tmp_path / "pond"
    async with Pond("local", directory, Clock()).open() as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        shutil.copytree(directory, tmp_path / "before")
        await broker.staging.commit(CALLER, KEY, [summary])
        shutil.copytree(directory, tmp_path / "after")
    for name in ("before", "after"):
        async with Pond("local", tmp_path / name, Clock()).open() as broker:
            committed = await broker.staging.commit(CALLER, KEY, [summary])
            assert committed.repeated is (name == "after")
            assert await committed_values(broker) == [b"a"]


async def test_a_crash_in_the_middle_of_a_commit_leaves_the_stage_as_it_was() -> None:
    store = HaltingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        store.halts_at_states = True
        with pytest.raises(StoreReadOnly):
            await broker.staging.commit(CALLER, KEY, [summary])
        assert await stable(broker) == 0, "the copy is there, its marker is not"
    store.halts_at_states = store.is_halted = False
    async with open_broker(store) as broker:
        assert await stable(broker) == 2
        assert await committed_values(broker) == []
        assert not (await broker.staging.commit(CALLER, KEY, [summary])).repeated
        assert await committed_values(broker) == [b"a"]


class HaltingStore(FailingStore):
    """Fails for good at the append that would end a transaction."""

    halts_at_states = False
    is_halted = False

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        self.is_halted = self.is_halted or (self.halts_at_states and bool(states))
        if self.is_halted:
            raise StoreReadOnly("the disk is full")
        return super().append(appends, cursors, states)


async def test_a_commit_that_fails_is_undone_and_can_be_asked_for_again() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        gone = [staged(broker, b"b", topic=OTHER_TOPIC)]
        await broker.staging.stage(CALLER, KEY, "b", 0, gone)
        await broker.delete_topic(CALLER, OTHER_TOPIC)
        with pytest.raises(UnknownTopic):
            await broker.staging.commit(CALLER, KEY)
        await broker.staging.commit(CALLER, KEY, [summary])
        assert await committed_values(broker) == [b"a"]


async def test_a_topic_that_goes_during_a_commit_makes_it_fail_or_goes_with_its_share(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "STAGE_COPY_BYTES", 200)
    async with pond.open() as broker:
        await topics(broker)
        for turn in range(5):
            key = f"stage {turn}"
            batches = [
                staged(broker, b"%d" % turn, topic=topic)
                for _ in range(5)
                for topic in (TOPIC, OTHER_TOPIC)
            ]
            await broker.staging.stage(CALLER, key, "a", 0, batches)
            before = await committed_values(broker)
            committing = asyncio.ensure_future(broker.staging.commit(CALLER, key))
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            await broker.delete_topic(CALLER, OTHER_TOPIC)
            await asyncio.wait([committing])
            failed = isinstance(committing.exception(), UnknownTopic)
            shown = [] if failed else [b"%d" % turn] * 5
            assert await committed_values(broker) == before + shown
            offsets = await broker.offsets(CALLER, key_of(broker.topic(TOPIC)))
            assert offsets.stable == offsets.next
            await broker.create_topic(CALLER, OTHER_TOPIC)


async def test_nothing_is_added_to_a_stage_that_is_being_committed() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        store.released.clear()
        appends = store.appends
        committing = asyncio.ensure_future(broker.staging.commit(CALLER, KEY, [summary]))
        await until(lambda: store.appends > appends)
        late = asyncio.ensure_future(stage(broker, b"late", part="late"))
        store.released.set()
        await committing
        with pytest.raises(StageConflict):
            await late
        assert await committed_values(broker) == [b"a"]
