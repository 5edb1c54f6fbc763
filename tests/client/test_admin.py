"""The admin client is gone when the client is closed, whatever librdkafka does."""

from __future__ import annotations

import ast
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

import quackmq
from quackmq import Client
from quackmq.client.kafka.admin import Admin
from quackmq.client.kafka.config import KafkaConfig
from quackmq.errors import ClientClosed
from tests.kit.server import DEADLINE_S


def test_a_closed_client_leaves_nothing_to_whoever_collects_garbage(client: Client) -> None:
    """There librdkafka was seen to wait for ever for a thread of its own."""
    client.topics()
    admin = weakref.ref(client.session.cluster._admin.client)
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

    admin = Admin(KafkaConfig("127.0.0.1:1").shared)
    admin.close(0)  # nor does this test wait for what librdkafka has made
    stuck: Any = [Stuck()]
    admin._clients, stuck = stuck, None
    admin.close(0)
    assert begun.wait(DEADLINE_S) and not ended.is_set()
    with pytest.raises(ClientClosed, match="closed"):
        admin.client.list_topics()
    go_on.set()
    assert ended.wait(DEADLINE_S)


def test_no_request_to_a_coordinator_times_out_inside_librdkafka() -> None:
    """Such a request would end the process when the coordinator is back."""
    package = Path(quackmq.__file__).parent
    others = ("list_consumer_groups", "consumer_group_metadata")
    found = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text("utf-8")
        if "consumer_group" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if "consumer_group" in name and name not in others:
                    timeouts = [ast.unparse(each) for each in node.keywords]
                    found.append("request_timeout=NEVER_S" in timeouts or f"{path}: {name}")
    assert set(found) == {True}
