"""The Kafka clients of the suite, and the decorators that run a proof with each of them.

A proof is one test function, written against clients/interface.py. It says which capability of the
table in docs/kafka.md it proves, and runs with each client that has this capability: table.MISSING
declares which clients do not, and why. If a client has the capability, but this proof does not fit
it, the proof says so in `but`, with the reason; another test must then prove the cell.

    @each_client("groups", but={"kcat": "does not tell its assignment"})
    def test_...(broker: RunningBroker, client: Client) -> None: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest

from tests.interop.clients.aiokafka import Aiokafka
from tests.interop.clients.confluent import Confluent
from tests.interop.clients.interface import Client
from tests.interop.clients.java import Java
from tests.interop.clients.kafka_python import KafkaPython
from tests.interop.clients.kafkajs import Kafkajs
from tests.interop.clients.kcat import Kcat
from tests.interop.clients.platformatic import Platformatic
from tests.interop.table import CAPABILITIES, CLIENTS, Cell, reason_for

Reasons = Mapping[str, str]


class Adapter(NamedTuple):
    """How to open a client.

    `needs` names the program that must be there (tests/conftest.py), and `fixture` the process that
    drives a client of another language.
    """

    kind: type[Client]
    needs: str | None = None
    fixture: str | None = None

    def open(self, request: pytest.FixtureRequest) -> Client:
        if self.fixture is None:
            return self.kind()
        return self.kind(request.getfixturevalue(self.fixture))  # type: ignore[call-arg]


ADAPTERS: Final[Mapping[str, Adapter]] = {
    "confluent-kafka": Adapter(Confluent),
    "aiokafka": Adapter(Aiokafka),
    "kafka-python": Adapter(KafkaPython),
    "kafkajs": Adapter(Kafkajs, "kafkajs", "kafkajs_driver"),
    "@platformatic/kafka": Adapter(Platformatic, "@platformatic/kafka", "platformatic_driver"),
    "kafka-clients (Java)": Adapter(Java, "kafka-clients", "java_driver"),
    "kcat": Adapter(Kcat, "kcat"),
}
assert ADAPTERS.keys() == CLIENTS.keys()


def each_client(capability: str, *parts: str, but: Reasons | None = None) -> pytest.MarkDecorator:
    """Run a proof with each client that has the capability, or these parts of it.

    The proof gets a `client`, which is closed when it is over.
    """
    parameters = [
        pytest.param(name, id=name, marks=marks(name, capability, *parts))
        for name in capable(but or {}, capability, *parts)
    ]
    return pytest.mark.parametrize("client", parameters, indirect=True)


def each_part(capability: str) -> pytest.MarkDecorator:
    """Run a proof with each `client` and each `part` of a capability that it has."""
    parameters = [
        pytest.param(name, part, id=f"{name}-{part}", marks=marks(name, capability, part))
        for part in CAPABILITIES[capability]
        for name in capable({}, capability, part)
    ]
    return pytest.mark.parametrize(("client", "part"), parameters, indirect=["client"])


def each_program(capability: str, but: Reasons | None = None) -> pytest.MarkDecorator:
    """Run a scenario (scenarios.py) with the programs of each client.

    The scenario gets a `kind`, the class of the client, of which nothing is opened.
    """
    parameters = [
        pytest.param(
            ADAPTERS[name].kind,
            id=name,
            marks=[*marks(name, capability), pytest.mark.processes],
        )
        for name in capable(but or {}, capability)
    ]
    return pytest.mark.parametrize("kind", parameters)


def capable(but: Reasons, capability: str, *parts: str) -> list[str]:
    """Return the clients that have the capability, or these parts of it, and are not in `but`."""
    having = [
        name
        for name in ADAPTERS
        if not any(reason_for(Cell(name, capability, part)) for part in parts or ("",))
    ]
    idle = but.keys() - having
    assert not idle, f"{capability}: {idle} cannot do it anyway, or is no client"
    return [name for name in having if name not in but]


def marks(name: str, capability: str, *parts: str) -> list[Any]:
    needs = ADAPTERS[name].needs
    proves = pytest.mark.proves(name, capability, *parts)
    return [proves] if needs is None else [proves, pytest.mark.needs(needs)]
