"""Peers that mean harm, or are just slow: half a line, nothing read, too many; and socket files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.errors import InvalidSetting
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.records import End
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from tests.kit import effort
from tests.kit.waiting import until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import Served, SlowStore, on_pipes, served


async def assert_others_are_served(running: Served) -> None:
    peer = await running.publisher("honest", "others")
    assert await peer.ask("topic others [x]") == "successful"
    await peer.close()


# --- bytes -----------------------------------------------------------------------------------


@on_both_loops
async def test_garbage_is_rejected_or_hung_up_on_and_harms_nobody() -> None:
    async with served() as running:
        chance = random.Random(5)
        for number in range(40):
            peer = await running.peer()
            if number % 2:
                await peer.subscribes(f"d{number}", "1")
            peer.write(chance.randbytes(chance.randrange(1, 2_000)))
            peer.writer.write_eof()
            assert await peer.is_hung_up()
        await assert_others_are_served(running)
        await until(lambda: not running.listener.records())


lines = st.sampled_from(
    [
        *["pub 7 connect", "sub 7 connect", "end", "pub 7 topic 1", "sub 7 topic 1", "successful"],
        *["topic 1 [a]", "retry", "accept", "quack", "", "pub 7 topic /", "topic 2 [b]"],
    ]
)


@settings(max_examples=effort.of(60), deadline=None)
@given(st.sampled_from(["pub", "sub"]), st.lists(lines, max_size=25), st.integers(1, 40))
def test_any_messages_are_answered_and_end_well(
    role: str, more: list[str], piece_bytes: int
) -> None:
    """However they are cut; each but `successful` gets one answer, entries aside."""
    said = [f"{role} 7 connect", *more]

    async def converse() -> None:
        async with served() as running:
            peer = await running.piped("pipes")
            data = b"".join(line.encode() + b"\n" for line in [*said, "terminate"])
            for at in range(0, len(data), piece_bytes):
                peer.write(data[at : at + piece_bytes])
                await asyncio.sleep(0)
            heard = []
            while line := await peer.hears():
                heard.append(line)
            assert heard[-1] == "terminate"
            assert {*heard} <= {"accept", "reject", "successful", "terminate", "topic 1 [a]"}
            assert len([line for line in heard if line != "topic 1 [a]"]) >= len(
                [line for line in said if line != "successful"]
            )

    asyncio.run(converse())


@on_both_loops
async def test_so_many_bad_messages_in_a_row_end_the_connection() -> None:
    async with served() as running:
        peer = await running.peer()
        peer.write(b"pub 7 connect\n" + b"quack\n" * (line_limits.LINE_REFUSALS + 1))
        heard = [await peer.hears() for _ in range(line_limits.LINE_REFUSALS + 3)]
        assert heard == ["accept", *["reject"] * line_limits.LINE_REFUSALS, "terminate", ""]
        await assert_others_are_served(running)


@on_both_loops
async def test_a_line_that_never_ends_takes_no_memory_and_is_hung_up_on() -> None:
    async with served() as running:
        peer = await running.peer()
        peer.write(b"x" * 3 * line_limits.LINE_LEFT_OUT_BYTES)
        assert [await peer.hears() for _ in range(3)] == ["reject", "terminate", ""]
        await assert_others_are_served(running)


# --- silence ---------------------------------------------------------------------------------


@on_both_loops
async def test_half_a_line_then_silence_is_hung_up_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_WAIT_MS", 20)
        patch.setattr(line_limits, "LINE_SWEEP_MS", 5)
        async with served() as running:
            silent = await running.publisher("silent", "1")
            fresh = await running.peer()
            idle = await running.publisher("idle", "1")
            for peer in (silent, fresh):
                peer.write(b"topic 1 [a")
            assert await silent.is_hung_up() and await fresh.is_hung_up()
            assert await idle.ask("topic 1 [b]") == "successful", "who says nothing may"
            assert [each.end for each in running.listener.ended_connections()] == [End.DEAD]


@on_both_loops
async def test_who_does_not_say_what_it_wants_is_hung_up_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_HANDSHAKE_MS", 20)
        patch.setattr(line_limits, "LINE_SWEEP_MS", 5)
        async with served() as running:
            mute = await running.peer()
            undecided = await running.peer()
            undecided.say("sub 7 connect")
            assert await mute.is_hung_up() and await undecided.is_hung_up()


@on_both_loops
async def test_a_peer_that_never_reads_is_held_up_and_dropped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_SEND_WAIT_MS", 20)
        patch.setattr(line_limits, "LINE_SWEEP_MS", 5)
        patch.setattr(line_limits, "LINE_WRITE_BUFFER_BYTES", 1_000)
        async with served(where=None) as running:
            to_broker, from_broker = os.pipe(), os.pipe()
            fcntl.fcntl(from_broker[1], fcntl.F_SETPIPE_SZ, 4_096)
            os.set_blocking(to_broker[1], False)
            await running.listener.attach(to_broker[0], from_broker[1], "to a deaf one")
            flood = b"pub 7 connect\nend\npub 7 topic 1\nend\n" + b"topic 1 [x]\n" * 2_000
            assert os.write(to_broker[1], flood) == len(flood)
            await until(lambda: running.listener.ended_connections())
            (ended,) = running.listener.ended_connections()
            assert ended.end is End.DEAD
            assert 0 < ended.record.entries < 1_000, "it was not asked on and on"
            await until(lambda: not running.listener.connections)
            for fd in (to_broker[1], from_broker[0]):
                os.close(fd)


@on_both_loops
async def test_a_subscriber_that_reads_late_is_brought_its_entries_then() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_WRITE_BUFFER_BYTES", 1_000)
        patch.setattr(line_limits, "LINE_REFUSALS", 10_000)
        async with served(where=None) as running:
            to_broker, from_broker = os.pipe(), os.pipe()
            fcntl.fcntl(from_broker[1], fcntl.F_SETPIPE_SZ, 4_096)
            await running.listener.attach(to_broker[0], from_broker[1], "to a late one")
            hello = b"sub 7 connect\nend\nsub 7 topic 1\nend\n"
            os.write(to_broker[1], hello + b"quack\n" * 2_000)
            await until(lambda: [each.topics for each in running.listener.records()] == [("1",)])
            await running.put("1", b"a")
            late = running.keep(await on_pipes(from_broker[0], to_broker[1]))
            for _ in range(4):
                assert await late.hears() == "accept"
            heard = [await late.hears() for _ in range(2_001)]
            assert sorted(heard) == ["reject"] * 2_000 + ["topic 1 [a]"]


# --- too much --------------------------------------------------------------------------------


@on_both_loops
async def test_connections_beyond_the_limit_are_refused_until_one_goes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_CONNECTIONS", 2)
        async with served() as running:
            first = await running.publisher("first", "1")
            second = await running.publisher("second", "1")
            third = await running.peer()
            assert await third.hears() == "terminate"
            assert await third.hears() == ""
            await third.close()
            assert await second.ask("topic 1 [a]") == "successful"
            assert await first.ask("terminate") == "terminate"
            await first.close()
            await until(lambda: len(running.listener.connections) == 1)
            await assert_others_are_served(running)


@on_both_loops
async def test_what_is_sent_before_its_turn_waits_in_the_channel() -> None:
    """Of a publisher that awaits no answers, a buffer is read and no more."""
    store = SlowStore()
    async with served(store=store) as running:
        peer = await running.publisher("hasty", "1")
        (connection,) = running.listener.connections
        for _ in range(200):
            peer.write(b"topic 1 [x]\n" * 1_000)
        await until(lambda: store.appends == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert connection.unread_bytes <= line_limits.LINE_SCRATCH_BYTES
        store.released.set()
        for _ in range(2_000):
            assert await peer.hears() == "successful"


def test_settings_have_bounds() -> None:
    with pytest.raises(InvalidSetting, match="1 to 65536 bytes, not 0"):
        LineSettings(entry_bytes=0)
    with pytest.raises(InvalidSetting, match="milliseconds to answer, not 0"):
        LineSettings(answer_ms=0)


# --- the file of a Unix socket ---------------------------------------------------------------


@on_both_loops
async def test_the_file_is_there_while_the_listener_is_open(tmp_path: Path) -> None:
    path = tmp_path / "quack"
    async with served(where=str(path)) as running:
        assert stat.S_ISSOCK(path.stat().st_mode)
        peer = await running.publisher("donald", "1")
        assert [record.channel for record in running.listener.records()] == [f"unix:{path}#1"]
        assert await peer.ask("topic 1 [a]") == "successful"
    assert not path.exists()


@on_both_loops
async def test_a_file_that_a_killed_broker_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "quack"
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(path))
    async with served(where=str(path)) as running:
        await running.publisher("donald", "1")


@on_both_loops
async def test_a_file_that_is_in_use_or_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "quack", tmp_path / "other"
    other.write_text("precious")
    async with served(where=str(path)) as running:
        with pytest.raises(OSError, match="in use"):
            await LineServer(running.broker, str(path)).start()
        with pytest.raises(OSError, match="not a socket"):
            await LineServer(running.broker, str(other)).start()
        await running.publisher("donald", "1")
    assert other.read_text() == "precious"


@on_both_loops
async def test_a_file_that_another_broker_has_made_since_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "quack"
    async with served(where=str(path)):
        os.unlink(path)
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"


# --- pipes -----------------------------------------------------------------------------------


@on_both_loops
async def test_what_is_no_pipe_is_refused_and_closed(tmp_path: Path) -> None:
    async with served(where=None) as running:
        first = os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR)
        second = os.open(tmp_path / "b", os.O_CREAT | os.O_RDWR)
        with pytest.raises((ValueError, OSError)):
            await running.listener.attach(first, second, "files")
        for fd in (first, second):
            with pytest.raises(OSError):
                os.fstat(fd)
        assert not running.listener.connections


@on_both_loops
async def test_a_peer_that_dies_on_its_pipes_is_gone(tmp_path: Path) -> None:
    async with served(where=None) as running:
        daisy = await (await running.piped("to daisy")).subscribes("daisy", "1")
        donald = await (await running.piped("to donald")).publishes("donald", "1")
        await daisy.close()
        await until(lambda: running.listener.ended_connections())
        assert running.listener.ended_connections()[0].end is End.GONE
        assert await donald.ask("topic 1 [a]") == "successful"
        daisy = await (await running.piped("again")).subscribes("daisy", "1")
        assert await daisy.receives(1) == ["topic 1 [a]"]
