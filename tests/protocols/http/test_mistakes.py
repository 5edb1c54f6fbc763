"""A body that is refused is told what would have been right."""

from __future__ import annotations

from typing import Annotated

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
        ('{"keep_for": 1}', "unknown field `keep_for` in `policy`; did you mean keep_for_ms?"),
        ('{"zzz": 1}', "; allowed here: live_for_ms, live_entries, when_full, "),
        (
            '{"when_full": "wat"}',
            "field `policy.when_full` cannot be 'wat'; it is one of archive, wait, "
            "wait_until_consumed, refuse, drop_oldest",
        ),
        (
            '{"keep_for_ms": -1}',
            "field `policy.keep_for_ms` must be a whole number of at least 0, got -1; null is for "
            "no bound",
        ),
        (
            '{"keep_for_ms": "abc"}',
            'field `policy.keep_for_ms` must be a whole number or null, got "abc"',
        ),
    ],
)
def test_a_policy_that_cannot_be_is_told_what_could(policy: str, hint: str) -> None:
    assert hint in refusal(NewTopic, f'{{"name": "ducks", "policy": {policy}}}')


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (
            '{"start": "begining"}',
            "field `start` cannot be 'begining'; it is one of beginning, end, or an object of "
            "offset or timestamp_ms",
        ),
        ('{"start": {"ofset": 3}}', "unknown field `ofset` in `start`; did you mean offset?"),
        ('{"strat": "end"}', "unknown field `strat`; did you mean start?"),
    ],
)
def test_a_subscription_that_cannot_be_is_told_what_could(body: str, hint: str) -> None:
    assert refusal(NewSubscription, body).endswith(hint)


def test_a_field_inside_a_list_is_told_too() -> None:
    said = refusal(OneMessage, '{"headers": [{"nam": "a", "value": "b"}], "value": "x"}')
    assert said.endswith("unknown field `nam` in `headers[0]`; did you mean name?")


def test_null_is_named_only_where_it_means_no_bound() -> None:
    said = refusal(NewTopic, '{"name": "ducks", "partitions": 0}')
    assert said.endswith("field `partitions` must be a whole number of at least 1, got 0")


class Everything(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0
    ratio: float = 0.0
    is_live: bool = False
    name: Annotated[str, msgspec.Meta(max_length=3)] = ""
    topic: Annotated[str, msgspec.Meta(pattern="^[a-z]+$")] = "ducks"
    counts: Annotated[list[int], msgspec.Meta(max_length=2)] = []
    count_by_name: dict[str, int] = {}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ('{"count": "abc"}', 'field `count` must be a whole number, got "abc"'),
        ('{"count": 1.5}', "field `count` must be a whole number, got 1.5"),
        ('{"ratio": "x"}', 'field `ratio` must be a number, got "x"'),
        ('{"is_live": 1}', "field `is_live` must be true or false, got 1"),
        ('{"name": 3}', "field `name` must be a string, got 3"),
        ('{"name": "duck"}', 'field `name` must be a string of at most 3 characters, got "duck"'),
        ('{"topic": "a b"}', "field `topic` must be a string that matches '^[a-z]+$', got \"a b\""),
        ('{"counts": {}}', "field `counts` must be a list, got {}"),
        ('{"counts": [1, "x"]}', 'field `counts[1]` must be a whole number, got "x"'),
        ('{"counts": [1, 2, 3]}', "field `counts` must be a list of at most 2 items, got [1,2,3]"),
        ("[]", "the body is invalid: it must be an object, got []"),
        # The value is not quoted: its path lacks the key, it is long, or the rest is no JSON.
        (
            '{"count_by_name": {"a": "x"}}',
            "field `count_by_name[...]` must be a whole number, got a string",
        ),
        (f'{{"count": "{"x" * 100}"}}', "field `count` must be a whole number, got a string"),
        ('{"count": "abc", "counts": ' + "[" * 9_999 + "]" * 9_999 + "}", "got a string"),
        ('{"count": "abc", ', "field `count` must be a whole number, got a string"),
    ],
)
def test_a_wrong_type_is_told_in_words_of_json_with_the_value(body: str, sentence: str) -> None:
    assert refusal(Everything, body).endswith(sentence)


def test_the_value_in_a_large_body_is_not_quoted() -> None:
    spaces = " " * http_limits.HTTP_QUOTED_BODY_BYTES
    said = refusal(Everything, f'{{"count": "abc"{spaces}}}')
    assert said.endswith("field `count` must be a whole number, got a string")


def test_a_very_long_name_gets_no_hint() -> None:
    said = refusal(NewSubscription, f'{{"{"s" * http_limits.HTTP_HINTED_CHARS}": 1}}')
    assert said.endswith("s`")
