"""Make the accounts of an experiment: the reports of the peers beside the counts of the broker.

Programs of the user do not report; their accounts have only what the broker knows. `report` checks
the accounts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from quackmq.broker import Broker, Caller
from quackmq.cli.experiment.peer import Behaviour
from quackmq.cli.experiment.peer_process import PeerProcess
from quackmq.cli.experiment.program import ProgramProcess
from quackmq.cli.experiment.report import PublisherAccount, SubscriberAccount
from quackmq.model.topic import PartitionKey
from quackmq.protocols.line.codec.messages import Role
from quackmq.protocols.line.records import DEATHS, End
from quackmq.protocols.line.server import LineServer

#: The caller of all calls of the broker.
CALLER: Final = Caller(client="experiment")


class Leftovers(NamedTuple):
    """The entries of a subscriber's topics that it has not received, by the reason."""

    undelivered: int
    lost: int
    skipped: int


class Accounts:
    """Ask the broker of an experiment for its counts. Call it from the event loop."""

    def __init__(self, broker: Broker, line_server: LineServer) -> None:
        self._broker = broker
        self._line_server = line_server

    def key(self, topic_name: str) -> PartitionKey:
        return PartitionKey(self._broker.topic(topic_name).id, 0)

    async def topic_end(self, topic_name: str) -> int:
        """Return the number of entries that were published to a topic."""
        return (await self._broker.offsets(CALLER, self.key(topic_name))).next

    async def count_leftovers(self, subscriber: str, topics: Sequence[str]) -> Leftovers:
        """Count the entries that a subscriber has not received, over its topics."""
        undelivered = lost = skipped = 0
        for topic in topics:
            progress = await self._broker.pushing.progress(CALLER, subscriber, topic)
            undelivered += progress.lag
            lost += progress.counts.lost
            skipped += progress.counts.skipped
        return Leftovers(undelivered, lost, skipped)

    # --- publishers ---

    def of_publisher(self, process: PeerProcess) -> PublisherAccount:
        part = process.part
        return PublisherAccount(
            id=part.id,
            behaviour=part.behaviour,
            topics=part.topics,
            report=process.report,
            end=_describe_end(self._find_end(Role.PUB, part.id)),
        )

    def of_publishing_program(self, process: ProgramProcess) -> PublisherAccount:
        """Return the account of a program. If it has not connected, it has the id that was proposed
        to it."""
        record = process.record
        return PublisherAccount(
            id=process.program.id if record is None else record.id,
            behaviour=Behaviour.PROGRAM,
            topics=process.topics,
            report=None,
            program=process.result,
            end=process.end,
        )

    # --- subscribers ---

    async def of_subscriber(
        self, process: PeerProcess, behaviour: Behaviour, held: Mapping[str, int]
    ) -> SubscriberAccount:
        """Return the account of a subscriber, with its planned behaviour. `held` has the number of
        entries in each topic."""
        part = process.part
        leftovers = await self.count_leftovers(part.id, part.topics)
        end = self._find_end(Role.SUB, part.id)
        return SubscriberAccount(
            id=part.id,
            behaviour=behaviour,
            topics=part.topics,
            report=process.report,
            end=_describe_end(end),
            has_died=end in DEATHS,
            published=sum(held[topic] for topic in part.topics),
            skipped=leftovers.skipped,
            lost=leftovers.lost,
            left=leftovers.undelivered,
        )

    async def of_subscribing_program(
        self, process: ProgramProcess, held: Mapping[str, int]
    ) -> SubscriberAccount:
        """Return the account of a program. If it has not connected, it has the id that was proposed
        to it."""
        record = process.record
        name = process.program.id if record is None else record.id
        leftovers = await self.count_leftovers(name, process.topics)
        return SubscriberAccount(
            id=name,
            behaviour=Behaviour.PROGRAM,
            topics=process.topics,
            report=None,
            program=process.result,
            end=process.end,
            has_died=process.has_died,
            published=sum(held[topic] for topic in process.topics),
            skipped=leftovers.skipped,
            lost=leftovers.lost,
            left=leftovers.undelivered,
        )

    def _find_end(self, role: Role, name: str) -> End | None:
        """Return how the last connection of a peer has ended; None if none has."""
        for ended in reversed(self._line_server.ended_connections()):
            if (ended.record.role, ended.record.id) == (role, name):
                return ended.end
        return None


def _describe_end(end: End | None) -> str:
    return "still connected" if end is None else str(end)
