"""docs/http.md: every curl line of the queue's part is run, and answered as it is printed there."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.errors import QuackError
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.errors import status_for
from tests.protocols.http.peers import served
from tests.protocols.kafka.client import DEADLINE_SECONDS
from tests.protocols.kafka.test_errors import tree

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "http.md"
QUEUE_PART = DOCUMENT.read_text().partition("## Connections")[0]
MESSAGE_ID = re.compile(r"\b[A-Za-z0-9_-]{39}(?![A-Za-z0-9_-])")


def examples() -> Iterator[tuple[str, str]]:
    """Each command and what is printed below it."""
    for block in re.findall(r"```console\n(.*?)```", QUEUE_PART, re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = example.partition("\n")
            yield command, printed.strip()


@pytest.mark.needs("curl")
async def test_d1_every_curl_line_of_the_queue_is_answered_as_printed() -> None:
    ids: dict[str, str] = {}
    run = 0
    async with served() as running:
        host, port = running.address
        for command, printed in examples():
            for in_document, real in ids.items():
                command = command.replace(in_document, real)
            got = await asyncio.to_thread(curl, command.replace("localhost:8002", f"{host}:{port}"))
            for in_document, real in zip(
                MESSAGE_ID.findall(printed), MESSAGE_ID.findall(got), strict=True
            ):
                ids.setdefault(in_document, real)
            for in_document, real in ids.items():
                printed = printed.replace(in_document, real)
            assert got == f"{printed}\n", command
            run += 1
    assert run > 10
    assert len(set(ids.values())) == len(ids)


def curl(command: str) -> str:
    arguments = shlex.split(command)
    assert arguments[0] == "curl"
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--noproxy", "*", *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    return done.stdout


def test_the_statuses_of_the_document_are_those_of_the_code() -> None:
    by_code = {kind.code: status_for(kind) for kind in tree(QuackError)}
    table = QUEUE_PART.partition("### Failures")[2]
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", table, re.MULTILINE)
    told = {
        (code, int(status))
        for statuses, codes in rows
        for code in re.findall(r"`(\w+)`", codes)
        for status in statuses.split(",")
    }
    known = {(code, status) for code, status in told if code in by_code}
    assert {(code, by_code[code]) for code, _ in known} <= told
    assert len(known) > 10


def test_the_bounds_of_the_document_are_those_of_the_code() -> None:
    words = DOCUMENT.read_text()
    for said in (
        f"{http_limits.HTTP_CONNECTIONS:,} connections",
        f"{http_limits.HTTP_HEAD_BYTES // limits.KIB} KiB for a",
        f"{http_limits.HTTP_BODY_BYTES // limits.MIB} MiB for a body",
        f"({http_limits.HTTP_QUEUE_BODY_BYTES // limits.MIB} for `produce`",
        f"{http_limits.HTTP_REQUEST_WAIT_MS // 1000} s for a\nrequest",
        f"{http_limits.HTTP_SEND_WAIT_MS // 1000} s for a client",
        f"{http_limits.HTTP_IDLE_MS // 1000} s without a request",
    ):
        assert said in words
