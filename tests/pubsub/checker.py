"""What producers were told and what subscribers stored, and whether that is exactly once. Pure.

One checker for every listener. A producer with a durable name numbers its puts in each topic from 0
on; a put is one message or several. A subscriber has stored what it received of each topic, in
order. Promised:

- what was acknowledged, every subscriber has, once;
- what was not acknowledged, a subscriber has once or not at all, and all of them agree;
- a put of several messages is there whole or not at all;
- the messages of one producer in one partition come in the order of their numbers;
- an id belongs to one message, and a partition is in the same order for every subscriber;
- nobody has what nobody put.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

#: A message that ends a partition; nobody's put.
END: Final = "end"

#: As it is drawn in quackmq/model/subscription.py.
_ID: Final = struct.Struct(">B16sIq")
#: So many of one kind are told in full.
_SHOWN: Final = 5


class Identity(NamedTuple):
    """Which message of whose put it is; it travels as the message's value."""

    producer: str
    number: int
    piece: int = 0
    pieces: int = 1

    def __str__(self) -> str:
        return f"{self.producer} {self.number} {self.piece} {self.pieces}"

    @classmethod
    def parse(cls, value: str) -> Identity:
        producer, *numbers = value.split(" ")
        return cls(producer, *map(int, numbers))


def pieces_of(producer: str, number: int, pieces: int) -> list[Identity]:
    return [Identity(producer, number, piece, pieces) for piece in range(pieces)]


class Stored(NamedTuple):
    """A message as a subscriber stored it."""

    id: str
    value: str


class Told(NamedTuple):
    """Of one producer in one topic: how many puts it was to make, and the numbers of those that it
    was told are there, in the order in which it was told; one may be told again."""

    given: int
    acknowledged: Sequence[int]


#: By producer and topic.
Puts = Mapping[tuple[str, str], Told]
#: By subscriber and topic.
Stores = Mapping[tuple[str, str], Sequence[Stored]]


def partition_of(message_id: str) -> int:
    return _unpacked(message_id)[0]


def violations(puts: Puts, stores: Stores) -> list[str]:
    """All that speaks against exactly once; nothing, if it was kept."""
    found: list[str] = []
    for (subscriber, topic), messages in stores.items():
        told = {producer: told for (producer, of), told in puts.items() if of == topic}
        where = f"{subscriber} on {topic}"
        found += [f"{where}: {wrong}" for wrong in _check_store(told, messages)]
    for topic in {topic for _, topic in stores}:
        of_topic = {name: messages for (name, of), messages in stores.items() if of == topic}
        found += [f"{topic}: {wrong}" for wrong in _check_agreement(of_topic)]
    return found


def _check_store(told: Mapping[str, Told], messages: Sequence[Stored]) -> Iterator[str]:
    """One subscriber's messages of one topic against what its producers were told."""
    ids = Counter(message.id for message in messages)
    yield from _few("stored under one id more than once", [i for i, n in ids.items() if n > 1])
    known, strange = _identities(told, messages)
    yield from _few("put by nobody", strange)
    seen = Counter(identity for _, identity in known)
    yield from _few("came more than once", [each for each, n in seen.items() if n > 1])
    pieces: dict[tuple[str, int], set[int]] = defaultdict(set)
    for _, identity in known:
        pieces[identity.producer, identity.number].add(identity.piece)
    yield from _few(
        "came in part", sorted({one[:2] for one in seen if len(pieces[one[:2]]) != one.pieces})
    )
    missing = [
        (producer, number)
        for producer, (_, acknowledged) in told.items()
        for number in sorted(set(acknowledged))
        if (producer, number) not in pieces
    ]
    yield from _few("acknowledged and never came", missing)
    yield from _few("came out of order", _out_of_order(known))


def _identities(
    told: Mapping[str, Told], messages: Sequence[Stored]
) -> tuple[list[tuple[int, Identity]], list[str]]:
    """What is known of each message, with its partition; and what cannot be anybody's."""
    known: list[tuple[int, Identity]] = []
    strange: list[str] = []
    for message in messages:
        if message.value == END:
            continue
        try:
            identity = Identity.parse(message.value)
        except (ValueError, TypeError):
            strange.append(message.value)
            continue
        producer = told.get(identity.producer)
        if producer is None or not 0 <= identity.number < producer.given:
            strange.append(message.value)
        else:
            known.append((partition_of(message.id), identity))
    return known, strange


def _out_of_order(known: Sequence[tuple[int, Identity]]) -> list[str]:
    last: dict[tuple[int, str], Identity] = {}
    wrong = []
    for partition, identity in known:
        before = last.setdefault((partition, identity.producer), identity)
        if identity[1:3] < before[1:3]:
            wrong.append(f"{identity} behind {before} in partition {partition}")
        last[partition, identity.producer] = identity
    return wrong


def _check_agreement(stores: Mapping[str, Sequence[Stored]]) -> Iterator[str]:
    """Subscribers of one topic have the same messages under the same ids, and each has those of a
    partition in the order of their offsets."""
    values: dict[str, str] = {}
    differing = []
    for messages in stores.values():
        for message in messages:
            if values.setdefault(message.id, message.value) != message.value:
                differing.append(f"{message.id}: {values[message.id]!r} and {message.value!r}")
    yield from _few("one id for two messages", differing)
    everything = {message.id for messages in stores.values() for message in messages}
    for subscriber, messages in stores.items():
        missing = everything - {message.id for message in messages}
        yield from _few(
            f"{subscriber} lacks what another has", [values[each] for each in sorted(missing)]
        )
        ends: dict[int, int] = {}
        backward = []
        for message in messages:
            partition, offset = _unpacked(message.id)
            if offset < ends.get(partition, -1):
                backward.append(f"{message.value!r} at {offset} of partition {partition}")
            ends[partition] = max(offset, ends.get(partition, -1))
        yield from _few(f"{subscriber} went back", backward)


def _unpacked(message_id: str) -> tuple[int, int]:
    _, _, partition, offset = _ID.unpack(base64.urlsafe_b64decode(message_id + "="))
    return partition, offset


def _few(what: str, which: Sequence[object]) -> Iterator[str]:
    if which:
        shown = ", ".join(map(str, which[:_SHOWN]))
        yield f"{len(which)} {what}, the first: {shown}"
