"""The clients of other languages, one process each for all tests of a worker; see driver.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.driver import Driver
from tests.interop.languages import java, javascript


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
