"""`quackmq limits` lists the bounds of this version."""

from __future__ import annotations

import json

import pytest

from quackmq.cli.main import main
from quackmq.protocols.line import limits


def test_the_bounds_of_a_package_are_listed_with_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["limits", "protocols.line", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["LINE_HEAD_BYTES"]["value"] == limits.LINE_HEAD_BYTES
    assert all(each["reason"] for each in found.values())
    assert main(["limits"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("shared\n\n  ") and "\n\nbroker\n\n  " in shown
    assert "LINE_HEAD_BYTES = 1,024" in shown and "BATCH_BYTES = 16,777,216" in shown


def test_an_unknown_package_is_refused_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["limits", "nowhere"]) == 2
    assert "broker, cli" in capsys.readouterr().err
