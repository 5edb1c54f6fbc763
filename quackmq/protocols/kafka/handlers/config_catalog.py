"""The configs that Kafka's clients see of a topic, a broker and a group, and what they mean here.

A topic's policies are spelled in `quackmq.model.policy`. Where Kafka has a name for one, it is
shown under that name alone, with ours beside it as a synonym, so that a tool which writes back what
it has read never names one thing twice; both names can be set. Beside the policies there are
settings of Kafka's that hold here always: to ask for what holds is granted, for anything else
refused. Names that Kafka knows and we do not are refused like all others.

Pure: facts in, values out. What is altered and how is `resources`' business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker import BrokerSettings, GroupSettings
from quackmq.errors import InvalidPolicy
from quackmq.model.policy import CONFIG_ALIASES, CONFIG_PREFIX, POLICY_DOCUMENTATION, Policy
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Node
from quackmq.protocols.kafka.codec.writer import Fields

#: All that a broker knows of where its store keeps things is that it is one place.
LOG_DIRECTORY: Final = "quackmq"
#: The config of a broker that tells where its HTTP door is.
HTTP_ADDRESS: Final = CONFIG_PREFIX + "http.address"
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})

_LATEST_MS: Final = str(2**63 - 1)
_BOOLEANS: Final = {"true": True, "false": False}
_NUMBER: Final = re.compile("[0-9]{1,9}")


class Kind(IntEnum):
    """Kafka's numbers for the types of values."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    LIST = 7


class Source(IntEnum):
    """Kafka's numbers for where a value comes from."""

    TOPIC = 1
    BROKER = 4
    DEFAULT = 5
    GROUP = 8


class Synonym(NamedTuple):
    name: str
    value: str
    source: Source


class Config(NamedTuple):
    """A config as it is shown: its value is that of the first synonym."""

    name: str
    value: str
    source: Source
    kind: Kind
    documentation: str
    read_only: bool = False
    synonyms: tuple[Synonym, ...] = ()


class Fixed(NamedTuple):
    """A setting of Kafka's that has one value here; `broker_name` is what a broker calls it."""

    value: str
    kind: Kind
    documentation: str
    broker_name: str


class Fact(NamedTuple):
    """Something true of every broker."""

    value: str | int
    kind: Kind
    documentation: str


FIXED: Final = {
    "cleanup.policy": Fixed(
        "delete",
        Kind.LIST,
        "Entries go by age and size as a whole; there is no compaction by key.",
        "log.cleanup.policy",
    ),
    "compression.type": Fixed(
        "producer",
        Kind.STRING,
        "Batches are kept as their producer compressed them.",
        "compression.type",
    ),
    "message.timestamp.type": Fixed(
        "CreateTime",
        Kind.STRING,
        "Timestamps are the producer's; by when an entry was appended, its age is counted.",
        "log.message.timestamp.type",
    ),
    "message.timestamp.before.max.ms": Fixed(
        _LATEST_MS,
        Kind.LONG,
        "Timestamps may lie in the past as far as they like.",
        "log.message.timestamp.before.max.ms",
    ),
    "message.timestamp.after.max.ms": Fixed(
        _LATEST_MS,
        Kind.LONG,
        "Timestamps may lie in the future as far as they like.",
        "log.message.timestamp.after.max.ms",
    ),
    "min.insync.replicas": Fixed(
        "1", Kind.INT, "There is one node, and it is in sync with itself.", "min.insync.replicas"
    ),
    "segment.bytes": Fixed(
        str(shared_limits.SEGMENT_BYTES),
        Kind.INT,
        "A segment's file is closed at this size. Readers and retention do not notice.",
        "log.segment.bytes",
    ),
    "unclean.leader.election.enable": Fixed(
        "false", Kind.BOOLEAN, "There is nobody to elect.", "unclean.leader.election.enable"
    ),
}

BROKER_FACTS: Final = {
    "log.dirs": Fact(LOG_DIRECTORY, Kind.STRING, "Stands for the one place of all data."),
    "default.replication.factor": Fact(1, Kind.INT, "There is one node."),
    "delete.topic.enable": Fact("true", Kind.BOOLEAN, "Topics can be deleted."),
    "socket.request.max.bytes": Fact(
        limits.KAFKA_PRODUCE_BYTES, Kind.INT, "The largest request with batches."
    ),
    "fetch.max.bytes": Fact(limits.KAFKA_FETCH_BYTES, Kind.INT, "The largest answer to a fetch."),
    "max.connections": Fact(limits.KAFKA_CONNECTIONS, Kind.INT, "Connections at once."),
    "max.incremental.fetch.session.cache.slots": Fact(
        0, Kind.INT, "Fetches name all their partitions each time."
    ),
    "offset.metadata.max.bytes": Fact(
        shared_limits.CURSOR_METADATA_BYTES,
        Kind.INT,
        "What a client may note beside a committed offset.",
    ),
    "group.coordinator.rebalance.protocols": Fact(
        "classic,consumer", Kind.LIST, "How groups work here."
    ),
    "group.consumer.assignors": Fact(
        "uniform,range", Kind.LIST, "How partitions are shared, in the newer group protocol."
    ),
    "group.consumer.migration.policy": Fact(
        "disabled", Kind.STRING, "The members of a group all speak one protocol."
    ),
    "group.consumer.session.timeout.ms": Fact(
        shared_limits.CONSUMER_SESSION_MS, Kind.INT, "A session in the newer group protocol."
    ),
    "group.consumer.heartbeat.interval.ms": Fact(
        shared_limits.CONSUMER_HEARTBEAT_MS,
        Kind.INT,
        "How often members are heard in that protocol.",
    ),
    "group.min.session.timeout.ms": Fact(
        shared_limits.SESSION_MIN_MS, Kind.INT, "The shortest session."
    ),
    "group.max.session.timeout.ms": Fact(
        shared_limits.SESSION_MAX_MS, Kind.INT, "The longest session."
    ),
    "group.max.size": Fact(shared_limits.GROUP_MEMBERS, Kind.INT, "Members of a group."),
    "offsets.retention.minutes": Fact(
        shared_limits.GROUP_EXPIRY_MS // 60_000,
        Kind.INT,
        "A group without members and commits for so long is forgotten.",
    ),
}
#: What people may set of a group: the setting, its type and what it does.
GROUP_SETTINGS: Final = {
    CONFIG_PREFIX + "holds_retention": (
        "holds_retention",
        Kind.BOOLEAN,
        "Retention waits for what the group has not read.",
    ),
    "consumer.session.timeout.ms": (
        "session_timeout_ms",
        Kind.INT,
        "How long a member of the newer group protocol may be silent.",
    ),
    "consumer.heartbeat.interval.ms": (
        "heartbeat_interval_ms",
        Kind.INT,
        "How often a member of the newer group protocol is to be heard.",
    ),
}
#: What people may set of a broker: the setting, its type and what it does.
_BROKER_SETTINGS: Final = {
    "auto.create.topics.enable": (
        "auto_create_topics",
        Kind.BOOLEAN,
        "Topics come to life by their first use.",
    ),
    "num.partitions": (
        "default_partitions",
        Kind.INT,
        "Partitions of a topic that is created without a number.",
    ),
    "group.initial.rebalance.delay.ms": (
        "group_initial_delay_ms",
        Kind.INT,
        "How long the first members of a group wait for others.",
    ),
}

#: What a broker calls the default of a topic's config, where that has a name of its own.
_BROKER_NAMES: Final = {
    "retention.ms": "log.retention.ms",
    "retention.bytes": "log.retention.bytes",
    "max.message.bytes": "message.max.bytes",
}
_ALIAS_OF: Final = {field: alias for alias, field in CONFIG_ALIASES.items()}


# --- topics --------------------------------------------------------------------------------------


def policy_of(configs: Iterable[tuple[str, str | None]], base: Policy, default: Policy) -> Policy:
    """`base` with these configs, None standing for the value of `default`. InvalidPolicy names the
    one that cannot be."""
    defaults = default.to_configs()
    given: dict[str, str | None] = {}
    for name, value in configs:
        if name in given:
            raise InvalidPolicy(f"{name} is given twice")
        given[name] = defaults.get(name) if value is None else value
    for name, fixed in FIXED.items():
        if given.pop(name, None) not in (None, fixed.value):
            raise InvalidPolicy(f"{name} is always {fixed.value} here. {fixed.documentation}")
    return Policy.from_configs(given, base)


def is_topic_config(name: str) -> bool:
    """Whether a topic has a config of this name."""
    return name in FIXED or name in Policy().to_configs()


def changed_list(name: str, items: str, remove: bool) -> str:
    """The value of a list with items appended or removed. InvalidPolicy if it is no list."""
    fixed = FIXED.get(name)
    if fixed is None or fixed.kind is not Kind.LIST:
        raise InvalidPolicy(f"{name} is no list: nothing can be added to it or taken from it")
    present = fixed.value.split(",")
    wanted = items.split(",")
    if remove:
        return ",".join(item for item in present if item not in wanted)
    return ",".join(dict.fromkeys(present + wanted))


def topic_configs(policy: Policy, default: Policy) -> list[Config]:
    """Every config of a topic."""
    fixed = [
        Config(
            name,
            each.value,
            Source.DEFAULT,
            each.kind,
            each.documentation,
            read_only=True,
            synonyms=(Synonym(each.broker_name, each.value, Source.DEFAULT),),
        )
        for name, each in FIXED.items()
    ]
    return [*_policy_configs(policy, default), *fixed]


def under_our_name(configs: Iterable[Config], name: str) -> Config | None:
    """A config that is shown under Kafka's name, by the name that it has here."""
    alias = _ALIAS_OF.get(name.removeprefix(CONFIG_PREFIX))
    if alias is None or not name.startswith(CONFIG_PREFIX):
        return None
    return next(config._replace(name=name) for config in configs if config.name == alias)


def _policy_configs(policy: Policy, default: Policy) -> Iterator[Config]:
    own, ours, builtin = policy.to_configs(), default.to_configs(), Policy().to_configs()
    for field in dataclasses.fields(Policy):
        our_name = CONFIG_PREFIX + field.name
        name = _ALIAS_OF.get(field.name, our_name)
        value, ours_value = (_shown(name, each[our_name]) for each in (own, ours))
        is_builtin = ours_value == _shown(name, builtin[our_name])
        synonyms = [
            Synonym(
                _BROKER_NAMES.get(name, name),
                ours_value,
                Source.DEFAULT if is_builtin else Source.BROKER,
            )
        ]
        if value != ours_value:
            names = dict.fromkeys((name, our_name))
            synonyms[:0] = [Synonym(each, value, Source.TOPIC) for each in names]
        yield Config(
            name,
            value,
            synonyms[0].source,
            _kind_of(field.default),
            POLICY_DOCUMENTATION[field.name],
            synonyms=tuple(synonyms),
        )


def _shown(name: str, value: str) -> str:
    """Kafka has no word for a message without a bound, and there is one."""
    return str(shared_limits.BATCH_BYTES) if (name, value) == ("max.message.bytes", "-1") else value


def _kind_of(default: object) -> Kind:
    if isinstance(default, bool):
        return Kind.BOOLEAN
    return Kind.STRING if isinstance(default, str) else Kind.LONG


# --- brokers and groups --------------------------------------------------------------------------


def broker_configs(
    node: Node, settings: BrokerSettings, http: tuple[str, int] | None = None
) -> list[Config]:
    """What is true of this broker, under the names by which Kafka's tools ask for it; and where its
    HTTP door is, which clients of both learn here."""
    address = f"PLAINTEXT://{node.host}:{node.port}"
    facts = {
        "node.id": Fact(node.id, Kind.INT, "The only node of the cluster."),
        "broker.id": Fact(node.id, Kind.INT, "The same."),
        "advertised.listeners": Fact(address, Kind.STRING, "Where clients find this broker."),
        **BROKER_FACTS,
    }
    if http is not None:
        facts[HTTP_ADDRESS] = Fact(
            _reached_by(node, *http), Kind.STRING, "Where the HTTP door of this broker is found."
        )
    configs = [
        _broker_config(name, str(fact.value), Source.DEFAULT, fact.kind, fact.documentation)
        for name, fact in facts.items()
    ]
    defaults = BrokerSettings()
    for name, (field, kind, documentation) in _BROKER_SETTINGS.items():
        value, default = getattr(settings, field), getattr(defaults, field)
        source = Source.DEFAULT if value == default else Source.BROKER
        configs.append(_broker_config(name, str(value).lower(), source, kind, documentation))
    for config in topic_configs(settings.default_policy, settings.default_policy):
        (synonym,) = config.synonyms
        configs.append(config._replace(name=synonym.name, read_only=True))
    return configs


def _reached_by(node: Node, host: str, port: int) -> str:
    """Another door's address as the peer of this one can use it: a door that listens everywhere is
    found where this one is."""
    if host in _EVERYWHERE:
        host = node.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def group_configs(settings: GroupSettings) -> list[Config]:
    configs = []
    defaults = GroupSettings()
    for name, (field, kind, documentation) in GROUP_SETTINGS.items():
        value, default = str(getattr(settings, field)), str(getattr(defaults, field))
        synonyms = [Synonym(name, default.lower(), Source.DEFAULT)]
        if value != default:
            synonyms.insert(0, Synonym(name, value.lower(), Source.GROUP))
        shown = (synonyms[0].value, synonyms[0].source, kind, documentation)
        configs.append(Config(name, *shown, synonyms=tuple(synonyms)))
    return configs


def group_settings(
    configs: Iterable[tuple[str, str | None]], present: GroupSettings
) -> GroupSettings:
    """The settings with these configs changed; None is the default. InvalidPolicy."""
    changed: dict[str, int] = {}
    for name, text in configs:
        if name not in GROUP_SETTINGS:
            known = ", ".join(GROUP_SETTINGS)
            raise InvalidPolicy(f"a group has no config {name[:100]!r}; it has {known}")
        field, kind, _ = GROUP_SETTINGS[name]
        if text is None:
            changed[field] = getattr(GroupSettings(), field)
        elif kind is Kind.BOOLEAN:
            if text.lower() not in _BOOLEANS:
                raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: it is true or false")
            changed[field] = _BOOLEANS[text.lower()]
        else:
            if not _NUMBER.fullmatch(text):
                raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: it is a number")
            changed[field] = int(text)
    return GroupSettings(**{**present._asdict(), **changed})


def _broker_config(name: str, value: str, source: Source, kind: Kind, documentation: str) -> Config:
    synonyms = (Synonym(name, value, source),)
    return Config(name, value, source, kind, documentation, read_only=True, synonyms=synonyms)


# --- as the protocol has them --------------------------------------------------------------------


def fields_of(config: Config, synonyms: bool = False, documentation: bool = False) -> Fields:
    """A config as DescribeConfigs and CreateTopics answer it."""
    return {
        "name": config.name,
        "value": config.value,
        "read_only": config.read_only,
        "config_source": config.source,
        "is_sensitive": False,
        "config_type": config.kind,
        "documentation": config.documentation if documentation else None,
        "synonyms": [synonym._asdict() for synonym in config.synonyms] if synonyms else [],
    }
