"""Mark the output directories of pipelines, so that no pipeline writes to a foreign directory.

A pipeline that overwrites files, or continues an earlier run, must know that a directory is its
own. So it marks the directory with a small file, `_quackmq.json`. Readers of Parquet ignore a file
of that name. A pipeline writes only to a directory that has its mark or is empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quackmq.errors import InvalidRequest

MARK: Final = "_quackmq.json"
_PIPELINE: Final = "pipeline"


def claim(directory: Path, pipeline: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a directory is marked with; mark it with `facts` if it is empty or
    missing.

    `facts` must be serialisable as JSON. Raise InvalidRequest if the directory holds other files or
    belongs to another pipeline."""
    stored_facts = read_facts(directory, pipeline)
    if stored_facts is not None:
        return stored_facts
    directory.mkdir(parents=True, exist_ok=True)
    new_file = directory / f"{MARK}.new"
    with new_file.open("w") as file:
        json.dump({_PIPELINE: pipeline, **facts}, file, sort_keys=True, default=str)
        file.flush()
        os.fsync(file.fileno())
    new_file.replace(directory / MARK)
    return json.loads(json.dumps(dict(facts), default=str))  # type: ignore[no-any-return]


def read_facts(directory: Path, pipeline: str) -> dict[str, Any] | None:
    """Return the facts that a directory is marked with; None if it is empty or missing. Raise
    InvalidRequest if it holds other files or belongs to another pipeline."""
    try:
        stored_facts = json.loads((directory / MARK).read_text())
        owner = stored_facts.pop(_PIPELINE)
    except (FileNotFoundError, NotADirectoryError):
        _check_empty(directory, pipeline)
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidRequest(f"{directory / MARK} is not the mark of a pipeline") from None
    if owner != pipeline:
        raise InvalidRequest(
            f"{directory} belongs to the pipeline {owner}, not to {pipeline}: give another path"
        )
    return dict(stored_facts)


def _check_empty(directory: Path, pipeline: str) -> None:
    """Raise InvalidRequest unless the directory is missing or empty. An unfinished mark counts as
    empty: a pipeline was killed while it wrote the mark."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} is not a directory: give another path")
    others = sorted(path.name for path in directory.iterdir() if path.name != f"{MARK}.new")
    if others:
        raise InvalidRequest(
            f"{directory} is not of {pipeline}: it holds {others[0]!r}. Give a directory that is "
            "empty or missing"
        )
