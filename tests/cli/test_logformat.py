"""What the log looks like."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from quackmq.cli import logformat


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
    logging.getLogger("quackmq.doors.kafka").warning("a slow %s", "duck")
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
        "topic": "ducks",
    }


def test_a_traceback_follows_the_line_for_people() -> None:
    stream = io.StringIO()
    logformat.configure("info", "text", stream)
    try:
        raise RuntimeError("the pond is dry")
    except RuntimeError:
        logging.getLogger("quackmq.broker").exception("no water")
    assert stream.getvalue().splitlines()[-1] == "RuntimeError: the pond is dry"
