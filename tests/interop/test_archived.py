"""Archived history through every listener: whole, in order, as it was put, with no seam to be seen
where archive and log meet; also while both move (Q8, Q13, M3)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from quackmq.cli.main import main
from tests.interop.history import (
    READERS,
    Listeners,
    Reader,
    Told,
    ask,
    put,
    wait_for_archive,
)
from tests.kit.server import DEADLINE_S, Server

pytestmark = [pytest.mark.needs("kcat"), pytest.mark.timeout(900)]

START_MS = 1_700_000_000_000
ARCHIVED, LIVE = 1_200, 100
#: A topic that is archived as soon as there is anything.
AT_ONCE = {"archive_after_ms": 0, "archive_bytes": 1}
NEVER = {"archive_after_ms": None, "archive_bytes": None}
#: `quackmq`, whose broker merges files when it is told to, and never by itself: it would do so in
#: the midst of a test that takes long enough.
SERVE = [
    *(sys.executable, "-c"),
    "import sys; from quackmq.broker import limits; limits.MERGE_INTERVAL_MS = 3_600_000; "
    "from quackmq.cli.main import main; sys.exit(main(sys.argv[1:]))",
]


class History(NamedTuple):
    listeners: Listeners
    directory: Path
    topic: str
    #: All that was put and committed, by offset.
    put: list[Told]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Listeners, Path]]:
    directory = tmp_path_factory.mktemp("archived") / "data"
    listeners = [
        word for listener in ("kafka", "http", "zmq") for word in (f"--{listener}", "127.0.0.1:0")
    ]
    with Server("serve", "--data", directory, *listeners, command=SERVE) as running:
        yield running.listeners(), directory


@pytest.fixture(scope="module")
def history(server: tuple[Listeners, Path]) -> History:
    """Most of it archived, in several files, with holes of aborted transactions; the rest in the
    log."""
    listeners, directory = server
    create(listeners, "history", AT_ONCE)
    everything: list[Told] = []
    for start in range(0, ARCHIVED, ARCHIVED // 3):
        numbers = range(start, start + ARCHIVED // 3)
        writer = "writer" if start == ARCHIVED // 3 else ""
        everything += put(listeners, "history", numbers, START_MS, transaction=writer)
        last = everything[-1].offset
        assert last is not None
        wait_for_archive(directory, "history", last + 1)
    ask(listeners, "PATCH", "/v1/topics/history", {"policy": NEVER})
    everything += put(listeners, "history", range(ARCHIVED, ARCHIVED + LIVE), START_MS)
    return History(listeners, directory, "history", everything)


def create(listeners: Listeners, topic: str, policy: dict[str, int]) -> None:
    ask(listeners, "POST", "/v1/topics", {"name": topic, "partitions": 1, "policy": policy})


def check(found: list[Told], expected: list[Told]) -> None:
    wrong = [pair for pair in zip(found, expected, strict=True) if not pair[0].agrees_with(pair[1])]
    assert wrong == []


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_whole_history_comes_from_the_beginning(history: History, reader: Reader) -> None:
    manifest = wait_for_archive(history.directory, history.topic, 1)
    assert len(manifest.files) >= 3
    assert manifest.next_offset > ARCHIVED, "aborted records have offsets too"
    found = reader(history.listeners, history.topic, None, len(history.put))
    check(list(found), history.put)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("number", [0, 555, ARCHIVED - 1, ARCHIVED + 1])
def test_history_comes_from_a_time(history: History, reader: Reader, number: int) -> None:
    """In the first file, in one between, at the end of the archive, in the log."""
    since_ms = START_MS + number * 1000 - 500
    expected = history.put[number : number + 20]
    found = reader(history.listeners, history.topic, since_ms, len(expected))
    check(list(found), expected)


def test_the_first_offset_is_that_of_the_archive(history: History) -> None:
    (partition,) = ask(history.listeners, "GET", f"/v1/topics/{history.topic}")["partitions"]
    assert partition["first_offset"] == 0


def test_archive_and_log_of_the_running_broker_are_sound(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["archive", "verify", str(history.directory)]) == 0
    assert f"{ARCHIVED} records" in capsys.readouterr().out


def test_every_listener_reads_gapless_while_archiving_and_merging_go_on(
    server: tuple[Listeners, Path],
) -> None:
    """All at once, from the beginning to an end that moves on, past a seam that moves too."""
    listeners, directory = server
    create(listeners, "flowing", AT_ONCE)
    rounds, each = 12, 60
    everything: list[Told] = put(listeners, "flowing", range(each), START_MS)
    failed: list[BaseException] = []

    def feed() -> None:
        try:
            for number in range(1, rounds):
                numbers = range(number * each, (number + 1) * each)
                everything.extend(put(listeners, "flowing", numbers, START_MS))
                ask(listeners, "POST", "/v1/topics/flowing/archive/now")
                ask(listeners, "POST", "/v1/topics/flowing/archive/merge")
        except BaseException as error:
            failed.append(error)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        with ThreadPoolExecutor(len(READERS)) as pool:
            reading = {
                name: pool.submit(reader, listeners, "flowing", None, rounds * each)
                for name, reader in READERS.items()
            }
            found = {name: list(future.result(120)) for name, future in reading.items()}
    finally:
        feeder.join(120)
    assert failed == []
    for name in READERS:
        check(found[name], everything)
    manifest = wait_for_archive(directory, "flowing", rounds * each)
    assert len(manifest.files) < manifest.version, "files were merged"


def test_a_missing_file_is_named_and_everything_else_is_served(
    server: tuple[Listeners, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """And when it is back, so are its records, without a restart."""
    listeners, directory = server
    create(listeners, "holed", AT_ONCE)
    for start in range(0, 60, 20):
        put(listeners, "holed", range(start, start + 20), START_MS)
        wait_for_archive(directory, "holed", start + 20)
    manifest = wait_for_archive(directory, "holed", 60)
    assert [file.first_offset for file in manifest.files] == [0, 20, 40]
    path = directory / "archive" / "holed" / "0" / manifest.files[1].name
    kept = path.rename(directory / "kept")

    assert main(["archive", "verify", str(directory), "holed"]) == 1
    assert f"{path.name}, offsets 20 to 39: the file is missing" in capsys.readouterr().out
    before, after = messages(listeners, 0), messages(listeners, 20)
    assert ([one["offset"] for one in before][:20], before[0]["lost"]) == (list(range(20)), 0)
    assert ([one["offset"] for one in after], after[0]["lost"]) == (list(range(40, 60)), 20)
    assert isinstance(fetched(listeners, 25), KafkaError)
    assert fetched(listeners, 40) == b"record 000040"

    kept.rename(path)
    assert [one["offset"] for one in messages(listeners, 20)][:20] == list(range(20, 40))
    assert fetched(listeners, 25) == b"record 000025"
    assert main(["archive", "verify", str(directory), "holed"]) == 0


def messages(listeners: Listeners, offset: int) -> list[dict[str, Any]]:
    path = f"/v1/topics/holed/partitions/0/messages?offset={offset}&limit=100"
    found: list[dict[str, Any]] = ask(listeners, "GET", path)["messages"]
    return found


def fetched(listeners: Listeners, offset: int) -> bytes | KafkaError:
    """What a consumer gets at an offset."""
    settings = {
        "bootstrap.servers": listeners["kafka"],
        "group.id": "g",
        "auto.offset.reset": "error",
    }
    with Consumer(settings) as consumer:
        consumer.assign([TopicPartition("holed", 0, offset)])
        message = consumer.poll(DEADLINE_S)
        assert message is not None
        return message.error() or message.value() or b""
