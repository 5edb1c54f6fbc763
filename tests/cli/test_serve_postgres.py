"""`quackmq serve --store postgresql://…`: brokers that share a database, one of them active."""

from __future__ import annotations

import signal
import sys

import pytest

from quackmq.cli.broker.address import Address
from quackmq.cli.broker.runner import _open_store
from quackmq.cli.broker.settings import Settings
from quackmq.clock import Clock
from quackmq.errors import InvalidSetting
from tests.cli.test_serve import publish, read
from tests.kit.postgres import PostgresServer
from tests.kit.server import Server
from tests.kit.waiting import wait_until

ON_ANY_PORT = ("--kafka", "127.0.0.1:0")


def serve(url: str) -> Server:
    return Server("serve", "--store", url, *ON_ANY_PORT)


def test_a_waiting_broker_takes_over_from_one_that_is_killed_or_ends(
    postgres: PostgresServer, store_database: str
) -> None:
    with serve(store_database) as first:
        publish(first.ready(), "ducks", b"quack")
        with serve(store_database) as second:
            wait_until(lambda: has_standby(postgres))
            first.send(signal.SIGKILL)
            address = second.ready()
            assert read(address, "ducks", 1) == [b"quack"]
            publish(address, "ducks", b"again")
            with serve(store_database) as third:
                wait_until(lambda: has_standby(postgres))
                second.send(signal.SIGTERM)
                assert second.exit_code() == 0
                assert read(third.ready(), "ducks", 2) == [b"quack", b"again"]


def test_a_frozen_broker_that_resumes_commits_nothing_and_ends(
    postgres: PostgresServer, store_database: str
) -> None:
    with serve(store_database) as frozen:
        publish(frozen.ready(), "ducks", b"quack")
        with serve(store_database) as successor:
            wait_until(lambda: has_standby(postgres))
            frozen.send(signal.SIGSTOP)
            postgres.execute(
                "update quackmq.heartbeat set beaten_at = beaten_at - interval '1 hour'", "stores"
            )
            address = successor.ready()
            frozen.send(signal.SIGCONT)
            assert frozen.exit_code() == 1
            assert "another broker owns" in frozen.errors()
            publish(address, "ducks", b"again")
            assert read(address, "ducks", 2) == [b"quack", b"again"]


def test_a_broker_that_waits_for_a_database_ends_when_it_is_told_to(
    postgres: PostgresServer, store_database: str
) -> None:
    with serve(store_database) as active:
        active.ready()
        with serve(store_database) as waiting:
            wait_until(lambda: has_standby(postgres))
            waiting.send(signal.SIGTERM)
            assert waiting.exit_code() == 0


def test_a_broker_whose_port_is_in_use_does_not_wait(store_database: str) -> None:
    with serve(store_database) as active:
        address = active.ready()
        with Server("serve", "--store", store_database, "--kafka", address) as second:
            assert second.exit_code() == 1
            assert f"cannot open the kafka listener on {address}" in second.errors()


def test_a_broker_that_was_replaced_ends(postgres: PostgresServer, store_database: str) -> None:
    with serve(store_database) as server:
        publish(server.ready(), "ducks", b"quack")
        postgres.execute(
            "update quackmq.owner set epoch = epoch + 1, owner_id = gen_random_uuid()", "stores"
        )
        assert server.exit_code() == 1
        assert "another broker owns" in server.errors()


def test_a_missing_database_is_one_sentence(postgres: PostgresServer) -> None:
    with serve(postgres.url("nowhere")) as server:
        assert server.exit_code() != 0
        assert "create it with createdb nowhere" in server.errors()
        assert "Traceback" not in server.errors()


async def test_a_missing_driver_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("quackmq.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    settings = Settings(store="postgresql://localhost/orders")
    with pytest.raises(InvalidSetting, match=r"asyncpg.*pip install 'quackmq\[postgres\]'"):
        await _open_store(settings, Clock.of_system(), {"kafka": Address("127.0.0.1", 0)})


def has_standby(postgres: PostgresServer) -> bool:
    """Return whether sessions of two brokers are open."""
    count = postgres.execute(
        "select count(distinct application_name) from pg_stat_activity "
        "where application_name like 'quackmq %'"
    )
    return int(count) > 1
