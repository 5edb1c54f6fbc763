"""Every error that a publish may meet has an answer."""

from __future__ import annotations

import inspect

import pytest

from quackmq import errors
from quackmq.broker import Broker, Caller, TopicQueue
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line.codec.messages import Entry, Word
from quackmq.protocols.line.publisher import Publisher
from quackmq.protocols.line.records import End
from quackmq.stores.memory import MemoryStore
from tests.protocols.line.peers import TESTER

ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.QuackError)
]


class Peer:
    """A connection that only remembers what it was told."""

    def __init__(self) -> None:
        self.caller = Caller("peer")
        self.told: list[Word | End] = []

    def answer(self, word: Word) -> None:
        self.told.append(word)

    def reject(self, error: errors.QuackError) -> None:
        self.told.append(Word.REJECT)

    def end(self, end: End, detail: str = "") -> None:
        self.told.append(end)


@pytest.mark.parametrize("error", [*ERRORS, ValueError], ids=lambda cls: cls.__name__)
async def test_every_error_has_an_answer(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error.__new__(error, "it was not to be")  # some take more than words to be made

    store = MemoryStore()
    broker = Broker(store)
    await broker.open()
    await broker.create_topic(TESTER, "1", policy=Policy(live_entries=1, when_full=WhenFull.WAIT))
    peer = Peer()
    publisher = Publisher(broker, peer, "donald", 100)
    await publisher.begin(["1"])
    monkeypatch.setattr(TopicQueue, "begin_enqueue", fail)
    publisher.publish(Entry("1", b"quack"))
    wanted: Word | End = Word.REJECT
    if issubclass(error, errors.TopicFull):
        wanted = Word.RETRY
    elif issubclass(error, (errors.BrokerClosing, errors.OutcomeUnknown, errors.StoreFenced)):
        wanted = End.CLOSED
    elif not issubclass(error, errors.QuackError):
        wanted = End.FAILED
    assert peer.told == [wanted]
    await publisher.close()
    await broker.close()
    await store.close()
