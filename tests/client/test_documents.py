"""What the documents say about the Python client is true: each example is run as it stands."""

from __future__ import annotations

import asyncio
import doctest
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quackmq
from quackmq.client.kafka import aio, client
from quackmq.client.kafka import types as values
from tests.interop.running import RunningBroker

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:9092"

EXAMPLES = [
    example
    for module in (client, aio, values)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__)
    if example.examples
]


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.name.split(".", 2)[-1])
def test_an_example_in_a_docstring_does_what_it_shows(
    example: doctest.DocTest, broker: RunningBroker, tmp_path: Path
) -> None:
    """`client` has subscribed to `news`, of which nobody has heard before."""
    options: dict[str, Any] = {"serialiser": "str", "timeout": 20, "directory": tmp_path}
    with quackmq.Client(broker.address, "reader", **options) as reader:
        reader.subscribe("news")
        example.globs = {
            "address": broker.address,
            "asyncio": asyncio,
            "client": reader,
            "quackmq": quackmq,
        }
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        said: list[str] = []
        outcome = runner.run(example, out=said.append)
    assert outcome.failed == 0, "".join(said)
    assert outcome.attempted


def test_every_public_method_has_an_example() -> None:
    shown = {example.name.split(".")[-1] for example in EXAMPLES}
    methods = {
        name
        for name, member in vars(quackmq.Client).items()
        if callable(member) and not name.startswith("_")
    }
    assert methods - shown == {"get_for", "serialise"}


def test_the_snippets_of_docs_python_run_from_top_to_bottom(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one program, the address being that of the test's broker."""
    text = (ROOT / "docs" / "python.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) > 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program = "\n".join(snippets).replace(ADDRESS, broker.address)
    names: dict[str, object] = {}
    exec(compile(program, "<docs/python.md>", "exec"), names)
    store = names["store"]
    assert hasattr(store, "close")
    store.close()


@pytest.mark.processes
def test_the_example_program_gets_each_text_once(broker: RunningBroker, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(ROOT / "examples" / "put_get.py"), broker.address]
        environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert len(run("put", "news", "rain", "sun").split()) == 2
    assert run("get", "news", "billing").split() == ["rain", "sun"]
    run("put", "news", "snow")
    assert run("get", "news", "billing").split() == ["rain", "sun", "snow"]
    assert run("follow", "news", "printer").split() == ["rain", "sun", "snow"]


@pytest.mark.processes
def test_importing_quackmq_loads_no_client() -> None:
    """The command line begins with it."""
    program = (
        "import quackmq, sys; print('confluent_kafka' in sys.modules, quackmq.Client.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "Client"]


def test_the_public_names_are_shown_by_dir() -> None:
    """Also those that are loaded when they are asked for."""
    assert set(quackmq.__all__) <= set(dir(quackmq))
    assert {"AsyncClient", "Client"} <= set(dir(quackmq.client))


@pytest.mark.parametrize(
    "arguments", [[], ["127.0.0.1:1", "get", "news"], ["a:1", "buy", "b", "c"]]
)
def test_an_example_that_is_called_wrongly_says_how_to_call_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = ROOT / "examples" / "put_get.py"
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    with pytest.raises(SystemExit, match=r"examples/put_get\.py ADDRESS put TOPIC TEXT"):
        runpy.run_path(str(example), run_name="__main__")
