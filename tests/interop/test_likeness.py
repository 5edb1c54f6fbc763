"""Apache Kafka answers as it was recorded; tests/protocols/kafka/test_likeness.py holds this broker
to the same recording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.likeness.asking import Case
from tests.likeness.cases import CASES
from tests.likeness.recording import ComparedKafka, answers_at, recorded

pytestmark = pytest.mark.needs("kafka")

ATTEMPTS = 3


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What a case is told by one Kafka for them all."""
    with ComparedKafka().started(tmp_path_factory.mktemp("kafka")) as server:
        server.wait_until_it_listens()
        yield answers_at(server.address)


def test_kafka_answers_as_recorded(kafka: Any) -> None:
    """One test, so that the workers of a test run do not start a Kafka each.

    The parts of Kafka learn of a new topic one after the other, so a case may meet one that does
    not know it yet. Such a case is run again, under another name.
    """
    answers = recorded()
    differing = [
        case.name
        for case in CASES.values()
        if not any(
            _is_as_recorded(kafka, case._replace(name=f"{case.name}-{number}"), answers[case.name])
            for number in range(ATTEMPTS)
        )
    ]
    assert differing == []


def _is_as_recorded(kafka: Any, case: Case, recorded_answer: Any) -> bool:
    told = kafka(case)
    if told != recorded_answer:
        print(f"{case.name}:\n  Kafka    {told}\n  recorded {recorded_answer}")
    return bool(told == recorded_answer)
