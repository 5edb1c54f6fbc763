"""With sync = always, an acknowledgement leaves the broker only after a sync that covers it.

A kill keeps what the system holds in memory, so surviving one says nothing about the disk; here
strace tells what the broker asked of the system, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer

from quackmq.stores import limits as stores_limits
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from tests.kit.server import DEADLINE_S
from tests.real import strace
from tests.real.broker import QUACKMQ, Broker
from tests.real.clients import QUIET, create_topics
from tests.real.order import judge
from tests.real.strace import SYNCS, Call

TOPICS = {"ducks": 1, "geese": 2}
SMALL, LARGE = 300, 6

pytestmark = pytest.mark.needs("strace")


def traced_run(directory: Path, *options: str) -> tuple[list[Call], Path]:
    """All calls of a broker that took small and large records from two producers, and its data."""
    output = directory / "trace"
    data = directory / "data"
    data.mkdir()
    with Broker(data, *options, command=[*strace.command(output), *QUACKMQ]) as broker:
        broker.start()
        create_topics(broker.address, TOPICS)
        publish(broker.address)
        exit_code, log = broker.stop()
        assert exit_code == 0, log
    return strace.calls(output), data


def publish(address: str) -> None:
    errors: list[KafkaError | None] = []

    def note(error: KafkaError | None, message: Message) -> None:
        errors.append(error)

    producers = [
        Producer({"bootstrap.servers": address, "enable.idempotence": idempotent, **QUIET})
        for idempotent in (False, True)
    ]
    for number in range(SMALL + LARGE):
        filler = b"." * (
            2 * stores_limits.JOURNAL_INLINE_BYTES if number % (SMALL // LARGE) == 9 else 20
        )
        producer = producers[number % 2]
        topic = ("ducks", "geese")[number % 3 == 0]
        producer.produce(topic, b"<token %d>" % number + filler, on_delivery=note)
        if number % 7 == 0:  # some alone, some together, some while others are on their way
            producer.poll(0.002)
        if number % 50 == 0:
            producer.flush(DEADLINE_S)
    assert sum(producer.flush(DEADLINE_S) for producer in producers) == 0
    assert errors == [None] * (SMALL + LARGE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Call], Path]:
    return traced_run(tmp_path_factory.mktemp("always"), "--sync", "always")


def test_every_acknowledgement_is_sent_after_a_sync_that_covers_it(
    run: tuple[list[Call], Path],
) -> None:
    findings = judge(*run)
    assert findings.violations == []
    assert findings.answers > LARGE
    assert findings.inline > 0 and findings.referenced > 0
    assert findings.inline + findings.referenced == SMALL + LARGE


def test_without_syncs_the_same_look_finds_acknowledgements_that_came_too_early(
    tmp_path: Path,
) -> None:
    findings = judge(*traced_run(tmp_path, "--sync", "os"))
    assert findings.answers > LARGE
    assert len(findings.violations) == SMALL + LARGE


def in_journal(path: str) -> bool:
    return f"/{JOURNAL_DIRECTORY}/" in path


def in_segment(path: str) -> bool:
    return f"/{LOG_DIRECTORY}/" in path and path.endswith(".log")


def is_journal_directory(path: str) -> bool:
    return path.endswith(f"/{JOURNAL_DIRECTORY}")


def is_topic_directory(path: str) -> bool:
    return f"/{LOG_DIRECTORY}/" in path and not path.endswith((".log", ".index"))


@pytest.mark.parametrize(
    "of",
    [in_journal, in_segment, is_journal_directory, is_topic_directory],
    ids=lambda of: of.__name__,
)
def test_each_kind_of_sync_would_be_missed(
    of: Callable[[str], bool], run: tuple[list[Call], Path]
) -> None:
    calls, data = run
    fewer = [call for call in calls if not (call.name in SYNCS and of(call.target))]
    assert len(fewer) < len(calls)
    assert judge(fewer, data).violations != []


def test_a_sync_that_returns_after_the_answer_would_not_count(
    run: tuple[list[Call], Path],
) -> None:
    calls, data = run
    end = calls[-1].ended + 1
    late = [
        call._replace(ended=end) if call.name in SYNCS and in_journal(call.target) else call
        for call in calls
    ]
    assert judge(late, data).violations != []
