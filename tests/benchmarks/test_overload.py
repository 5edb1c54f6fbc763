"""The benchmark of overload says that it failed if a put or a member was lost, or puts got rare."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.overload import TOPIC, Load, publish, rows
from tests.protocols.http.peers import served

WELL = Load(1_000.0, 1.0, 1.0, 2.0, 0, 0)


@pytest.mark.parametrize(
    ("many", "is_reached"),
    [
        (WELL._replace(puts_per_s=800.0, put_ms=100.0, worst_health_ms=500.0), True),
        (WELL._replace(puts_per_s=600.0), False),
        (WELL._replace(lost_members=1), False),
        (WELL._replace(missing=1), False),
    ],
)
def test_what_must_hold_under_overload_is_judged(many: Load, is_reached: bool) -> None:
    assert all(row.reached for row in rows(WELL, many, 800)) is is_reached


async def test_publishers_count_what_is_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as running:
        host, port = running.address
        await publish(f"{host}:{port}", 3, 0.2)
        await asyncio.sleep(0)
        said = json.loads(capsys.readouterr().out)
        peer = await running.peer()
        (partition,) = (await peer.get(f"/v1/topics/{TOPIC}")).json["partitions"]
        assert 0 < said["acknowledged"] <= partition["next_offset"]
