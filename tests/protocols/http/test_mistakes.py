"""A body that is refused is told what would have been right."""

from __future__ import annotations

import msgspec
import pytest

from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.types import decode_json
from quackmq.protocols.http.v1.messages import OneMessage
from quackmq.protocols.http.v1.subscriptions import NewSubscription
from quackmq.protocols.http.v1.topics import NewTopic


def refusal(kind: type, body: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        decode_json(body.encode(), msgspec.json.Decoder(kind))
    return str(refused.value)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ('{"keep_for": 1}', "unknown field `keep_for` - at `$.policy`; did you mean keep_for_ms?"),
        ('{"zzz": 1}', "; allowed here: live_for_ms, live_entries, when_full, "),
        (
            '{"when_full": "wat"}',
            "'wat' - at `$.policy.when_full`; it is one of archive, wait, refuse, drop_oldest",
        ),
        ('{"keep_for_ms": -1}', "`int` >= 0 - at `$.policy.keep_for_ms`; null is for no bound"),
    ],
)
def test_a_policy_that_cannot_be_is_told_what_could(policy: str, hint: str) -> None:
    assert hint in refusal(NewTopic, f'{{"name": "ducks", "policy": {policy}}}')


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (
            '{"start": "begining"}',
            "`$.start`; it is one of beginning, end, or an object of offset or timestamp_ms",
        ),
        ('{"start": {"ofset": 3}}', "unknown field `ofset` - at `$.start`; did you mean offset?"),
        ('{"strat": "end"}', "unknown field `strat`; did you mean start?"),
    ],
)
def test_a_subscription_that_cannot_be_is_told_what_could(body: str, hint: str) -> None:
    assert refusal(NewSubscription, body).endswith(hint)


def test_a_field_inside_a_list_is_told_too() -> None:
    said = refusal(OneMessage, '{"headers": [{"nam": "a", "value": "b"}], "value": "x"}')
    assert said.endswith("unknown field `nam` - at `$.headers[0]`; did you mean name?")


def test_null_is_named_only_where_it_means_no_bound() -> None:
    assert refusal(NewTopic, '{"name": "ducks", "partitions": 0}').endswith("`$.partitions`")


def test_a_very_long_name_gets_no_hint() -> None:
    said = refusal(NewSubscription, f'{{"{"s" * http_limits.HTTP_HINTED_CHARS}": 1}}')
    assert said.endswith("s`")
