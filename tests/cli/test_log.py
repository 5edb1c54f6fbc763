"""`quackmq log`: what it prints of a directory, and its exit code."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import orjson
import pytest

from quackmq.cli import text
from quackmq.cli.main import main
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.contract import Store
from quackmq.stores.local.files.format import encode_frame, parse_frame
from tests.kit.server import DEADLINE_S, SCRIPT, Server
from tests.kit.support import START_MS, batch_of
from tests.stores.calls import append
from tests.stores.local.directories import (
    content_of,
    flip,
    leave_crashed,
    open_store,
    segments_of,
)
from tests.stores.local.test_inspection import undecodable

MOMENT = "2023-11-14T22:13:20.000Z"


class Output:
    """What one `quackmq log` said."""

    def __init__(self, exit_code: int, out: str, err: str) -> None:
        self.exit_code = exit_code
        self.out = out
        self.err = err
        self.lines = out.splitlines()


class Log:
    """Runs `quackmq log` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Output:
        try:
            exit_code: object = main(["log", *map(str, arguments)])
        except SystemExit as ending:
            exit_code = ending.code
        assert isinstance(exit_code, int)
        return Output(exit_code, *self._capsys.readouterr())


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Log:
    return Log(capsys)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two topics, closed cleanly: `ducks` with batches in both partitions, `empty`."""
    asyncio.run(_make(tmp_path))
    return tmp_path / "data"


@pytest.fixture
def crashed(directory: Path, tmp_path: Path) -> Path:
    """The same, as a crash left it."""
    return tmp_path / "crashed"


async def _make(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await store.create_topic("ducks", 2, Policy(keep_for_ms=1000, ephemeral=True))
    await store.create_topic("empty", 1, Policy())
    first, second = PartitionKey(topic.id, 0), PartitionKey(topic.id, 1)
    await append(store, first, batch_of(b"one", b"two"))
    await append(store, first, _with_everything())
    await append(
        store, second, batch_of(b"three", producer_id=7, producer_epoch=0, base_sequence=0)
    )
    leave_crashed(tmp_path / "data", tmp_path / "crashed")
    await store.close()


def _with_everything() -> Batch:
    record = Record(
        0, START_MS, b"\xff\x00", "\x1b[2J Ä".encode(), (("name", b"x"), ("none", None))
    )
    return Batch.parse(codec.encode([record], compression="zstd"))


async def _append_to_a_new_store(directory: Path, *batches: Batch) -> PartitionKey:
    store: Store = await open_store(directory)
    key = PartitionKey((await store.create_topic("ducks", 1, Policy())).id, 0)
    for batch in batches:
        await append(store, key, batch)
    await store.close()
    return key


async def _trim(directory: Path, key: PartitionKey, offset: int) -> None:
    store = await open_store(directory)
    await store.trim(key, offset)
    await store.close()


# --- ls --------------------------------------------------------------------------------------


def test_ls_shows_topics_and_how_the_store_was_left(log: Log, directory: Path) -> None:
    output = log("ls", directory)
    assert (output.exit_code, output.err) == (0, "")
    assert output.lines[0].startswith("format 4, cluster ")
    assert output.lines[1:3] == ["run 1, leader epoch 1, sync always", "closed cleanly"]
    rows = [line.split() for line in output.lines[3:]]
    assert rows[0][:7] == ["TOPIC", "PARTITION", "FIRST", "STABLE", "NEXT", "BYTES", "SEGMENTS"]
    assert rows[0][7:] == ["ID", "POLICY"]
    assert rows[1][:5] == ["ducks", "0", "0", "3", "3"]
    assert rows[1][-2:] == ["keep_for_ms=1000", "ephemeral=True"]
    assert rows[2] == ["ducks", "1", "0", "1", "1", "73", "1"]
    assert rows[3][:7] == ["empty", "0", "0", "0", "0", "0", "0"]


def test_ls_tells_of_a_store_that_was_not_closed(log: Log, crashed: Path) -> None:
    output = log("ls", crashed)
    assert output.exit_code == 0
    assert output.lines[2] == "not closed: 5 journal frames after the checkpoint"


def test_ls_as_json_says_the_same_to_programs(log: Log, directory: Path) -> None:
    content = orjson.loads(log("ls", "--json", directory).out)
    assert (content["format"], content["closed"], content["findings"]) == (4, True, [])
    ducks, empty = content["topics"]
    assert (ducks["name"], empty["name"]) == ("ducks", "empty")
    assert ducks["policy"] == {"keep_for_ms": 1000, "ephemeral": True}
    assert ducks["partitions"][1] == {
        "partition": 1,
        "first_offset": 0,
        "stable_offset": 1,
        "next_offset": 1,
        "bytes": 73,
        "segments": 1,
        "open_transactions": [],
    }


def test_ls_of_a_damaged_directory_shows_what_is_left_and_names_the_rest(
    log: Log, crashed: Path
) -> None:
    flip(crashed / "journal" / "0", 1024)
    output = log("ls", crashed)
    assert output.exit_code == 1
    assert output.lines[-1].startswith("damage: journal/0, bytes 1024 to 1536: frames 3 to 3")
    assert orjson.loads(log("ls", "--json", crashed).out)["findings"][0]["start"] == 1024
    assert log("ls", "--json", crashed).exit_code == 1


# --- transactions ----------------------------------------------------------------------------


@pytest.fixture
def deals(tmp_path: Path) -> Path:
    """One transaction aborted, one open, as a crash left them."""
    asyncio.run(_make_deals(tmp_path))
    return tmp_path / "crashed"


async def _make_deals(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = PartitionKey((await store.create_topic("deals", 1, Policy())).id, 0)
    for producer_id in (7, 8):
        batch = batch_of(
            b"", producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
        )
        await append(store, key, batch)
    await append(store, key, Batch.parse(marker_batch(7, 1, Marker.ABORT, START_MS)))
    leave_crashed(tmp_path / "data", tmp_path / "crashed")
    await store.close()


def test_ls_tells_what_is_open(log: Log, deals: Path) -> None:
    assert log("ls", deals).lines[-1].split()[:5] == ["deals", "0", "0", "1", "3"]
    (topic,) = orjson.loads(log("ls", "--json", deals).out)["topics"]
    assert topic["partitions"][0]["stable_offset"] == 1
    assert topic["partitions"][0]["open_transactions"] == [{"producer_id": 8, "first_offset": 1}]


def test_dump_tells_what_begins_and_ends_transactions(log: Log, deals: Path) -> None:
    first, _, last = log("dump", deals).lines
    assert first.endswith(", transactional")
    assert last.endswith(", transactional, marker: abort")
    journal = log("dump", "--journal", deals).out
    assert ", 0 begins a transaction of producer 7\n" in journal
    assert ", 2 aborts a transaction of producer 7\n" in journal


# --- dump ------------------------------------------------------------------------------------


def test_dump_shows_batches(log: Log, directory: Path) -> None:
    output = log("dump", directory)
    assert (output.exit_code, output.err, len(output.lines)) == (0, "", 3)
    first, second, third = output.lines
    assert first.startswith("ducks:0 offsets 0 to 1, 81 bytes at log/")
    assert "0-00000000000000000000.log:0, compression none, leader epoch 1, " in first
    assert first.endswith(f"{MOMENT} to {MOMENT}")
    assert second.startswith("ducks:0 offsets 2 to 2, ") and "compression zstd" in second
    assert third.startswith("ducks:1 offsets 0 to 0, ")
    assert "producer 7 epoch 0 sequence 0" in third


def test_dump_shows_records_and_nothing_that_a_terminal_would_obey(
    log: Log, directory: Path
) -> None:
    output = log("dump", "--records", directory, "ducks:0")
    assert output.lines[1:3] == [f"    0 {MOMENT} null 'one'", f"    1 {MOMENT} null 'two'"]
    assert output.lines[4] == (f"    2 {MOMENT} 0xff00 '\\x1b[2J Ä' 'name': 'x' 'none': null")


def test_dump_and_ls_begin_at_the_same_offset_after_a_trim(log: Log, tmp_path: Path) -> None:
    data = tmp_path / "data"
    batches = [batch_of(b"one"), batch_of(b"two", b"three")]
    key = asyncio.run(_append_to_a_new_store(data, *batches))
    asyncio.run(_trim(data, key, 2))
    (partition,) = orjson.loads(log("ls", data, "--json").out)["topics"][0]["partitions"]
    assert partition["first_offset"] == 2
    batch_line, record_line = log("dump", data, "--records").lines
    assert batch_line.startswith("ducks:0 offsets 1 to 2, ")
    assert batch_line.endswith(", trimmed before offset 2")
    assert record_line == f"    2 {MOMENT} null 'three'"
    sentence = "ducks:0: offsets 0 to 1 are not in the log any more: they were archived or deleted"
    assert sentence in log("dump", data, "ducks").err
    assert log("dump", data, "ducks", "--from", "2").err == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"x" * 200, "'" + "x" * 200 + "'"),
        (b"x" * 201, "'" + "x" * 200 + "'… (201 bytes)"),
        (b"\xff" * 300, "0x" + "ff" * 200 + "… (300 bytes)"),
        (b"x" * 199 + "ÄÄ".encode(), "'" + "x" * 199 + "'… (203 bytes)"),
        (b"", "''"),
    ],
)
def test_dump_shows_the_beginning_of_what_is_long(
    log: Log, tmp_path: Path, value: bytes, shown: str
) -> None:
    asyncio.run(_append_to_a_new_store(tmp_path / "data", batch_of(value)))
    output = log("dump", "--records", tmp_path / "data")
    assert output.lines[1] == f"    0 {MOMENT} null {shown}"


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["ducks"], ["ducks:0 offsets 0", "ducks:0 offsets 2", "ducks:1 offsets 0"]),
        (["ducks:1"], ["ducks:1 offsets 0"]),
        (["empty"], []),
        (["--from", "1"], ["ducks:0 offsets 0 to 1", "ducks:0 offsets 2"]),
        (["--from", "2"], ["ducks:0 offsets 2"]),
        (["--from", "99"], []),
        (["--limit", "1"], ["ducks:0 offsets 0"]),
        (["--limit", "0"], []),
        (["--records", "--limit", "1"], ["ducks:0 offsets 0", "    0 "]),
        (["--records", "--from", "1", "--limit", "1"], ["ducks:0 offsets 0", "    1 "]),
        (["ducks:1", "--records"], ["ducks:1 offsets 0", "    0 "]),
    ],
)
def test_dump_shows_what_was_asked_for(
    log: Log, directory: Path, arguments: list[str], starts: list[str]
) -> None:
    lines = log("dump", directory, *arguments).lines
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_dump_names_damage_in_its_place_and_goes_on(log: Log, directory: Path) -> None:
    path = segments_of(directory)[0]
    flip(path, 70)
    output = log("dump", directory, "ducks:0")
    assert output.exit_code == 1
    assert output.lines[0].startswith("ducks:0 damage: log/")
    assert f"{path.name}, bytes 0 to 81, offsets 0 to 1: " in output.lines[0]
    assert output.lines[1].startswith("ducks:0 offsets 2 to 2")


def test_dump_names_a_batch_that_nobody_can_decode(log: Log, tmp_path: Path) -> None:
    batches = (undecodable(), batch_of(b"quack"))
    asyncio.run(_append_to_a_new_store(tmp_path / "data", *batches))
    output = log("dump", "--records", tmp_path / "data")
    assert output.exit_code == 0
    assert output.lines[1].startswith("    poison: the batch cannot be decoded: ")
    assert output.lines[3].endswith("null 'quack'")


def test_dump_shows_the_journal(log: Log, crashed: Path) -> None:
    output = log("dump", "--journal", crashed)
    assert output.exit_code == 0
    assert output.lines[0] == (
        "journal/0:0 frame 1, run 1, 512 bytes, sync always, synced through 0, "
        "behind the checkpoint"
    )
    assert output.lines[1].startswith('    change \'["topic",')
    assert output.lines[5].startswith("    append ducks:0 offsets 0 to 1, 81 bytes for log/")
    assert len(log("dump", "--journal", "--limit", "2", crashed).lines) == 4


def test_dump_of_the_journal_names_damage_in_its_place(log: Log, crashed: Path) -> None:
    flip(crashed / "journal" / "0", 512)
    output = log("dump", "--journal", crashed)
    assert output.exit_code == 1
    assert output.lines[2].startswith("damage: journal/0, bytes 512 to 1024: frames 2 to 2")
    assert output.lines[3].startswith("journal/0:1024 frame 3")


def test_dump_of_the_journal_fails_where_an_entry_cannot_be_read(log: Log, directory: Path) -> None:
    """The checksum of the frame is right, and its checkpoint covers it: only a dump reads it."""
    salt = orjson.loads((directory / "quackmq.json").read_bytes())["salt"]
    journal = directory / "journal" / "0"
    content = bytearray(journal.read_bytes())
    first = parse_frame(content, 0, salt)
    assert first is not None
    unknown_entry = b"\x63\0\0\0\0"
    frame = encode_frame(first.sync, first.run, first.number, 0, [unknown_entry], salt)
    assert first.size == len(frame)
    first.payload.release()
    content[: len(frame)] = frame
    journal.write_bytes(content)
    output = log("dump", "--journal", directory)
    assert output.lines[1] == (
        "    damage: the payload of a journal frame is invalid: unknown kind of entry 99"
    )
    assert output.lines[2].startswith("journal/0:512 frame 2"), "the dump continues"
    assert output.exit_code == 1


def test_frames_of_a_store_that_was_closed_are_covered(log: Log, directory: Path) -> None:
    assert log("dump", "--journal", directory).lines[0].endswith("covered by the checkpoint")


# --- verify ----------------------------------------------------------------------------------


def test_verify_of_a_sound_directory_says_what_it_looked_at(log: Log, directory: Path) -> None:
    output = log("verify", "--deep", directory)
    assert (output.exit_code, output.err) == (0, "")
    size = sum(path.stat().st_size for path in segments_of(directory))
    assert output.lines == [
        f"no damage in 3 partitions, 2 segments, 3 batches, {size} bytes, 0 frames"
    ]


def test_verify_of_a_crashed_directory_finds_no_damage_in_it(log: Log, crashed: Path) -> None:
    output = log("verify", crashed)
    assert output.exit_code == 0
    assert output.out.startswith("no damage in 3 partitions") and "5 frames" in output.out


def test_verify_names_each_damaged_range_and_fails(log: Log, directory: Path) -> None:
    path, other = segments_of(directory)
    flip(path, 70)
    flip(other, 70)
    output = log("verify", directory)
    assert output.exit_code == 1
    names = [f"log/{each.parent.name}/{each.name}" for each in (path, other)]
    assert output.lines[0].startswith(f"damage: {names[0]}, bytes 0 to 81, offsets 0 to 1: ")
    assert output.lines[1].startswith(f"damage: {names[1]}, bytes 0 to 73, offsets 0 to 0: ")
    assert output.lines[2].startswith("2 damaged ranges in 3 partitions, 2 segments, 1 batch, ")


def test_verify_takes_poison_for_no_damage(log: Log, tmp_path: Path) -> None:
    asyncio.run(_append_to_a_new_store(tmp_path / "data", undecodable()))
    output = log("verify", "--deep", tmp_path / "data")
    assert output.exit_code == 0
    assert output.lines[0].startswith("poison: log/")
    assert output.lines[1].startswith("no damage, 1 undecodable batch in ")


def test_verify_tells_how_far_it_has_got(
    log: Log, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PROGRESS_EVERY_S", 0.0)
    output = log("verify", directory)
    size = sum(path.stat().st_size for path in segments_of(directory))
    assert output.err.splitlines()[-1] == f"{size} of {size} bytes (100 %)"


# --- what cannot be looked at ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["verify", "{}/none"], "none is not a directory"),
        (["ls", "{}/data/checkpoint"], "checkpoint is not a directory"),
        (["verify", "{}"], "there is no quackmq.json: this is not a QuackMQ directory"),
        (["dump", "{}/data", "geese"], "there is no topic 'geese'"),
        (["dump", "{}/data", "ducks:2"], "topic ducks has 2 partitions, not '2'"),
        (["dump", "{}/data", "ducks:x"], "topic ducks has 2 partitions, not 'x'"),
        (["dump", "{}/data", "ducks", "--journal"], "--journal can only be combined with --limit"),
        (["dump", "{}/data", "--from", "-1"], "must be a whole number from 0 on, got '-1'"),
        (["dump", "{}/data", "--limit", "few"], "must be a whole number from 0 on, got 'few'"),
        (["verify"], "arguments are required: DIR"),
        (["look", "{}/data"], "there is no command 'look'"),
        ([], "arguments are required: ACTION"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence_with_exit_code_2(
    log: Log, directory: Path, arguments: list[str], complaint: str
) -> None:
    output = log(*(argument.format(directory.parent) for argument in arguments))
    assert (output.exit_code, output.out) == (2, "")
    assert complaint in output.err
    assert output.err.startswith("quackmq") and output.err.count("\n") == 1


def test_a_newer_format_is_refused(log: Log, directory: Path) -> None:
    (directory / "quackmq.json").write_text('{"format": 9}')
    output = log("verify", directory)
    assert output.exit_code == 2
    assert "format 9" in output.err and "use a newer QuackMQ" in output.err


def test_no_command_changes_anything(log: Log, crashed: Path) -> None:
    before = content_of(crashed)
    for arguments in (["ls"], ["dump", "--records"], ["dump", "--journal"], ["verify", "--deep"]):
        assert log(*arguments, crashed).exit_code == 0
    assert content_of(crashed) == before


@pytest.mark.processes
def test_a_directory_in_use_is_not_looked_at_and_one_left_by_a_kill_is(
    log: Log, tmp_path: Path
) -> None:
    with Server("serve", "--data", tmp_path / "data", "--kafka", "127.0.0.1:0") as server:
        server.ready()
        output = log("verify", tmp_path / "data")
        assert output.exit_code == 2
        assert f"in use by a broker (process {server.process.pid}): stop it first" in output.err
        server.process.kill()
        server.exit_code()
        assert log("verify", tmp_path / "data").exit_code == 0


@pytest.mark.processes
def test_a_reader_who_has_enough_ends_it_quietly(directory: Path) -> None:
    with subprocess.Popen(
        [*SCRIPT, "log", "dump", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 141
        assert process.stderr.read() == ""
