"""Processes that were killed do not keep the next one of their name waiting for their sessions.

The sessions here are longer than any test may take, so that nothing passes because one is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq import Client, QuackTimeout
from quackmq.client import limits as client_limits
from quackmq.errors import GroupNotEmpty
from tests.client.conftest import Clients
from tests.client.program import Program

pytestmark = pytest.mark.processes

SESSION_S = 600.0


@pytest.fixture
def killed(address: str, topic: str, tmp_path: Path) -> Iterator[str]:
    """The name of a process that read two topics and was killed; they are TOPIC and TOPIC-b."""
    name = f"billing-{topic}"
    options = {"directory": str(tmp_path / name), "session_timeout": SESSION_S}
    with Program(address, name, **options) as program:
        for each in (topic, f"{topic}-b"):
            assert program.call("subscribe", each) is True
            program.call("put", each, "first")
            program.call("put", each, "second")
            assert program.call("get", each) == "first"
        program.kill()
        yield name


def test_a_new_topic_is_subscribed_to_after_a_kill(
    killed: str, clients: Clients, topic: str
) -> None:
    client = clients(session_timeout=SESSION_S)
    assert client.name == killed
    assert client.subscribe(f"{topic}-new") is True
    client.put(f"{topic}-new", "here")
    assert client.get(f"{topic}-new").value == "here"
    assert client.get(topic).value == "first", "it was in hand"


def test_one_of_the_topics_is_read_again_though_nobody_reads_the_other_one(
    killed: str, clients: Clients, topic: str
) -> None:
    client = clients(session_timeout=SESSION_S)
    assert client.get(topic).value == "first"
    assert client.get(topic).value == "second"


def test_a_seek_after_a_kill_meets_nobody(killed: str, clients: Clients, topic: str) -> None:
    client = clients(session_timeout=SESSION_S)
    client.seek(topic, "end")
    client.put(topic, "third")
    assert client.get(topic).value == "third"


def test_more_dead_members_than_are_removed_at_once_are_removed_by_the_next_call(
    killed: str, clients: Clients, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_limits, "CLIENT_EVICTIONS", 1)
    client = clients(session_timeout=SESSION_S)
    with pytest.raises(GroupNotEmpty):
        client.seek(topic, "end")
    client.seek(topic, "end")


def test_a_running_process_of_the_name_keeps_its_place(
    address: str, clients: Clients, topic: str, tmp_path: Path
) -> None:
    name = f"billing-{topic}"
    options = {"directory": str(tmp_path / name), "session_timeout": SESSION_S}
    with Program(address, name, **options) as program:
        program.call("subscribe", topic)
        program.call("put", topic, "first")
        assert program.call("get", topic) == "first"
        client = clients(session_timeout=SESSION_S)
        with pytest.raises(GroupNotEmpty):
            client.seek(topic, "end")
        program.call("put", topic, "second")
        assert program.call("get", topic) == "second"


def test_who_waits_for_a_dead_process_of_another_machine_is_told_so(
    killed: str, address: str, topic: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with Client(address, killed, directory=elsewhere, session_timeout=SESSION_S) as client:
        with pytest.raises(QuackTimeout, match=r"died less than 600 s ago on another machine"):
            client.subscribe(f"{topic}-new", timeout=1.0)
