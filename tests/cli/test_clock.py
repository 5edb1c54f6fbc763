"""`quackmq clock`, asked of a broker in this process."""

from __future__ import annotations

import socket

import pytest

from quackmq.cli.main import main
from quackmq.clock import Clock
from quackmq.stores.memory import MemoryStore
from tests.kit.machine_clock import YEAR_MS, Machine
from tests.kit.support import START_MS
from tests.protocols.http.v1.serving import serving


def test_the_clock_is_shown_and_confirmed(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    clock = machine.clock()
    with serving(MemoryStore(clock), clock=clock) as served:
        address = ["--http", f"127.0.0.1:{served.port}"]
        assert main(["clock", *address]) == 0
        assert "status          steady" in capsys.readouterr().out
        machine.jump(YEAR_MS)
        assert main(["clock", "show", *address]) == 0
        shown = capsys.readouterr().out
        assert "2023-11-14 22:13:20 UTC" in shown, "the broker's clock"
        assert "2024-11-13 22:13:20 UTC, 365.0 days ahead" in shown, "the wall clock"
        assert "jumped" in shown and "quackmq clock confirm" in shown
        assert main(["clock", "confirm", *address]) == 0
        assert capsys.readouterr().out.startswith("Confirmed.\n")
        assert clock.now_ms() == machine.wall_ms
        assert main(["clock", "confirm", *address]) == 1
        assert capsys.readouterr().out.startswith("There is nothing to confirm.\n")


@pytest.mark.parametrize(("word", "is_older"), [("yes", True), ("no", False)])
def test_the_operator_says_whether_the_time_passed(word: str, is_older: bool) -> None:
    machine = Machine()
    clock = machine.clock()
    with serving(MemoryStore(clock), clock=clock) as served:
        machine.jump(YEAR_MS)
        machine.pass_ms(10)
        address = f"127.0.0.1:{served.port}"
        assert main(["clock", "confirm", "--passed", word, "--http", address]) == 0
    assert (clock.expired_before(YEAR_MS) >= START_MS - 1) is is_older


def test_a_paused_clock_says_what_does_not_happen(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    store = MemoryStore(machine.clock())
    kept = machine.clock().snapshot()
    machine.reboot(YEAR_MS)
    clock = machine.clock()
    clock.resume(kept, 0)
    with serving(store, clock=clock) as served:
        assert main(["clock", "--http", f"127.0.0.1:{served.port}"]) == 0
    assert "Nothing is deleted or expired by age" in capsys.readouterr().out


def test_a_broker_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["clock", "--http", address]) == 1
        where = f"the broker's HTTP address {address}"
        complaint = f"quackmq: no answer from {where}: Connection refused; start a broker "
        assert capsys.readouterr().err.startswith(complaint)


@pytest.mark.parametrize("words", [["--http", "nowhere"], ["show", "--passed", "yes"]])
def test_nonsense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clock", *words]) == 2
    assert words[-2] in capsys.readouterr().err


def test_the_system_clock_agrees_with_itself() -> None:
    clock = Clock.of_system()
    assert clock.status().status == "steady"
    kept = clock.snapshot()
    again = Clock.of_system()
    again.resume(kept, 0)
    assert again.now_ms() >= kept.time_ms
    assert again.status().status == "steady"
