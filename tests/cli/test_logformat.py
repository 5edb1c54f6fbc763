"""What the log looks like."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from quackmq.cli import logs as logformat
from quackmq.errors import InvalidSetting


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_for_people_has_time_level_place_and_message() -> None:
    stream = io.StringIO()
    logformat.configure("info", "text", stream)
    logging.getLogger("quackmq.protocols.kafka").warning("a slow %s", "duck")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} warning kafka: a slow duck\n", stream.getvalue())


def test_what_is_below_the_level_is_not_logged() -> None:
    stream = io.StringIO()
    logformat.configure("warning", "text", stream)
    logging.getLogger("quackmq").info("all is well")
    assert stream.getvalue() == ""


def test_a_line_for_programs_is_one_object_with_its_extras_and_exception() -> None:
    stream = io.StringIO()
    logformat.configure("info", "json", stream)
    try:
        raise RuntimeError("the pond\nis dry")
    except RuntimeError:
        logging.getLogger("quackmq.broker").exception("no %s", "water", extra={"topic": "ducks"})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert "RuntimeError: the pond\nis dry" in entry.pop("exception")
    assert entry == {
        "level": "error",
        "logger": "quackmq.broker",
        "message": "no water",
        "template": "no %s",
        "values": ["water"],
        "topic": "ducks",
    }


def test_a_line_for_programs_tells_its_values_apart() -> None:
    stream = io.StringIO()
    logformat.configure("info", "json", stream)
    log = logging.getLogger("quackmq")
    log.info("plain")
    log.info("%d of %s", 3, ValueError("duck"))
    log.info("by %(name)s", {"name": "name"})
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert "template" not in entries[0] and "values" not in entries[0]
    assert (entries[1]["template"], entries[1]["values"]) == ("%d of %s", [3, "duck"])
    assert (entries[2]["message"], entries[2]["values"]) == ("by name", ["name"])


def test_a_line_for_programs_is_written_whatever_its_values_are() -> None:
    stream = io.StringIO()
    logformat.configure("info", "json", stream)
    logging.getLogger("quackmq").info("%d in %s", 2**70, "caf\udce9")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["values"] == [2**70, "caf\udce9"]


def test_a_traceback_follows_the_line_for_people() -> None:
    stream = io.StringIO()
    logformat.configure("info", "text", stream)
    try:
        raise RuntimeError("the pond is dry")
    except RuntimeError:
        logging.getLogger("quackmq.broker").exception("no water")
    assert stream.getvalue().splitlines()[-1] == "RuntimeError: the pond is dry"


# --- X5: readable, coloured on a terminal ----------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_extras_follow_the_message_as_keys_and_values() -> None:
    stream = io.StringIO()
    logformat.configure("info", "text", stream)
    extras = {"peer": "127.0.0.1:4711", "topic": "two words", "said": 'a "b"', "left": 3}
    logging.getLogger("quackmq.protocols.line").info("gone", extra=extras)
    assert stream.getvalue().endswith(
        ' line: gone peer=127.0.0.1:4711 topic="two words" said="a \\"b\\"" left=3\n'
    )


def test_a_line_is_coloured_on_a_terminal_and_says_the_same(a_terminal: Terminal) -> None:
    plain = io.StringIO()
    record = logging.makeLogRecord(
        {"name": "quackmq.broker", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "dry"}
    )
    coloured = logformat.TextFormatter(colours=True).format(record)
    assert without_colours(coloured) == logformat.TextFormatter().format(record)
    for stream, is_coloured in ((a_terminal, True), (plain, False)):
        logformat.configure("info", "text", stream)
        logging.getLogger("quackmq").error("dry")
        assert ("\x1b[31merror" in stream.getvalue()) is is_coloured


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_each_level_has_a_colour_that_ends(level: str) -> None:
    number = getattr(logging, level.upper())
    record = logging.makeLogRecord(
        {"name": "a", "levelno": number, "levelname": level.upper(), "msg": "b", "peer": "c"}
    )
    line = logformat.TextFormatter(colours=True).format(record)
    assert line.endswith(" peer=c\x1b[0m")
    assert line.count("\x1b[0m") == line.count("\x1b[") / 2


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colours_gets_none(
    name: str, value: str, a_terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    logformat.configure("info", "text", a_terminal)
    logging.getLogger("quackmq").warning("plain")
    assert "\x1b" not in a_terminal.getvalue()


def test_programs_get_no_colours_on_a_terminal_either(a_terminal: Terminal) -> None:
    logformat.configure("info", "json", a_terminal)
    logging.getLogger("quackmq").warning("plain")
    assert json.loads(a_terminal.getvalue())["message"] == "plain"


def test_what_a_peer_called_itself_cannot_forge_a_line_or_move_the_cursor() -> None:
    stream = io.StringIO()
    logformat.configure("info", "text", stream)
    name = "duck\n12:00:00.000 error   broker: all is lost\x1b[2J\u2028"
    logging.getLogger("quackmq").warning("%s left", name, extra={"peer": name})
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue() and "\u2028" not in stream.getvalue()
    assert "duck\\n12:00" in stream.getvalue()


def test_a_tool_logs_warnings_as_the_environment_says(capsys: pytest.CaptureFixture[str]) -> None:
    logformat.configure_tool({})
    logging.getLogger("quackmq").info("not told")
    logging.getLogger("quackmq").warning("told")
    assert capsys.readouterr().err.endswith(" warning quackmq: told\n")
    logformat.configure_tool({"QUACKMQ_LOG_LEVEL": "info", "QUACKMQ_LOG_FORMAT": "json"})
    logging.getLogger("quackmq").info("told")
    assert json.loads(capsys.readouterr().err)["level"] == "info"


def test_a_tool_refuses_a_variable_that_makes_no_sense() -> None:
    with pytest.raises(InvalidSetting, match="QUACKMQ_LOG_LEVEL: 'loud' is not one of debug"):
        logformat.configure_tool({"QUACKMQ_LOG_LEVEL": "loud"})


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_goes_to_the_stderr_of_its_time(
    log_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logformat.configure("info", log_format)
    for _ in range(2):
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        logging.getLogger("quackmq").info("here")
        assert "here" in stream.getvalue()
