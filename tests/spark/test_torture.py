"""Source and sink together are exactly once, whatever is killed (S2, S3); `make soak` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.tables import each
from tests.spark.torture import Blow, Record, Torture, compare, seeded

pytestmark = pytest.mark.timeout(1200)

A = Record(b"k", b"a", (("h", None),), 1)
B = A._replace(key=None, value=None)


@each(
    ("target", "missing", "surplus"),
    [
        ([A._replace(value=b"A"), B], [], []),
        ([B], [A._replace(value=b"A")], []),
        ([A._replace(value=b"A"), B, B], [], [B]),
        ([A, B], [A._replace(value=b"A")], [A]),
        ([A._replace(value=b"A"), B._replace(timestamp_ms=2)], [B], [B._replace(timestamp_ms=2)]),
        ([A._replace(value=b"A", headers=()), B], [A._replace(value=b"A")], None),
        ([A._replace(value=b"A", key=b"j"), B], [A._replace(value=b"A")], None),
    ],
)
def test_the_checker_finds_what_is_missing_doubled_or_changed(
    target: list[Record], missing: list[Record], surplus: list[Record] | None
) -> None:
    found = compare([A, B], target)
    assert found[0] == missing
    assert surplus is None or found[1] == surplus


def test_blows_are_the_same_for_the_same_seed_and_none_falls_twice_on_a_batch() -> None:
    blows = seeded(17, 8, 16, ("kill", "raise", "broker", "executor"))
    assert blows == seeded(17, 8, 16, ("kill", "raise", "broker", "executor"))
    assert len({blow.batch for blow in blows}) == 8
    in_driver = [blow for blow in blows if blow.point.endswith("commit")]
    assert all(blow.how != "executor" for blow in in_driver)


@pytest.mark.needs("java")
def test_every_record_is_copied_once_whatever_is_killed_on_the_way(tmp_path: Path) -> None:
    """The driver killed before and after stage, commit and Spark's log, tasks that fail, the broker
    killed in a task and in a commit, Spark's last commit taken out of its log. What needs a cluster
    is in `test_cluster`."""
    blows = [
        Blow(0, "after-stage", "kill"),
        Blow(0, "before-commit", "raise"),
        Blow(0, "after-commit", "raise"),
        Blow(0, "after-commit", "kill"),
        Blow(1, "mid-stage", "raise"),
        Blow(1, "mid-stage", "broker"),
        Blow(1, "before-commit", "broker"),
        Blow(2, "before-stage", "kill"),
    ]
    story = Torture(tmp_path, records=120, per_batch=40)
    outcome = story.run(blows, forget_commits_of=[1])
    assert (outcome.missing, outcome.surplus) == ([], [])
    assert (outcome.lives, outcome.struck) == (4, len(blows))


@pytest.mark.needs("java")
def test_the_checker_would_notice_if_the_commits_key_were_dropped(tmp_path: Path) -> None:
    """The same story with a commit that does not know its query and batch doubles a batch."""
    story = Torture(tmp_path, records=80, per_batch=40, keyed=False)
    outcome = story.run([Blow(0, "after-commit", "raise")])
    assert outcome.missing == []
    assert len(outcome.surplus) == 40
