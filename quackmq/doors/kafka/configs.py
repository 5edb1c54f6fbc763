"""Topic configs as Kafka's clients name them, and the policies that they mean here.

Our policies are spelled in `quackmq.policy`. Beside them there are settings of Kafka's that hold
here always; to ask for such a value is granted, for another one refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quackmq.errors import InvalidPolicy
from quackmq.policy import Policy
from quackmq.wire.kafka.writer import Fields

ALWAYS: Final = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
}

#: Kafka's numbers for where a value comes from.
_FROM_TOPIC: Final = 1
_FROM_DEFAULT: Final = 5


def policy_of(configs: Iterable[tuple[str, str | None]], base: Policy) -> Policy:
    """`base` with these configs; InvalidPolicy names the one that cannot be."""
    given: dict[str, str | None] = {}
    for name, value in configs:
        if name in given:
            raise InvalidPolicy(f"{name} is given twice")
        given[name] = value
    for name, only_value in ALWAYS.items():
        if given.pop(name, None) not in (None, only_value):
            raise InvalidPolicy(f"{name} is always {only_value} here")
    return Policy.from_configs(given, base)


def described(policy: Policy, base: Policy) -> list[Fields]:
    """Every config of a topic, as CreateTopics answers it."""
    default = base.to_configs()
    own: list[Fields] = [
        {
            "name": name,
            "value": value,
            "read_only": False,
            "config_source": _FROM_DEFAULT if default[name] == value else _FROM_TOPIC,
            "is_sensitive": False,
        }
        for name, value in policy.to_configs().items()
    ]
    fixed: list[Fields] = [
        {
            "name": name,
            "value": value,
            "read_only": True,
            "config_source": _FROM_DEFAULT,
            "is_sensitive": False,
        }
        for name, value in ALWAYS.items()
    ]
    return own + fixed
