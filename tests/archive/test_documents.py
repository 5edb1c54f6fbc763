"""What docs/archive.md says is true: each example is run as it stands, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.parquet.schema import SCHEMA
from quackmq.broker import limits as broker_limits
from quackmq.model.policy import Policy
from tests.kit.readme import ROOT, Block, Tour, blocks

TEXT = (ROOT / "docs" / "archive.md").read_text()
SPARK = "pyspark"
#: Each program loads a library that takes a second by itself, and Spark a Java machine: on one that
#: is busy that adds up.
LONG_SECONDS = 300


def is_of_spark(index: int, tour: list[Block]) -> bool:
    """A program for Spark, or what it prints."""
    before = tour[index - 1] if tour[index].kind == "text" else tour[index]
    return SPARK in before.text


@pytest.mark.timeout(LONG_SECONDS)
@pytest.mark.needs("kcat", "curl")
def test_docs_archive_works_line_by_line(tmp_path: Path) -> None:
    tour = blocks(TEXT)
    programs = [block.text for block in tour if block.kind == "python"]
    for tool in ("duckdb", "polars", "pandas"):
        assert any(f"import {tool}" in program for program in programs)
    with Tour(tmp_path) as running:
        for index, block in enumerate(tour):
            if not is_of_spark(index, tour):
                running.run(block)


@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.needs("kcat", "curl", "java")
def test_plain_spark_reads_the_directory_by_glob_and_by_manifest(tmp_path: Path) -> None:
    """S1's lower half: the snippets of docs/archive.md, with nothing of ours in them."""
    tour = blocks(TEXT)
    spark = [block for index, block in enumerate(tour) if is_of_spark(index, tour)]
    assert [block.kind for block in spark] == ["python", "text"] * 2, "by glob and by manifest"
    begins = next(index for index, block in enumerate(tour) if block.kind == "python")
    with Tour(tmp_path, LONG_SECONDS) as running:
        for block in [*tour[:begins], *spark]:
            running.run(block)


def test_every_column_is_described() -> None:
    for name in SCHEMA.names:
        assert f"`{name}`" in TEXT, name


def test_the_defaults_are_those_of_the_policy() -> None:
    policy = Policy()
    assert f"| {policy.archive_after_ms}, an hour |" in TEXT
    assert f"| {policy.archive_bytes}, 1 GiB |" in TEXT
    assert f"| {policy.archive_after_live_ms}, ten seconds |" in TEXT
    assert f"{archive_limits.ARCHIVE_ROW_GROUP_ROWS:,} rows" in TEXT
    assert f"about {limits.MERGE_TARGET_BYTES // limits.MIB} MiB" in TEXT
    assert f"for {broker_limits.PUBLISHER_EXPIRY_MS // 86_400_000} days" in TEXT
