"""Read what a pipeline has written with DuckDB, a reader that knows nothing of brokers."""

from __future__ import annotations

from typing import Any

import duckdb


def fetched(query: str) -> list[tuple[Any, ...]]:
    """Run a query that returns rows."""
    relation = duckdb.sql(query)
    assert relation is not None, f"no rows are the result of {query}"
    return relation.fetchall()
