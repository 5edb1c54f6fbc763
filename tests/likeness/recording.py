"""What Apache Kafka answers to each case, as it was recorded: `python -m tests.likeness.recording`.

With the recording, every test run compares this broker with Kafka, and none has to start Kafka for
it. Where Kafka is there, `tests/interop/test_likeness.py` checks that it still says what is
recorded. Record again when a case is new or has changed, or with a new version of Kafka; read the
difference before you commit it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.kafka import Kafka
from tests.likeness.asking import Broker, Case
from tests.likeness.cases import CASES
from tests.protocols.kafka.client import Client

RECORDED: Final = Path(__file__).with_name("answers.json")


class ComparedKafka(Kafka):
    """Kafka with settings that make it quick and comparable: groups do not wait for members that
    start with the first, and the two group protocols do not mix in one group."""

    properties = (
        "group.initial.rebalance.delay.ms=0\n"
        "offsets.topic.num.partitions=1\n"
        "transaction.state.log.num.partitions=1\n"
        "group.consumer.migration.policy=disabled\n"
    )


def recorded() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(RECORDED.read_text())
    return answers


def answers_at(address: str) -> Callable[[Case], Any]:
    """Run a case at a broker that listens there; return what it told, as JSON has it."""
    host, _, port = address.rpartition(":")

    async def run(case: Case) -> Any:
        clients: list[Client] = []

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection(host, int(port))))
            return clients[-1]

        try:
            broker = Broker(connect, case.name)
            await broker.coordinators()
            return await answers_of(broker, case)
        finally:
            for client in clients:
                await client.close()

    return lambda case: asyncio.run(run(case))


async def answers_of(broker: Broker, case: Case) -> Any:
    return json.loads(json.dumps(broker.plain(await case.run(broker))))


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        ComparedKafka().started(Path(directory)) as server,
    ):
        server.wait_until_it_listens()
        run = answers_at(server.address)
        answers = {name: run(case) for name, case in sorted(CASES.items())}
    # A line for each part of an answer, so that a difference can be read.
    lines = [
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(part, ensure_ascii=False) for part in answer)
        + "\n]"
        for name, answer in answers.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
