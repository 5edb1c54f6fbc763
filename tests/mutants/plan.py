"""The planted bugs as values, read from the TOML files beside this module.

[[mutant]]
name = "failed-store-wakes-waiters"         # unique over all files
file = "quackmq/stores/core/committer.py"     # where the bug is planted
old = "..."                                 # must occur exactly once in the file
new = "..."                                 # what replaces it
tests = ["tests/stores/local/test_x.py"]    # run for this mutant; files or test ids
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANS = Path(__file__).resolve().parent


class StaleMutant(Exception):
    """The source has changed, so that the mutant no longer applies."""


@dataclass(frozen=True)
class Mutant:
    """One bug in one place. Only `planted` reads its text; nothing here writes a file."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """Return the source with the bug in it.

        Raises StaleMutant if the old text does not occur exactly once.
        """
        found = source.count(self.old)
        if found != 1:
            raise StaleMutant(
                f"{self.name}: the old text occurs {found} times in {self.file}; "
                "update the mutant so that it occurs exactly once"
            )
        return source.replace(self.old, self.new)


def load(directory: Path = PLANS) -> list[Mutant]:
    """Return every mutant of the TOML files, in the order of file and place."""
    mutants = [mutant for path in sorted(directory.glob("*.toml")) for mutant in _read(path)]
    names = [mutant.name for mutant in mutants]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"mutants share a name: {', '.join(repeated)}")
    return mutants


def _read(path: Path) -> Iterator[Mutant]:
    for entry in tomllib.loads(path.read_text())["mutant"]:
        yield _mutant(entry, path)


def _mutant(entry: dict[str, Any], path: Path) -> Mutant:
    wanted = {"name", "file", "old", "new", "tests"}
    if entry.keys() != wanted:
        raise ValueError(f"{path.name}: a mutant has the keys {sorted(wanted)}, not {list(entry)}")
    if not entry["tests"]:
        raise ValueError(f"{path.name}: {entry['name']} names no test")
    return Mutant(**{**entry, "tests": tuple(entry["tests"])})
