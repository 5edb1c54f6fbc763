"""One broker for all tests of a file: each test has topics and names of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.protocols.http.v1.serving import Client, Serving, serving

_numbers = count()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def api(served: Serving) -> Iterator[Client]:
    client = served.client()
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name for this test alone."""
    return f"{request.node.originalname[:200]}.{next(_numbers)}"
