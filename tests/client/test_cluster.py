"""What a client asks a cluster by is gone when the client is closed, whatever librdkafka does."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from quackmq import Client
from quackmq.client.cluster import Cluster
from quackmq.client.failures import Deadline
from quackmq.client.settings import Connection
from quackmq.errors import ClientClosed
from tests.cli.process import DEADLINE_S


def test_a_closed_client_leaves_nothing_to_whoever_collects_garbage(client: Client) -> None:
    """There librdkafka was seen to wait for ever for a thread of its own."""
    client.topics()
    admin = weakref.ref(client.session.cluster._admin)
    assert admin() is not None
    client.close()
    assert admin() is None


def test_a_client_that_librdkafka_never_lets_go_of_is_closed_all_the_same() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Stuck:
        def __del__(self) -> None:
            begun.set()
            go_on.wait(DEADLINE_S)
            ended.set()

    cluster = Cluster(Connection("127.0.0.1:1"))
    cluster.close(Deadline(0))  # nor does this test wait for what librdkafka has made
    stuck: Any = [Stuck()]
    cluster._held, stuck = stuck, None
    cluster.close(Deadline(0))
    assert begun.wait(DEADLINE_S) and not ended.is_set()
    with pytest.raises(ClientClosed, match="closed"):
        cluster.topic_names(Deadline(1))
    go_on.set()
    assert ended.wait(DEADLINE_S)
