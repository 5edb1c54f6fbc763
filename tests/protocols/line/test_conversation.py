"""The model's messages and their answers, over every channel; who is connected, and the end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from quackmq.broker import BrokerSettings
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.codec.messages import Role
from quackmq.protocols.line.records import ConnectionRecord, End
from quackmq.protocols.line.settings import LineSettings
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import TESTER, Peer, Served, served

CHANNELS = ("tcp", "unix", "pipes")


class OnChannel:
    """A way to a listener."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._has_pipes = kind == "pipes"
        self.where: tuple[str, int] | str | None = None
        if not self._has_pipes:
            self.where = str(directory / "quack") if kind == "unix" else ("127.0.0.1", 0)

    async def peer(self, running: Served, name: str) -> Peer:
        return await (running.piped(name) if self._has_pipes else running.peer())


# --- Q2, Q4, Q9, Q10, Q11 ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHANNELS)
@on_both_loops
async def test_q2_q4_q9_q10_q11_the_whole_protocol_goes_as_in_the_model(
    kind: str, tmp_path: Path
) -> None:
    channel = OnChannel(kind, tmp_path)
    async with served(where=channel.where) as running:
        donald = await channel.peer(running, "to donald")
        daisy = await channel.peer(running, "to daisy")
        for role, name, peer in (("pub", "donald", donald), ("sub", "daisy", daisy)):
            assert await peer.ask(f"{role} {name} connect") == "accept"
            assert await peer.ask("end") == "accept"
            assert await peer.ask(f"{role} {name} topic 1") == "accept"
            assert await peer.ask(f"{role} {name} topic 2") == "accept"
            assert await peer.ask("end") == "accept"
        records = running.listener.records()
        assert [(each.role, each.id, each.topics) for each in records] == [
            (Role.PUB, "donald", ("1", "2")),
            (Role.SUB, "daisy", ("1", "2")),
        ]
        assert await donald.ask("topic 1 [Ducks win [again]]") == "successful"
        assert await daisy.hears() == "topic 1 [Ducks win [again]]"
        assert await donald.ask(r"topic 2 [two\nlines]") == "successful"
        daisy.say("successful")
        assert await daisy.hears() == r"topic 2 [two\nlines]"
        daisy.say("successful")
        assert await running.values("2") == [b"two\nlines"]
        for peer in (donald, daisy):
            assert await peer.ask("terminate") == "terminate"
            assert await peer.hears() == "", "and the channel is closed"
        assert running.listener.records() == []
        ended = running.listener.ended_connections()
        assert [(each.record.id, each.end) for each in ended] == [
            ("donald", End.TERMINATED),
            ("daisy", End.TERMINATED),
        ]
        assert [each.record.entries for each in ended] == [2, 2]


@on_both_loops
async def test_q2_a_record_says_who_it_is_by_which_channel_and_of_which_topics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "quackmq.protocols.line")
    async with served() as running:
        peer = await running.piped("pipe 7")
        assert running.listener.records() == []
        assert await peer.ask("sub 7 connect") == "accept"
        assert running.listener.records() == [ConnectionRecord(Role.SUB, "7", "pipe 7")]
        await peer.ask("end")
        for line in ("sub 7 topic b", "sub 7 topic a", "sub 7 topic b", "end"):
            assert await peer.ask(line) == "accept"
        (record,) = running.listener.records()
        assert record.topics == ("b", "a")
        assert "sub 7 on pipe 7, topics: b, a connected" in caplog.messages
        assert await peer.ask("terminate") == "terminate"
        assert "sub 7 on pipe 7, topics: b, a ended: terminated" in caplog.messages


async def test_the_log_says_why_the_first_bad_message_of_a_connection_was_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "quackmq.protocols.line")
    async with served() as running:
        shouting = await running.peer()
        shouting.say("PUB 7 connect")
        assert [await shouting.hears() for _ in range(2)] == ["reject", "terminate"]
        assert "not with b'PUB 7 connect" in caplog.text
        peer = await running.piped("pipe 7")
        for line in ("pub 7 connect", "end", "pub 7 topic a", "end"):
            assert await peer.ask(line) == "accept"
        for entry in (r"topic a [a\tb]", r"topic a [a\qb]"):
            assert await peer.ask(entry) == "reject"
        (said,) = [message for message in caplog.messages if " rejected: " in message]
        assert said.startswith("pub 7 on pipe 7, topics: a rejected: ") and r"\t" in said


@on_both_loops
async def test_a_message_may_come_byte_by_byte_or_all_at_once() -> None:
    lines = b"pub 7 connect\nend\npub 7 topic 1\nend\ntopic 1 [a]\nquack\ntopic 1 [b]\nterminate\n"
    async with served() as running:
        for pieces in ([lines], [lines[at : at + 1] for at in range(len(lines))]):
            peer = await running.peer()
            for piece in pieces:
                peer.write(piece)
                await peer.writer.drain()
                await asyncio.sleep(0)
            answers = [await peer.hears() for _ in range(9)]
            assert answers == [
                *["accept"] * 4,
                "successful",
                "reject",
                "successful",
                "terminate",
                "",
            ]
        assert await running.values("1") == [b"a", b"b", b"a", b"b"]


@on_both_loops
async def test_who_closes_its_side_is_answered_all_that_it_asked() -> None:
    async with served() as running:
        peer = await running.peer()
        entries = [f"topic 1 [{number}]" for number in range(500)]
        peer.say("pub 7 connect", "end", "pub 7 topic 1", "end", *entries)
        peer.writer.write_eof()
        for _ in range(4):
            assert await peer.hears() == "accept"
        for _ in entries:
            assert await peer.hears() == "successful"
        assert await peer.is_hung_up()
        assert len(await running.values("1")) == 500


# --- what is refused -------------------------------------------------------------------------


@on_both_loops
async def test_what_is_out_of_order_unknown_or_too_long_is_rejected_and_changes_nothing() -> None:
    async with served(LineSettings(entry_bytes=16)) as running:
        peer = await running.peer()
        for line, answer in [
            ("pub 7 connect", "accept"),
            ("hello", "reject"),
            ("topic 1 [too early]", "reject"),
            ("pub 7 connect", "reject"),
            ("pub 7 topic 1", "reject"),
            ("end", "accept"),
            ("sub 7 topic 1", "reject"),
            ("pub 8 topic 1", "reject"),
            ("pub 7 topic no/such/name", "reject"),
            ("pub 7 topic 1", "accept"),
            ("end", "accept"),
            ("topic 2 [not announced]", "reject"),
            ("topic 1 [seventeen bytes!!]", "reject"),
            ("topic 1 [" + "x" * 5_000 + "]", "reject"),
            ("topic 1 [sixteen bytes!!]", "successful"),
            ("successful", "reject"),
            ("terminate", "terminate"),
        ]:
            peer.reason = ""
            assert await peer.ask(line) == answer, line
            assert bool(peer.reason) == (answer == "reject"), line
        assert await running.values("1") == [b"sixteen bytes!!"]


@on_both_loops
async def test_reject_is_followed_by_the_code_and_the_words_of_the_error_q2_q4_q9() -> None:
    async with served(LineSettings(entry_bytes=16)) as running:
        await running.topic("full", Policy(live_entries=1, when_full=WhenFull.REFUSE))
        donald = await running.publisher("donald", "full")
        assert await donald.ask("topic full [a]") == "successful"
        stranger = await running.peer()
        await stranger.ask("sub 7 connect")
        await stranger.ask("end")
        for peer, line, reason in [
            (donald, "topic full [b]", "topic_full: topic full, partition 0 is full: "),
            (donald, "topic other [b]", "invalid_request: topic other was not announced"),
            (donald, "topic full [" + "x" * 17 + "]", "record_too_large: an entry of 17 bytes"),
            (donald, "quack", "protocol_error: 'quack' is no message"),
            (stranger, "sub 8 topic 1", "invalid_request: this connection is that of 7, not of 8"),
            (stranger, "sub 7 topic a/b", "illegal_topic_name: "),
        ]:
            assert await peer.ask(line) == "reject"
            assert peer.reason.startswith(reason), line
        shouting = await running.peer()
        assert await shouting.ask("PUB 7 connect") == "reject"
        assert shouting.reason == "protocol_error: begin with pub ID connect or sub ID connect"


@on_both_loops
async def test_a_first_message_that_is_none_is_rejected_and_ends_the_connection() -> None:
    async with served() as running:
        for line in ("end", "hello", "topic 1 [too early]", "pub 7 topic 1"):
            peer = await running.peer()
            peer.say(line, "pub 7 connect", "end", "pub 7 topic 1", "end", "topic 1 [a]")
            assert [await peer.hears() for _ in range(3)] == ["reject", "terminate", ""], line
        assert not running.broker.topics()


@on_both_loops
async def test_an_answer_to_nothing_is_rejected_and_the_next_entry_comes() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.ask("successful") == "reject"
        await running.put("1", b"a")
        assert await daisy.hears() == "topic 1 [a]"
        assert await daisy.ask("quack") == "reject"
        daisy.say("successful")
        await running.put("1", b"b")
        assert await daisy.hears() == "topic 1 [b]"


@on_both_loops
async def test_a_name_that_is_used_in_another_way_is_rejected() -> None:
    async with served() as running:
        await running.broker.subscribe(TESTER, "daisy", "1")
        peer = await running.peer()
        assert await peer.ask("sub daisy connect") == "accept"
        assert await peer.ask("end") == "accept"
        assert await peer.ask("sub daisy topic 1") == "reject"
        assert peer.reason.startswith("name_in_other_mode: the name daisy has a subscription by")
        assert await peer.ask("sub daisy topic 2") == "accept", "a mode holds for one topic"


@on_both_loops
async def test_topics_that_may_not_come_to_life_are_rejected() -> None:
    settings = BrokerSettings(auto_create_topics=False)
    async with served(broker_settings=settings) as running:
        await running.topic("there")
        for role in ("pub", "sub"):
            peer = await running.peer()
            await peer.ask(f"{role} 7 connect")
            await peer.ask("end")
            assert await peer.ask(f"{role} 7 topic missing") == "reject"
            assert await peer.ask(f"{role} 7 topic there") == "accept"
            assert await peer.ask("end") == "accept"


# --- the end ---------------------------------------------------------------------------------


@on_both_loops
async def test_q11_a_closing_broker_says_terminate_to_everybody() -> None:
    async with served() as running:
        peers = [
            await running.peer(),
            await running.piped("pipes"),
            await running.publisher("donald", "1"),
            await running.subscriber("daisy", "1"),
        ]
        closing = asyncio.create_task(running.listener.close())
        for peer in peers:
            assert await peer.hears() == "terminate"
            assert await peer.hears() == ""
            await peer.close()
        await soon(closing)
        assert {each.end for each in running.listener.ended_connections()} == {End.CLOSED}


@on_both_loops
async def test_a_closing_broker_waits_for_the_answer_to_an_entry_that_is_out() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_DRAIN_MS", 60_000)  # machines can be busy
        async with served() as running:
            daisy = await running.subscriber("daisy", "1")
            await running.put("1", b"a", b"b")
            assert await daisy.hears() == "topic 1 [a]"
            closing = asyncio.create_task(running.listener.close())
            await until(lambda: running.listener.is_closing)
            assert await daisy.ask("successful") == "terminate"
            await daisy.close()
            await soon(closing)
            (ended,) = running.listener.ended_connections()
            assert ended.record.entries == 1


@on_both_loops
async def test_the_broker_lists_the_subscription_as_any_other() -> None:
    async with served() as running:
        await running.subscriber("daisy", "1")
        (found,) = await running.broker.subscriptions(TESTER, name="daisy")
        assert (found.topic_name, found.mode) == ("1", "pushed")
