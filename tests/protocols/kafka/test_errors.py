"""Every error of ours has a number in Kafka's protocol."""

from __future__ import annotations

from collections.abc import Iterator

from kio.schema.errors import ErrorCode

from quackmq.errors import CorruptBatch, OutcomeUnknown, QuackError, StoreFenced, UnknownTopic
from quackmq.protocols.kafka.errors import CODES, code_of


def tree(kind: type[QuackError]) -> Iterator[type[QuackError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


def test_every_error_has_a_code() -> None:
    ours = {kind for kind in tree(QuackError) if kind.__module__ == "quackmq.errors"}
    assert set(CODES) == ours
    assert ErrorCode.none not in CODES.values()


def test_errors_have_the_codes_that_kafka_gives() -> None:
    assert code_of(CorruptBatch("…")) == 2
    assert code_of(UnknownTopic("…")) == 3
    # A producer finds the leader again, or repeats a batch that may have been stored.
    assert code_of(StoreFenced("…")) == 6
    assert code_of(OutcomeUnknown("…")) == 7


def test_an_error_that_is_not_ours_is_the_servers() -> None:
    assert code_of(ZeroDivisionError()) == ErrorCode.unknown_server_error


def test_a_kind_of_error_that_somebody_adds_below_has_its_parents_code() -> None:
    class TornBatch(CorruptBatch):
        pass

    assert code_of(TornBatch("…")) == ErrorCode.corrupt_message
