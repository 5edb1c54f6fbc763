"""What the broker is tried over, for every test that asks for it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.flock import Pond, StoreKind
from tests.kit.support import Clock


@pytest.fixture(params=["memory", "local"])
def pond(request: pytest.FixtureRequest, tmp_path: Path) -> Pond:
    kind: StoreKind = request.param
    return Pond(kind, tmp_path / "pond", Clock())


@pytest.fixture(params=["newer", "older"])
def implicit(request: pytest.FixtureRequest) -> bool:
    """The way of a transactional producer: partitions are added by writing, or by asking."""
    is_newer: bool = request.param == "newer"
    return is_newer
