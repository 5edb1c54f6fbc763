"""The command line itself: help, version, and what is answered to a slip."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from quackmq import __version__
from quackmq.cli.broker.settings import setting_fields, variable_name
from quackmq.cli.main import COMMANDS, build_parser, main
from tests.kit.server import SCRIPT


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that needs no process of its own."""
    try:
        exit_code: object = main(arguments)
    except SystemExit as ending:
        exit_code = ending.code
    assert isinstance(exit_code, int)
    captured = capsys.readouterr()
    return exit_code, captured.out, captured.err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version") == (0, f"quackmq {__version__}\n", "")


@pytest.mark.processes
@pytest.mark.parametrize("command", [SCRIPT, [sys.executable, "-m", "quackmq"]])
def test_the_script_and_the_module_are_the_same_command(command: list[str]) -> None:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"quackmq {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, out, err = answer(capsys, "--help")
    assert (exit_code, err) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^    {command} ", out, re.MULTILINE)


def test_help_of_serve_names_every_setting_and_its_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code, out, _ = answer(capsys, "serve", "--help")
    assert exit_code == 0
    for schema in setting_fields():
        assert f"--{schema.name.replace('_', '-')} " in out
        assert variable_name(schema.name) in out
    assert "[QUACKMQ_LINE; 127.0.0.1:5550 if no listener is named]" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "arguments are required: COMMAND"),
        (["pipeline", "run"], "arguments are required: NAME (see"),
        (["serv"], "there is no command 'serv': did you mean 'serve'?"),
        (["paint"], "there is no command 'paint' (see quackmq --help)"),
        (["serve", "--dat", "x"], "serve: there is no option '--dat': did you mean '--data'?"),
        (["serve", "--kafk=:9092"], "there is no option '--kafk': did you mean '--kafka'?"),
        (["serve", "--paint", "x"], "there is no option '--paint' (see quackmq serve --help)"),
        (["serve", "--kafka", "x", "quickly"], "unrecognized arguments: quickly"),
        (["--versio"], "quackmq: there is no option '--versio': did you mean '--version'?"),
        (["serv", "--versio"], "there is no command 'serv': did you mean 'serve'?"),
        (["log", "ls", "--jsn", "x"], "log ls: there is no option '--jsn': did you mean '--json'?"),
        (["put", "ducks", "--kye", "x", "quack"], "there is no option '--kye': did you mean"),
        (["put", "--kye=x"], "put: there is no option '--kye': did you mean '--key'?"),
        (
            ["unacknowledged", "ducks", "--offset", "x"],
            "argument --offset: must be a whole number from 0 on, got 'x'",
        ),
        (["serve", "--data"], "--data: expected one argument"),
        (["serve"], "serve needs a data directory"),
        (["serve", "--sync", "never"], "the option --sync: 'never' is not one of"),
        (["serve", "--store", "memory:", "--line", "unix:"], "'unix:' has no path after unix:"),
        (["serve", "--config", "no-such-file.toml"], "no-such-file.toml: No such file"),
    ],
)
def test_a_slip_is_answered_in_one_sentence_with_exit_code_2(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QUACKMQ_DATA", raising=False)
    exit_code, out, err = answer(capsys, *arguments)
    assert (exit_code, out) == (2, "")
    assert complaint in err
    assert err.startswith("quackmq") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "log ls", "archive ls", "put", "get", "experiment"])
def test_an_option_that_is_none_is_named_by_every_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, _, err = answer(capsys, *command.split(), "--hellp", "x")
    assert exit_code == 2
    assert err == (
        f"quackmq {command}: there is no option '--hellp': did you mean '--help'? "
        f"(see quackmq {command} --help)\n"
    )


@pytest.mark.parametrize("message", ["--kye", "--paint", "-1", "--kye of my house"])
def test_what_stands_behind_two_hyphens_is_no_option(message: str) -> None:
    words = ["put", "ducks", "--key", "x", "--", message]
    assert build_parser().parse_args(words).messages == [message]


def test_a_word_with_a_space_is_no_option() -> None:
    words = ["put", "ducks", "--kye of my house"]
    assert build_parser().parse_args(words).messages == ["--kye of my house"]
