"""Pipelines that come with the broker: Spark jobs over topics.

    quackmq pipeline ls
    quackmq pipeline run trending --topics news --once

A pipeline is a module of this package that defines:

    SUMMARY: Final = "…"                            # one line, for `quackmq pipeline ls`
    class Options: …                                # a frozen dataclass of `options.option`
    def run(job: Job, options: Options) -> Report   # what `quackmq pipeline run` calls
    def <its name>(df, …) -> DataFrame              # the same on any DataFrame

A pipeline is imported only when it is used. So the command line starts without PySpark, and lists
the pipelines where PySpark is not installed.
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
#: The modules of PySpark and of its dependencies, as a ModuleNotFoundError names them.
_SPARK_MODULES: Final = ("pyspark", "py4j", "numpy", "pandas")


class Pipeline(Protocol):
    """The interface of a pipeline's module."""

    SUMMARY: str
    Options: type[Any]

    def run(self, job: Job, options: Any) -> Report: ...


@cache
def summaries() -> dict[str, str]:
    """Return the summary of each pipeline by its name. The summaries are read from the source,
    because importing a pipeline needs PySpark and takes a second."""
    summary_by_name: dict[str, str] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg:
            continue
        source = Path(__path__[0], f"{module.name}.py").read_text()
        summary = next(filter(None, map(_find_summary, ast.parse(source).body)), None)
        if summary is not None:
            summary_by_name[module.name] = summary
    return summary_by_name


def pipeline(name: str) -> Pipeline:
    """Import and return a pipeline's module. Raise KeyError if there is none of that name, and
    NotInstalled without PySpark."""
    if name not in summaries():
        raise KeyError(name)
    try:
        return cast(Pipeline, import_module(f"{__name__}.{name}"))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SPARK_MODULES:
            raise
        raise NotInstalled(
            f"pipelines run on Spark, and {error.name} is not installed: "
            "pip install 'quackmq[spark]'"
        ) from error


def _find_summary(statement: ast.stmt) -> str | None:
    """Return the text of the statement `SUMMARY: Final = "…"`; None for any other statement."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
            return text if name == _SUMMARY else None
    return None
