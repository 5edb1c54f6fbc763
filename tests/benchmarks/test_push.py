"""The benchmark of the push listeners measures what it says: every entry comes to every peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.push import Bench
from benchmarks.push_bare import TOPIC
from benchmarks.push_peers import LineSwarm, ProxySwarm, SubSwarm, middle


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root: Path = tmp_path_factory.mktemp("push")
    return Bench(root, 1.0)


@pytest.fixture(scope="module")
def listeners(bench: Bench) -> Iterator[dict[str, str]]:
    with bench.broker() as addresses:
        yield addresses


@pytest.mark.processes
def test_lines_come_from_the_broker_and_from_the_bare_loop(
    bench: Bench, listeners: dict[str, str]
) -> None:
    with bench.bare("line") as bare:
        for addresses in (listeners, bare):
            with closing(LineSwarm(addresses["line"], TOPIC, 3)) as swarm:
                assert swarm.run(5) > 0


@pytest.mark.processes
def test_lines_come_to_subscribers_that_are_behind(listeners: dict[str, str]) -> None:
    with closing(LineSwarm(listeners["line"], "behind", 3)) as swarm:
        assert swarm.run(120, at_once=100) > 0
        assert swarm.run(5, at_once=10) > 0


@pytest.mark.processes
def test_sub_sockets_hear_the_broker_and_the_bare_loop(
    bench: Bench, listeners: dict[str, str]
) -> None:
    with bench.bare("xpub") as bare:
        for each in (listeners, bare):
            with closing(SubSwarm(each["xsub"], each["xpub"], TOPIC, 3)) as swarm:
                assert swarm.run(10, at_once=5) > 0


@pytest.mark.processes
def test_clients_of_the_proxy_acknowledge_all(listeners: dict[str, str]) -> None:
    with closing(ProxySwarm(listeners, "acknowledged", 3)) as swarm:
        assert swarm.run(5) > 0
        assert swarm.run(5) > 0


def test_the_middle_of_some_values_is_the_one_in_the_middle() -> None:
    assert middle([5.0, 1.0, 3.0]) == 3.0
