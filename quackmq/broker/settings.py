"""The settings of a broker, and the caller that each call names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.model.policy import Policy
from quackmq.model.topic_defaults import PolicySettings


@dataclass(frozen=True, slots=True)
class Caller:
    """The client on whose behalf a call is made."""

    principal: str = "anonymous"
    address: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """By default, topics are created by their first use, with the default partitions and policy."""

    auto_create_topics: bool = True
    default_partitions: int = 1
    default_policy: Policy = Policy()
    #: Settings of new topics by name pattern; they override the default policy.
    topic_defaults: Mapping[str, PolicySettings] = field(default_factory=dict)
    clean_interval_ms: int = field(default_factory=lambda: limits.CLEAN_INTERVAL_MS)
    full_topic_wait_ms: int = limits.FULL_TOPIC_WAIT_MS
    group_initial_delay_ms: int = shared_limits.GROUP_INITIAL_DELAY_MS
    merge_target_bytes: int = shared_limits.MERGE_TARGET_BYTES
