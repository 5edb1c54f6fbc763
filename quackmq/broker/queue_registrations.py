"""Producers and consumers of a queue, each with an id from the broker (D1, D2).

A producer may publish to the one topic that it is registered with. A consumer may subscribe to any
number of topics. Ids are numbered, `producer-1`, `consumer-1`, and are never reused.

The store has the two counters, and the topic of each producer. A consumer's topics are the
subscriptions of its name, which every protocol sees. A name that subscribed through another
protocol is therefore a consumer too, and a new id never equals a name in use. A producer whose
topic was deleted has no topic, and may be registered with another. Beyond
`limits.REGISTERED_PRODUCERS` the least recently used producer loses its topic as well.

The checks of each operation, and their order, follow the queue's specification. They apply only to
clients that use these ids.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.subscriptions.service import SubscriptionService
from quackmq.broker.topic_defaults import TopicDefaults
from quackmq.broker.topics import Topics
from quackmq.errors import (
    AlreadyRegistered,
    AlreadySubscribed,
    DamagedStore,
    NotRegistered,
    TopicExists,
    UnknownConsumerId,
    UnknownProducerId,
    UnknownSubscription,
    WriteFailed,
)
from quackmq.model.policy import format_setting
from quackmq.model.stored_json import decode_stored_object
from quackmq.model.topic import StatePut, Topic
from quackmq.model.topic_defaults import PolicySettings
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: State key of the last numbers that were allocated, as JSON.
COUNTERS_KEY: Final = "registrations"
#: Prefix of the state keys of producers. Their number follows; the value is the id of their topic.
PRODUCER_PREFIX: Final = "registered-producer/"
_PRODUCER_ID: Final = re.compile(r"producer-([1-9][0-9]{0,17})")
_CONSUMER_ID: Final = re.compile(r"consumer-([1-9][0-9]{0,17})")


class Registrations:
    """The registered producers and consumers."""

    def __init__(
        self,
        subscriptions: SubscriptionService,
        registry: SubscriptionRegistry,
        store: Store,
        topics: Topics,
        defaults: TopicDefaults,
        pull: PullService,
        cursors: Cursors,
        lifecycle: Lifecycle,
    ) -> None:
        self._subscriptions = subscriptions
        self._registry = registry
        self._store = store
        self._topics = topics
        self._defaults = defaults
        self._pull = pull
        self._cursors = cursors
        #: By number, the least recently used first.
        self._producers: OrderedDict[int, _Registration] = OrderedDict()
        self._counters = _Counters()
        self._counters_version = 0
        self._lock = asyncio.Lock()
        self._lifecycle = lifecycle

    async def load(self) -> None:
        """Load producers and counters. Remove leftovers of deleted topics."""
        counters = await self._store.state(COUNTERS_KEY)
        self._counters = _decode_counters(counters.value)
        self._counters_version = counters.version
        leftovers: list[StatePut] = []
        producers: dict[int, _Registration] = {}
        for key, state in (await self._store.states(PRODUCER_PREFIX)).items():
            number, topic_id = _decode_producer(key, state.value)
            if topic_id in self._topics.by_id:
                producers[number] = _Registration(topic_id, state.version)
            else:
                leftovers.append(StatePut(key, None, state.version))
        self._producers.update(sorted(producers.items()))
        try:
            await self._put_all(leftovers)
        except WriteFailed as error:
            # Leftovers do no harm, and a read-only store must stay readable.
            log.warning("cannot remove %d leftover producers: %s", len(leftovers), error)

    # --- producers --------------------------------------------------------------------------

    async def register_producer(
        self,
        caller: Caller,
        topic_name: str,
        producer_id: str | None = None,
        settings: PolicySettings = MappingProxyType({}),
    ) -> str:
        """Register a producer with a topic; return its id. Without `producer_id` the producer is
        new, and the topic may be created, with these `settings`. With `producer_id`, that producer
        must have no topic. Raise UnknownTopic, UnknownProducerId or AlreadyRegistered; TopicExists
        if the topic has other settings."""
        if producer_id is None:
            self._lifecycle.check_open()
            ensured = self._topics.ensure(topic_name, subscribing=False, settings=settings)
            topic = await self._lifecycle.run_shielded(ensured)
            _check_settings(topic, settings)
            return await self._lifecycle.run_shielded(self._new_producer(topic))
        topic = self._topics.named(topic_name)
        _check_settings(topic, settings)
        number = self._parse_producer_id(producer_id)
        return await self._lifecycle.run_shielded(self._register_again(topic, number))

    def check_producer(self, topic_name: str, producer_id: str) -> None:
        """Raise UnknownTopic, UnknownProducerId or NotRegistered if a producer may not publish to a
        topic."""
        topic = self._topics.named(topic_name)
        number = self._parse_producer_id(producer_id)
        registered_topic = self._find_topic(number)
        if registered_topic is None:
            raise NotRegistered(f"{producer_id} is not registered with any topic: register it")
        self._producers.move_to_end(number)
        if registered_topic is not topic:
            raise NotRegistered(
                f"{producer_id} is registered with topic {registered_topic.name}, "
                f"not with {topic.name}"
            )

    # --- consumers --------------------------------------------------------------------------

    async def register_consumer(
        self, caller: Caller, topic_name: str, consumer_id: str | None = None
    ) -> str:
        """Subscribe a consumer to a topic, from its present end on. Return its id, which is also
        the name of the subscription. Without `consumer_id` the consumer is new. Raise UnknownTopic,
        UnknownConsumerId or AlreadySubscribed. A topic whose name has the default `ephemeral` is
        created by its first consumer."""
        if not self._defaults.policy_for(topic_name).ephemeral:
            self._topics.named(topic_name)
        if consumer_id is None:
            consumer_id = await self._lifecycle.run_shielded(self._new_consumer())
        else:
            self._check_consumer_exists(consumer_id)
        if not await self._subscriptions.subscribe(consumer_id, topic_name):
            raise AlreadySubscribed(f"{consumer_id} is subscribed to topic {topic_name} already")
        return consumer_id

    def check_consumer(self, topic_name: str, consumer_id: str) -> None:
        """Raise UnknownTopic, UnknownConsumerId or UnknownSubscription if a consumer may not get
        messages of a topic."""
        topic = self._topics.named(topic_name)
        if self._pull.is_subscribed(topic, consumer_id):
            return
        self._check_consumer_exists(consumer_id)
        raise UnknownSubscription(f"{consumer_id} is not subscribed to topic {topic.name}")

    # --- for the broker ---------------------------------------------------------------------

    async def remove_topic(self, topic: Topic) -> None:
        """Remove the registrations of a deleted topic's producers."""
        async with self._lock:
            numbers = [
                number for number, each in self._producers.items() if each.topic_id == topic.id
            ]
            await self._put_all([self._make_removal(number) for number in numbers])
            for number in numbers:
                del self._producers[number]

    # --- implementation ---------------------------------------------------------------------

    async def _new_producer(self, topic: Topic) -> str:
        async with self._lock:
            counters = self._counters._replace(producers=self._counters.producers + 1)
            await self._register(topic, counters.producers, counters)
            return f"producer-{counters.producers}"

    async def _register_again(self, topic: Topic, number: int) -> str:
        """Register an existing producer that has no topic. Raise AlreadyRegistered."""
        async with self._lock:
            registered_topic = self._find_topic(number)
            if registered_topic is not None:
                raise AlreadyRegistered(
                    f"producer-{number} is registered with topic {registered_topic.name} already"
                )
            await self._register(topic, number, self._counters)
            return f"producer-{number}"

    async def _register(self, topic: Topic, number: int, counters: _Counters) -> None:
        """Store a producer's topic, with new counters if they have changed."""
        await self._store.room()
        self._topics.with_id(topic.id)  # a deletion from now on removes the producer, too
        # The producer still has a stored state while its former topic is being deleted.
        former = self._producers.get(number)
        version = 0 if former is None else former.version
        puts = [StatePut(_producer_key(number), str(topic.id).encode(), version)]
        if counters != self._counters:
            puts.append(StatePut(COUNTERS_KEY, _encode_counters(counters), self._counters_version))
        replaced_number = None  # the least recently used producer, if there are too many
        if former is None and len(self._producers) >= limits.REGISTERED_PRODUCERS:
            replaced_number = next(iter(self._producers))
            puts.append(self._make_removal(replaced_number))
        await self._store.append((), (), puts)
        if counters != self._counters:
            self._counters = counters
            self._counters_version += 1
        if replaced_number is not None:
            del self._producers[replaced_number]
        self._producers[number] = _Registration(topic.id, version + 1)
        self._producers.move_to_end(number)

    async def _new_consumer(self) -> str:
        """Allocate the id of a new consumer: a number whose name is not in use."""
        async with self._lock:
            number = self._counters.consumers + 1
            while self._is_name_used(f"consumer-{number}"):
                number += 1
            counters = self._counters._replace(consumers=number)
            state = await self._store.put_state(
                COUNTERS_KEY, _encode_counters(counters), self._counters_version
            )
            self._counters, self._counters_version = counters, state.version
            return f"consumer-{number}"

    async def _put_all(self, puts: list[StatePut]) -> None:
        for start in range(0, len(puts), shared_limits.CHANGES_AT_ONCE):
            await self._store.append((), (), puts[start : start + shared_limits.CHANGES_AT_ONCE])

    def _make_removal(self, number: int) -> StatePut:
        return StatePut(_producer_key(number), None, self._producers[number].version)

    # --- lookup -----------------------------------------------------------------------------

    def _parse_producer_id(self, producer_id: str) -> int:
        """Return the number in a producer's id. Raise UnknownProducerId."""
        number = _parse_number(_PRODUCER_ID, producer_id)
        if number is None or number > self._counters.producers:
            raise UnknownProducerId(
                f"there is no producer {producer_id[: shared_limits.NAME_BYTES]!r}"
            )
        return number

    def _find_topic(self, number: int) -> Topic | None:
        registration = self._producers.get(number)
        return None if registration is None else self._topics.by_id.get(registration.topic_id)

    def _check_consumer_exists(self, consumer_id: str) -> None:
        """Raise UnknownConsumerId if nobody subscribes by this name and no such id was
        allocated."""
        if self._pull.has_name(consumer_id):
            return
        number = _parse_number(_CONSUMER_ID, consumer_id)
        if number is None or number > self._counters.consumers:
            raise UnknownConsumerId(
                f"there is no consumer {consumer_id[: shared_limits.NAME_BYTES]!r}"
            )

    def _is_name_used(self, name: str) -> bool:
        """Return whether a name has a subscription of either mode, or a group's cursors."""
        return (
            self._pull.has_name(name)
            or name in self._registry.push.by_name
            or self._cursors.has_name(name)
        )


class _Registration(NamedTuple):
    """A producer's topic, and the version of the stored state."""

    topic_id: UUID
    version: int


class _Counters(NamedTuple):
    """The last numbers that were allocated."""

    producers: int = 0
    consumers: int = 0


def _check_settings(topic: Topic, settings: PolicySettings) -> None:
    """Raise TopicExists if a topic has another value for one of these settings."""
    for name, value in settings.items():
        present = getattr(topic.policy, name)
        if present != value:
            raise TopicExists(
                f"topic {topic.name} exists with {name} = {format_setting(present)}, not "
                f"{format_setting(value)}: alter the topic, or leave the setting out"
            )


def _parse_number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return None if match is None else int(match[1])


def _producer_key(number: int) -> str:
    return f"{PRODUCER_PREFIX}{number}"


def _decode_producer(key: str, value: bytes | None) -> tuple[int, UUID]:
    try:
        return int(key.removeprefix(PRODUCER_PREFIX)), UUID((value or b"").decode())
    except ValueError:
        raise DamagedStore(f"the store holds {value!r} for the producer {key!r}") from None


def _encode_counters(counters: _Counters) -> bytes:
    return json.dumps(counters._asdict()).encode()


def _decode_counters(value: bytes | None) -> _Counters:
    """Decode the value of `_encode_counters`; zero if nothing is stored. Raise DamagedStore for any
    other value."""
    if value is None:
        return _Counters()
    return decode_stored_object(value, _Counters, "the number of registrations")
