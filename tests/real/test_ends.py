"""How a broker under load ends, and who may take its place: SIGTERM, SIGKILL, two at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.broker import Broker
from tests.real.clients import Progress, Publisher, create_topics, read_back
from tests.real.killing import KINDS, PLACES, RECOVERED, TOPICS
from tests.real.ledger import check

pytestmark = pytest.mark.processes

#: A load, not a start.
SOME = 500


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data") as broker:
        broker.start()
        create_topics(broker.address, TOPICS)
        yield broker


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def publishers(broker: Broker, progress: Progress) -> Iterator[list[Publisher]]:
    """Of every kind, at work."""
    with ExitStack() as ending:
        made = []
        for name, kind in KINDS.items():
            source = random.Random(name)
            made.append(Publisher(name, kind, broker.address, PLACES, source, progress))
            ending.callback(made[-1].abandon)
        yield made


def test_a_broker_told_to_stop_under_load_ends_well_and_loses_nothing(
    broker: Broker, publishers: list[Publisher], progress: Progress
) -> None:
    progress.wait_for_more(SOME)
    exit_code, log = broker.stop()
    assert exit_code == 0, log
    broker.start()
    accounts = [publisher.finish() for publisher in publishers]
    assert check(accounts, read_back(broker.address, PLACES)) == []
    exit_code, log = broker.stop()
    assert exit_code == 0, log
    assert RECOVERED not in log, "it was left clean: there is nothing to recover"


def test_a_second_broker_is_turned_away_until_the_first_is_dead(
    broker: Broker, publishers: list[Publisher], progress: Progress
) -> None:
    progress.wait_for_more(SOME)
    with Broker(broker.data) as second:
        second.launch()
        exit_code, log = second.wait()
        assert exit_code == 1
        assert f"{broker.data} is in use" in log and str(broker.pid) in log

        # The first has not noticed.
        progress.wait_for_more(SOME)
        broker.kill()
        second.start()
        exit_code, log = second.stop()
        assert exit_code == 0, log
        assert RECOVERED in log, "the first was killed: there is something to recover"

    broker.start()
    accounts = [publisher.finish() for publisher in publishers]
    assert check(accounts, read_back(broker.address, PLACES)) == []
