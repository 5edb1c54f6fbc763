"""A helper whose only purpose is to be rewritten by pytest; see test_optimized.py."""

from __future__ import annotations


def holds(found: bool, *, wanted: bool | None = None) -> bool:
    if wanted is not None:
        assert found is wanted
    return found
