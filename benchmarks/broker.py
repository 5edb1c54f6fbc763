"""A broker with all its listeners open, and the bare loop that one of them is held to."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.processes import HOST, Command, Server, free_ports, running

_LOOK_EVERY_SECONDS: Final = 0.01
_ANSWER_SECONDS: Final = 60.0
_ROOT: Final = str(Path(__file__).parent.parent)


class Broker(NamedTuple):
    """Where each listener listens."""

    server: Server
    kafka: str
    http: str
    zmq: str

    @classmethod
    @contextmanager
    def started(cls, directory: Path, sync: str) -> Iterator[Broker]:
        ports = free_ports(3)
        addresses = [f"{HOST}:{port}" for port in ports]
        words = [sys.executable, "-m", "quackmq", "serve", "--data", str(directory / "data")]
        words += ["--sync", sync, "--log-level", "error"]
        for option, address in zip(("--kafka", "--http", "--zmq"), addresses, strict=True):
            words += [option, address]
        for option in ("--xsub", "--xpub", "--proxy"):
            words += [option, f"{HOST}:0"]  # which open with zmq
        with running([Command(words)], ports[0], directory) as server:
            while "ready" not in server.last_words.splitlines():
                server.check()
                time.sleep(_LOOK_EVERY_SECONDS)
            yield cls(server, *addresses)


@contextmanager
def echo(kind: str, directory: Path) -> Iterator[str]:
    """A ROUTER of that kind that sends back what it is sent (echo.py); where it listens."""
    (port,) = free_ports(1)
    words = (sys.executable, "-m", "benchmarks.echo", kind, f"{HOST}:{port}")
    with running([Command(words, {"PYTHONPATH": _ROOT})], port, directory) as server:
        server.wait_until_it_listens()
        yield server.address


def ask(url: str, body: object = None) -> dict[str, Any]:
    """Return the JSON object that the HTTP listener answers; with a body, it is a POST."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, data, headers), timeout=_ANSWER_SECONDS
    ) as answer:
        return dict(json.loads(answer.read()))
