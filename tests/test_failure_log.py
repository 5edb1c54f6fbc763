"""Failures of work that is retried are logged once until they change."""

from __future__ import annotations

from quackmq.failure_log import FailureLog


def test_a_failure_is_logged_again_when_its_kind_changes_or_after_a_success() -> None:
    failures: FailureLog[str, Exception] = FailureLog()
    assert failures.record("a", OSError("first"), kind=OSError)
    assert not failures.record("a", OSError("second"), kind=OSError)
    assert failures.record("a", ValueError("third"), kind=ValueError)
    failures.resolve("a")
    assert failures.record("a", ValueError("fourth"), kind=ValueError)
    assert [str(failure) for failure in failures.failures()] == ["fourth"]


def test_a_failure_without_a_kind_is_logged_once_for_each_key() -> None:
    failures: FailureLog[str, str] = FailureLog()
    assert failures.record("a", "why")
    assert failures.record("b", "why")
    assert not failures.record("a", "another reason")
    assert list(failures.failures()) == ["another reason", "why"]


def test_keys_that_no_longer_exist_are_forgotten() -> None:
    failures: FailureLog[str, str] = FailureLog()
    failures.record("a", "why")
    failures.record("b", "why")
    failures.keep_only({"b", "c"})
    assert ("a" in failures, "b" in failures, len(failures)) == (False, True, 1)
    assert failures.record("a", "why")
    failures.resolve("c")
