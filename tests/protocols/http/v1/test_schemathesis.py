"""Requests that nobody thought of, made by schemathesis from the API's own document.

It tries the edges of every parameter and body, inside and outside, and then at random; each answer
must have a status, a content type and a body that the document tells of, never be a failure of the
server, and be a refusal exactly where the document says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quackmq.protocols.http import v1
from tests.kit.server import Server
from tests.protocols.http.v1.schemathesis_hooks import ID_VARIABLE, PLAN_VARIABLE, THERE
from tests.protocols.http.v1.serving import Client

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
#: Requests at random for each operation, beside those at the edges.
EXAMPLES = 8
#: It takes half a minute on two cores that have nothing else to do.
PATIENCE_S = 580
#: To archive now takes the time of a process that others go before.
ANSWER_S = 120


@pytest.mark.timeout(PATIENCE_S + 20)
def test_every_answer_is_one_that_the_document_tells_of(tmp_path: Path) -> None:
    data = str(tmp_path / "pond")
    with Server("serve", "--data", data, "--sync", "os", "--http", "127.0.0.1:0") as server:
        address = server.listeners()["http"]
        message_id, plan = prepare(address)
        tried = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                f"--config-file={HERE / 'schemathesis.toml'}",
                "run",
                f"http://{address}/v1/openapi.json",
                "--phases=coverage,fuzzing",
                f"--max-examples={EXAMPLES}",
                # More threads meet a bug of Python 3.11: its parser counts for all at once.
                "--workers=1",
                "--seed=1",
                f"--request-timeout={ANSWER_S}",
                "--continue-on-failure",
                "--no-color",
            ],
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "tests.protocols.http.v1.schemathesis_hooks",
                "PYTHONPATH": str(HERE.parents[3]),
                ID_VARIABLE: message_id,
                PLAN_VARIABLE: plan,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert tried.returncode == 0, tried.stdout + tried.stderr
        # All but the document itself, and the stream of events.
        assert f"Tested: {len(v1.OPERATIONS) - 2}" in tried.stdout, tried.stdout
        assert server.process.poll() is None


def prepare(address: str) -> tuple[str, str]:
    """Something of every kind; the ids of a message and of a plan are answered."""
    host, _, port = address.rpartition(":")
    api, topic = Client(host, int(port)), THERE["topic"]
    try:
        assert api.post("/v1/topics", {"name": topic, "partitions": 2}).status == 201
        header = [{"name": "a", "value": None}, {"name": "b", "value_base64": "/w=="}]
        messages = [
            {"value": "text", "key": "k", "headers": header},
            {"value_base64": "/+8=", "key_base64": "/w=="},
            {"value": None},
        ]
        body = {"messages": messages, "partition": 0}
        published = api.post(f"/v1/topics/{topic}/messages", body)
        assert published.status == 201
        path = f"/v1/subscriptions/{THERE['name']}/topics/{topic}"
        assert api.put(path, {"start": "beginning"}).status == 201
        path = f"/v1/stages/{THERE['key']}/parts/a/0"
        query = f"?topic={topic}&partition=0&timestamp_ms=1"
        assert api.put(path + query, {"messages": [{"value": 1}]}).status == 200
        assert api.post(f"/v1/topics/{topic}/archive/now").json["files"] == 1
        made = api.post(f"/v1/topics/{topic}/archive/plans", {"for_ms": 3_600_000})
        assert made.status == 201
        return str(published.json["messages"][0]["id"]), str(made.json["plan"])
    finally:
        api.close()
