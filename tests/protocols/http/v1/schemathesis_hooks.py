"""What schemathesis has to know of the API that no schema tells; loaded by its own process.

- Half of what may be asked is asked of things that are there, which `test_schemathesis` has made,
  without parameters that contradict each other: so it gets past the checks.
- Waits are cut short: that waiting works is proved elsewhere.
- A whole number may be written as 5.0 by JSON Schema's rules; the API wants it written as one.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any, Final

import schemathesis

#: By the name of a part of the path, or of a parameter, what there is.
THERE: Final = {
    "topic": "ducks",
    "name": "puddles",
    "key": "nest",
    "partition": 0,
    "file": "00000000000000000000-00000001.parquet",
}
#: The ids of a message and of a plan that are there come by these variables.
ID_VARIABLE: Final = "QUACKMQ_TEST_MESSAGE_ID"
PLAN_VARIABLE: Final = "QUACKMQ_TEST_PLAN"

_turns = count()


@schemathesis.hook
def before_call(context: Any, case: Any, **options: Any) -> None:
    if case.method != "DELETE" and is_positive(case) and next(_turns) % 2:
        ask_for_what_is_there(case)
    if isinstance(case.query, dict) and str(case.query.get("wait_ms", "")).isdigit():
        case.query["wait_ms"] = shorter(case.query["wait_ms"])
    if isinstance(case.body, dict | list) and repr(body := plainer(case.body)) != repr(case.body):
        case.body = body


def ask_for_what_is_there(case: Any) -> None:
    parts = case.path_parameters or {}
    there = {**THERE, "plan": os.environ[PLAN_VARIABLE]}
    case.path_parameters = {**parts, **{name: there[name] for name in parts if name in there}}
    query = dict(case.query or {})
    if case.operation.definition.raw["operationId"] == "stage":
        query |= {"topic": THERE["topic"], "partition": THERE["partition"], "timestamp_ms": 1}
    if "key" in query:
        query.pop("key_base64", None)
    if "publisher" not in query or "sequence" not in query:
        query.pop("publisher", None)
        query.pop("sequence", None)
    elif case.headers:
        case.headers.pop("Idempotency-Key", None)
    if isinstance(case.body, dict):
        if case.body.get("partition") is not None:
            query.pop("partition", None)
        for name in ("id", "last_id"):
            if isinstance(case.body.get(name), str):
                case.body = {**case.body, name: os.environ[ID_VARIABLE]}
    if query != (case.query or {}):
        case.query = query


def is_positive(case: Any) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def plainer(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {name: plainer(each) for name, each in value.items()}
        if type(plain.get("wait_ms")) is int:
            plain["wait_ms"] = shorter(plain["wait_ms"])
        return plain
    if isinstance(value, list):
        return [plainer(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def shorter(wait_ms: Any) -> Any:
    """What may be asked for stays something that may be, and what may not stays what it is."""
    return min(int(wait_ms), 5) if 0 <= int(wait_ms) <= 30_000 else wait_ms
