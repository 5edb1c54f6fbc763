"""Each simulation once or twice, for `make check`: the sweeps beside it try many more seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import transactors
from tests.simulation.flow import flow
from tests.simulation.platter import Counts
from tests.simulation.protocols import simulate_protocols
from tests.simulation.pushes import push
from tests.simulation.quick import quick
from tests.simulation.scenario import simulate
from tests.simulation.tiers import tiers
from tests.simulation.together import together

_SEEDS = range(2)


@pytest.mark.parametrize(
    "simulation",
    [simulate, flow, push, quick, simulate_protocols, tiers, together, transactors.simulate],
)
def test_no_promise_is_broken(simulation: Callable[[int], Counts]) -> None:
    for seed in _SEEDS:
        simulation(seed)
