"""A broker and a client for each proof of the suite, and the processes of other languages.

Such a process lasts for all tests of a worker; see driver.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.clients.interface import Client
from tests.interop.driver import Driver
from tests.interop.languages import java, javascript
from tests.interop.running import RunningBroker
from tests.interop.suite import ADAPTERS


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Open the client that `suite.each_client` names. Ask for the broker first: it closes last."""
    opened = ADAPTERS[request.param].open(request)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def java_driver() -> Iterator[Driver]:
    with Driver(java("Driver")) as running:
        yield running


@pytest.fixture(scope="session")
def kafkajs_driver() -> Iterator[Driver]:
    with Driver(javascript("kafkajs.mjs")) as running:
        yield running


@pytest.fixture(scope="session")
def platformatic_driver() -> Iterator[Driver]:
    with Driver(javascript("platformatic.mjs")) as running:
        yield running
