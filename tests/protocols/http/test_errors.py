"""Every error of ours has a status in HTTP, and is told in one of two shapes."""

from __future__ import annotations

import json

from quackmq import errors
from quackmq.protocols.http.errors import (
    STATUSES,
    HttpFailure,
    failure_response,
    response_for_error,
    status_for,
)
from tests.protocols.kafka.test_errors import tree

OURS = {kind for kind in tree(errors.QuackError) if kind.__module__ == "quackmq.errors"}


def test_every_family_of_errors_has_a_status_and_only_exceptions_to_it_are_listed() -> None:
    assert {kind for kind in OURS if errors.QuackError in kind.__bases__} <= set(STATUSES)
    for kind, status in STATUSES.items():
        assert 400 <= status < 600
        family = kind.__bases__[0]
        if issubclass(family, errors.QuackError) and family is not errors.QuackError:
            assert status != status_for(family), f"{kind.__name__} repeats its base's status"


def test_what_the_asker_can_mend_is_in_the_400s_and_what_we_must_in_the_500s() -> None:
    ours = (
        *(errors.QuackTimeout, errors.BrokerClosing, errors.GroupLoading),
        *(errors.InternalError, errors.StorageError),
    )
    for kind in OURS - {errors.QuackError}:
        assert (status_for(kind) >= 500) == issubclass(kind, ours), kind


def test_a_kind_of_error_that_somebody_adds_below_has_its_parents_status() -> None:
    class DrownedTopic(errors.UnknownTopic):
        pass

    assert status_for(DrownedTopic) == 404


def test_the_queue_is_told_of_failures_in_its_own_shape() -> None:
    response = response_for_error(errors.UnknownTopic("there is no topic ducks"), "/size")
    assert (response.status, response.content_type) == (404, "application/json")
    assert json.loads(response.body) == {
        "status": "failure",
        "message": "there is no topic ducks",
        "code": "unknown_topic",
    }


def test_below_v1_a_failure_is_a_problem() -> None:
    response = response_for_error(
        errors.UnknownTopic("there is no topic ducks"), "/v1/topics/ducks"
    )
    assert response.content_type == "application/problem+json"
    assert json.loads(response.body) == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "there is no topic ducks",
        "code": "unknown_topic",
    }
    assert (
        response_for_error(HttpFailure(405, "x", "…"), "/v1").content_type
        == "application/problem+json"
    )
    assert response_for_error(HttpFailure(404, "x", "…"), "/v11").content_type == "application/json"


def test_who_may_try_again_soon_is_told_so() -> None:
    assert ("retry-after", "1") in response_for_error(errors.BrokerClosing("…"), "/size").headers
    assert ("retry-after", "1") in failure_response(503, "limit_reached", "…", "/size").headers
    assert response_for_error(errors.UnknownTopic("…"), "/size").headers == ()
