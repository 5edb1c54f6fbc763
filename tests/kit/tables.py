"""Tables of cases as one test, where pytest would take longer for each case than the case itself.

A test per case costs some six milliseconds of processor time: to collect it in every worker, to set
it up, and to report it. `each` is for tables of quick cases that share no fixture which a case
changes. Where a case fails, a note names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

#: Of any parameters: `each` takes some of them away.
Test = Callable[..., Any]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each case, like `pytest.mark.parametrize`, as one test."""
    if isinstance(names, str):
        arguments = [{names: case} for case in cases]
    else:
        arguments = [dict(zip(names, case, strict=True)) for case in cases]
    assert arguments, "a table without cases tests nothing"

    def decorate(test: Test) -> Test:
        looped: Any
        if inspect.iscoroutinefunction(test):

            async def looped(**fixtures: Any) -> None:
                for case in arguments:
                    with named(**case):
                        await test(**fixtures, **case)
        else:

            def looped(**fixtures: Any) -> None:
                for case in arguments:
                    with named(**case):
                        test(**fixtures, **case)

        functools.update_wrapper(looped, test, updated=())
        looped.pytestmark = list(getattr(test, "pytestmark", ()))
        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in arguments[0]]
        looped.__signature__ = signature.replace(parameters=left)
        run: Test = looped
        return run

    return decorate


@contextmanager
def named(**case: object) -> Iterator[None]:
    """Name the case in whatever error comes out of this block."""
    try:
        yield
    except BaseException as error:
        error.add_note("in the case " + ", ".join(f"{name}={case[name]!r}" for name in case))
        raise
