"""`quackmq topic-defaults`, asked of a broker in this process."""

from __future__ import annotations

import pytest

from quackmq.broker import BrokerSettings
from quackmq.cli.main import main
from tests.kit.tables import each
from tests.protocols.http.v1.serving import serving


def test_defaults_are_set_shown_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    settings = BrokerSettings(topic_defaults={"logs.*": {"keep_for_ms": 5}})
    with serving(settings=settings) as served:
        address = ["--http", f"127.0.0.1:{served.port}"]
        words = ["set", "*", "needs_subscriber=true", "keep_bytes=-1", "when_full=refuse"]
        assert main(["topic-defaults", *words, *address]) == 0
        assert "The topic defaults of * are set." in capsys.readouterr().out
        assert main(["topic-defaults", *address]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "pattern  set by                 settings",
            "*        a request              when_full=refuse keep_bytes=-1 needs_subscriber=true",
            "logs.*   the broker's settings  keep_for_ms=5",
        ]
        policy = served.client().post("/v1/topics", {"name": "news"}).json["policy"]
        assert (policy["needs_subscriber"], policy["when_full"]) == (True, "refuse")
        assert main(["topic-defaults", "remove", "*", *address]) == 0
        assert main(["topic-defaults", "remove", "*", *address]) == 1
        assert "there are no topic defaults for the pattern '*'" in capsys.readouterr().err
        assert main(["topic-defaults", "remove", "logs.*", *address]) == 1
        assert "come from the broker's settings" in capsys.readouterr().err


def test_without_defaults_this_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        assert main(["topic-defaults", "show", "--http", f"127.0.0.1:{served.port}"]) == 0
    assert capsys.readouterr().out == "There are no topic defaults.\n"


@each(
    ("words", "why"),
    [
        (["set"], "set needs a pattern"),
        (["remove"], "remove needs a pattern"),
        (["show", "*"], "needs the action set or remove"),
        (["set", "*"], "name at least one setting"),
        (["set", "a b", "ephemeral=true"], "is not a pattern of topic names"),
        (["set", "*", "ephemeral"], "write SETTING=VALUE"),
        (["set", "*", "ephemeral=true", "ephemeral=false"], "is given twice"),
        (["set", "*", "ephemerel=true"], "did you mean 'ephemeral'?"),
        (["set", "*", "ephemeral=yes"], "use true or false"),
        (["remove", "*", "ephemeral=true"], "removes all its settings"),
        (["remove", "*", "--http", "nowhere"], "--http: 'nowhere'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_broker_is_asked(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topic-defaults", *words]) == 2
    assert why in capsys.readouterr().err
