"""Pipelines that come with the broker: what Spark does with the news.

    quackmq pipeline ls
    quackmq pipeline run trending --topics news --once

A pipeline is a module of this package that says in one line what it does:

    SUMMARY: Final = "…"                            # for `quackmq pipeline ls`
    class Options: …                                # a frozen dataclass of `option.option`
    def run(job: Job, options: Options) -> Report   # what `quackmq pipeline run` calls
    def <its name>(df, …) -> DataFrame              # the same on any DataFrame

Nothing is imported before it is asked for: the command line starts without PySpark, and lists the
pipelines where there is none.
"""

from __future__ import annotations

import ast
import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from quackmq.spark.pipelines.errors import NotInstalled

if TYPE_CHECKING:
    from quackmq.spark.pipelines.job import Job
    from quackmq.spark.pipelines.report import Report

_SUMMARY: Final = "SUMMARY"
#: What PySpark needs and PySpark itself, by the names that Python misses them by.
_OF_SPARK: Final = ("pyspark", "py4j", "numpy", "pandas")


class Pipeline(Protocol):
    """What the module of a pipeline offers."""

    SUMMARY: str
    Options: type[Any]

    def run(self, job: Job, options: Any) -> Report: ...


@cache
def summaries() -> dict[str, str]:
    """Every pipeline by its name, with its line. Read from the source: importing a pipeline takes
    PySpark, and a second."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg:
            continue
        source = Path(__path__[0], f"{module.name}.py").read_text()
        line = next(filter(None, map(_summary, ast.parse(source).body)), None)
        if line is not None:
            found[module.name] = line
    return found


def pipeline(name: str) -> Pipeline:
    """KeyError where there is none of that name; NotInstalled without PySpark."""
    if name not in summaries():
        raise KeyError(name)
    try:
        return cast(Pipeline, import_module(f"{__name__}.{name}"))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_SPARK:
            raise
        raise NotInstalled(
            f"pipelines run on Spark, and {error.name} is not installed: "
            "pip install 'quackmq[spark]'"
        ) from error


def _summary(statement: ast.stmt) -> str | None:
    """What `SUMMARY: Final = "…"` says, of a statement that is this."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
            return text if name == _SUMMARY else None
    return None
