"""A table of cases is one test, and the case that fails is named."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from tests.kit.tables import each


def test_every_case_is_tried_with_the_fixtures_that_are_left() -> None:
    tried = []

    @each("number", [1, 2])
    @each(("letter", "sign"), [("a", "+"), ("b", "-")])
    def test(number: int, letter: str, sign: str, fixture: str) -> None:
        tried.append(f"{number}{letter}{sign}{fixture}")

    assert list(inspect.signature(test).parameters) == ["fixture"]
    test(fixture="!")
    assert tried == ["1a+!", "1b-!", "2a+!", "2b-!"]


def test_the_case_that_fails_is_named() -> None:
    @each("number", [1, 2, 3])
    def test(number: int) -> None:
        assert number < 2

    with pytest.raises(AssertionError) as caught:
        test()
    assert caught.value.__notes__ == ["in the case number=2"]


def test_coroutines_are_awaited_case_by_case() -> None:
    tried = []

    @each("number", [1, 2])
    async def test(number: int) -> None:
        await asyncio.sleep(0)
        tried.append(number)

    assert inspect.iscoroutinefunction(test)
    asyncio.run(test())
    assert tried == [1, 2]


def test_marks_stay() -> None:
    @each("number", [1])
    @pytest.mark.sweep
    def test(number: int) -> None: ...

    marked: Any = test
    assert [mark.name for mark in marked.pytestmark] == ["sweep"]


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        each("number", [])
