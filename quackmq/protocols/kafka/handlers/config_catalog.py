"""The configs of topics, brokers and groups that Kafka clients see, and their meaning here.

`quackmq.model.policy` defines the names of a topic's policies. A policy that Kafka also has appears
only under Kafka's name, with our name as a synonym. So a tool that writes back what it has read
never names one policy twice. Both names can be set. In addition there are Kafka settings with a
fixed value here: setting that value is accepted, any other value is refused. Other names are
refused, even if Kafka knows them.

Pure: facts in, values out. `config_apis` alters configs.
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

#: The name of the broker's only log directory; the broker does not know the store's paths.
LOG_DIRECTORY: Final = "quackmq"
#: The config of a broker that holds the address of its HTTP listener.
HTTP_ADDRESS: Final = CONFIG_PREFIX + "http.address"
#: The hosts of a listener on all interfaces.
_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})

#: The greatest LONG: no bound.
_LATEST_MS: Final = str(2**63 - 1)
_BOOLEANS: Final = {"true": True, "false": False}
#: Nine digits always fit Kafka's INT of 32 bits.
_NUMBER: Final = re.compile("[0-9]{1,9}")


class Kind(IntEnum):
    """Kafka's numbers for the types of values."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    LIST = 7


class Source(IntEnum):
    """Kafka's numbers for the source of a value."""

    TOPIC = 1
    BROKER = 4
    DEFAULT = 5
    GROUP = 8


class Synonym(NamedTuple):
    name: str
    value: str
    source: Source


class Config(NamedTuple):
    """A config as clients see it; its value is that of the first synonym."""

    name: str
    value: str
    source: Source
    kind: Kind
    documentation: str
    read_only: bool = False
    synonyms: tuple[Synonym, ...] = ()


class Fixed(NamedTuple):
    """A Kafka setting with a fixed value; `broker_name` is the name of its broker default."""

    value: str
    kind: Kind
    documentation: str
    broker_name: str


class Fact(NamedTuple):
    """A fact that is true of every broker."""

    value: str | int
    kind: Kind
    documentation: str


FIXED: Final = {
    "cleanup.policy": Fixed(
        "delete",
        Kind.LIST,
        "Records are deleted by age and size; there is no compaction by key.",
        "log.cleanup.policy",
    ),
    "compression.type": Fixed(
        "producer",
        Kind.STRING,
        "Batches are stored as their producer compressed them.",
        "compression.type",
    ),
    "message.timestamp.type": Fixed(
        "CreateTime",
        Kind.STRING,
        "Timestamps are the producer's; the age of a record counts from its append.",
        "log.message.timestamp.type",
    ),
    "message.timestamp.before.max.ms": Fixed(
        _LATEST_MS,
        Kind.LONG,
        "Timestamps may lie any time in the past.",
        "log.message.timestamp.before.max.ms",
    ),
    "message.timestamp.after.max.ms": Fixed(
        _LATEST_MS,
        Kind.LONG,
        "Timestamps may lie any time in the future.",
        "log.message.timestamp.after.max.ms",
    ),
    "min.insync.replicas": Fixed(
        "1", Kind.INT, "There is one node, and it is in sync with itself.", "min.insync.replicas"
    ),
    "segment.bytes": Fixed(
        str(shared_limits.SEGMENT_BYTES),
        Kind.INT,
        "A segment's file is closed at this size. This does not affect readers or retention.",
        "log.segment.bytes",
    ),
    "unclean.leader.election.enable": Fixed(
        "false",
        Kind.BOOLEAN,
        "There is one node, so there are no elections.",
        "unclean.leader.election.enable",
    ),
}

BROKER_FACTS: Final = {
    "log.dirs": Fact(LOG_DIRECTORY, Kind.STRING, "A name for the only data directory."),
    "default.replication.factor": Fact(1, Kind.INT, "There is one node."),
    "delete.topic.enable": Fact("true", Kind.BOOLEAN, "Topics can be deleted."),
    "socket.request.max.bytes": Fact(
        limits.KAFKA_PRODUCE_BYTES, Kind.INT, "The largest request with batches."
    ),
    "fetch.max.bytes": Fact(limits.KAFKA_FETCH_BYTES, Kind.INT, "The largest response to a fetch."),
    "max.connections": Fact(
        limits.KAFKA_CONNECTIONS, Kind.INT, "The maximum number of open connections."
    ),
    "max.incremental.fetch.session.cache.slots": Fact(
        0, Kind.INT, "There are no fetch sessions: each fetch names all its partitions."
    ),
    "offset.metadata.max.bytes": Fact(
        shared_limits.CURSOR_METADATA_BYTES,
        Kind.INT,
        "The size of the metadata that a client may commit with an offset.",
    ),
    "group.coordinator.rebalance.protocols": Fact(
        "classic,consumer", Kind.LIST, "The supported group protocols."
    ),
    "group.consumer.assignors": Fact(
        "uniform,range", Kind.LIST, "The assignors of the newer group protocol."
    ),
    "group.consumer.migration.policy": Fact(
        "disabled", Kind.STRING, "All members of a group use one group protocol."
    ),
    "group.consumer.session.timeout.ms": Fact(
        shared_limits.CONSUMER_SESSION_MS,
        Kind.INT,
        "The session timeout in the newer group protocol.",
    ),
    "group.consumer.heartbeat.interval.ms": Fact(
        shared_limits.CONSUMER_HEARTBEAT_MS,
        Kind.INT,
        "The heartbeat interval in the newer group protocol.",
    ),
    "group.min.session.timeout.ms": Fact(
        shared_limits.SESSION_MIN_MS, Kind.INT, "The shortest session timeout."
    ),
    "group.max.session.timeout.ms": Fact(
        shared_limits.SESSION_MAX_MS, Kind.INT, "The longest session timeout."
    ),
    "group.max.size": Fact(
        shared_limits.GROUP_MEMBERS, Kind.INT, "The maximum number of members of a group."
    ),
    "offsets.retention.minutes": Fact(
        shared_limits.GROUP_EXPIRY_MS // 60_000,
        Kind.INT,
        "A group expires after this time without members and commits.",
    ),
}
#: The settings of a group: the field, its type and its documentation.
GROUP_SETTINGS: Final = {
    CONFIG_PREFIX + "holds_retention": (
        "holds_retention",
        Kind.BOOLEAN,
        "Retention does not delete records that the group has not read.",
    ),
    "consumer.session.timeout.ms": (
        "session_timeout_ms",
        Kind.INT,
        "How long a member of the newer group protocol may be silent.",
    ),
    "consumer.heartbeat.interval.ms": (
        "heartbeat_interval_ms",
        Kind.INT,
        "How often a member of the newer group protocol sends a heartbeat.",
    ),
}
#: The settings of a broker: the field, its type and its documentation.
_BROKER_SETTINGS: Final = {
    "auto.create.topics.enable": (
        "auto_create_topics",
        Kind.BOOLEAN,
        "The first use of a topic creates it.",
    ),
    "num.partitions": (
        "default_partitions",
        Kind.INT,
        "The number of partitions of a topic that is created without one.",
    ),
    "group.initial.rebalance.delay.ms": (
        "group_initial_delay_ms",
        Kind.INT,
        "How long the first members of a group wait for others.",
    ),
}

#: The names of the broker defaults of topic configs, where they differ.
_BROKER_NAMES: Final = {
    "retention.ms": "log.retention.ms",
    "retention.bytes": "log.retention.bytes",
    "max.message.bytes": "message.max.bytes",
}
_ALIAS_BY_FIELD: Final = {field: alias for alias, field in CONFIG_ALIASES.items()}


# --- topics --------------------------------------------------------------------------------------


def policy_of(configs: Iterable[tuple[str, str | None]], base: Policy, default: Policy) -> Policy:
    """Return `base` with these configs; None means the value of `default`. Raise InvalidPolicy,
    which names the invalid config.
    """
    configs = list(configs)
    if not configs:
        return base
    defaults = default.to_configs()
    values: dict[str, str | None] = {}
    for name, value in configs:
        if name in values:
            raise InvalidPolicy(f"{name} is given twice")
        values[name] = defaults.get(name) if value is None else value
    for name, fixed in FIXED.items():
        if values.pop(name, None) not in (None, fixed.value):
            raise InvalidPolicy(f"{name} is always {fixed.value} here. {fixed.documentation}")
    return Policy.from_configs(values, base)


def is_topic_config(name: str) -> bool:
    """Return whether a topic has a config of this name."""
    return name in FIXED or name in Policy().to_configs()


def changed_list(name: str, items: str, is_removal: bool) -> str:
    """Return a list's value with items added or removed; raise InvalidPolicy if it is no list."""
    fixed = FIXED.get(name)
    if fixed is None or fixed.kind is not Kind.LIST:
        raise InvalidPolicy(f"{name} is no list: nothing can be added to it or taken from it")
    current = fixed.value.split(",")
    changed_items = items.split(",")
    if is_removal:
        return ",".join(item for item in current if item not in changed_items)
    return ",".join(dict.fromkeys(current + changed_items))


def topic_configs(policy: Policy, default: Policy) -> list[Config]:
    """Return every config of a topic."""
    fixed = [
        Config(
            name,
            setting.value,
            Source.DEFAULT,
            setting.kind,
            setting.documentation,
            read_only=True,
            synonyms=(Synonym(setting.broker_name, setting.value, Source.DEFAULT),),
        )
        for name, setting in FIXED.items()
    ]
    return [*_policy_configs(policy, default), *fixed]


def under_our_name(configs: Iterable[Config], name: str) -> Config | None:
    """Return a config under our name, if it normally appears under Kafka's name."""
    alias = _ALIAS_BY_FIELD.get(name.removeprefix(CONFIG_PREFIX))
    if alias is None or not name.startswith(CONFIG_PREFIX):
        return None
    return next(config._replace(name=name) for config in configs if config.name == alias)


def _policy_configs(policy: Policy, default: Policy) -> Iterator[Config]:
    """Yield a config for each field of a policy. Its synonyms are ordered by precedence: the
    topic's own value under both names, if it differs from the default, then the broker's default.
    """
    topic_values, default_values, builtin_values = (
        policy.to_configs(),
        default.to_configs(),
        Policy().to_configs(),
    )
    for field in dataclasses.fields(Policy):
        our_name = CONFIG_PREFIX + field.name
        name = _ALIAS_BY_FIELD.get(field.name, our_name)
        value, default_value = (
            _displayed_value(name, each[our_name]) for each in (topic_values, default_values)
        )
        is_builtin = default_value == _displayed_value(name, builtin_values[our_name])
        synonyms = [
            Synonym(
                _BROKER_NAMES.get(name, name),
                default_value,
                Source.DEFAULT if is_builtin else Source.BROKER,
            )
        ]
        if value != default_value:
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


def _displayed_value(name: str, value: str) -> str:
    """Return a value as clients see it. -1 (no bound) of max.message.bytes becomes the
    broker's bound, because Kafka has no value for "no bound" there.
    """
    return str(shared_limits.BATCH_BYTES) if (name, value) == ("max.message.bytes", "-1") else value


def _kind_of(default: object) -> Kind:
    """Return Kafka's type for a policy field, derived from the field's default value."""
    if isinstance(default, bool):
        return Kind.BOOLEAN
    return Kind.STRING if isinstance(default, str) else Kind.LONG


# --- brokers and groups --------------------------------------------------------------------------


def broker_configs(
    node: Node, settings: BrokerSettings, http: tuple[str, int] | None = None
) -> list[Config]:
    """Return the facts about this broker, under the names that Kafka's tools use. They include the
    address of its HTTP listener, for clients that use both protocols.
    """
    address = f"PLAINTEXT://{node.host}:{node.port}"
    facts = {
        "node.id": Fact(node.id, Kind.INT, "The only node of the cluster."),
        "broker.id": Fact(node.id, Kind.INT, "The same as node.id."),
        "advertised.listeners": Fact(
            address, Kind.STRING, "The address that clients use for this broker."
        ),
        **BROKER_FACTS,
    }
    if http is not None:
        facts[HTTP_ADDRESS] = Fact(
            _reachable_address(node, *http),
            Kind.STRING,
            "The address of this broker's HTTP listener.",
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


def _reachable_address(node: Node, host: str, port: int) -> str:
    """Return another listener's address as this peer can use it. A listener on all interfaces has
    the same host as this one.
    """
    if host in _EVERYWHERE:
        host = node.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def group_configs(settings: GroupSettings) -> list[Config]:
    """Return every config of a group. A value that differs from the default comes first among the
    synonyms.
    """
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
    configs: Iterable[tuple[str, str | None]], current: GroupSettings
) -> GroupSettings:
    """Return the settings with these configs; None means the default. Raise InvalidPolicy."""
    changed: dict[str, int] = {}
    for name, text in configs:
        if name not in GROUP_SETTINGS:
            names = ", ".join(GROUP_SETTINGS)
            raise InvalidPolicy(f"a group has no config {name[:100]!r}; it has {names}")
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
    return GroupSettings(**{**current._asdict(), **changed})


def _broker_config(name: str, value: str, source: Source, kind: Kind, documentation: str) -> Config:
    """Return a read-only config whose only synonym is itself."""
    synonyms = (Synonym(name, value, source),)
    return Config(name, value, source, kind, documentation, read_only=True, synonyms=synonyms)


# --- response fields -------------------------------------------------------------------------


def fields_of(
    config: Config, with_synonyms: bool = False, with_documentation: bool = False
) -> Fields:
    """Return the fields of a config for DescribeConfigs and CreateTopics."""
    return {
        "name": config.name,
        "value": config.value,
        "read_only": config.read_only,
        "config_source": config.source,
        "is_sensitive": False,
        "config_type": config.kind,
        "documentation": config.documentation if with_documentation else None,
        "synonyms": [synonym._asdict() for synonym in config.synonyms] if with_synonyms else [],
    }
