"""A process without pandas, where it is installed for others.

pyarrow loads pandas as soon as it makes its first value, to know a pandas value when it meets one.
Nobody here has any: for a broker that is 37 MB of memory and a quarter of a second at each start.

For processes that are all ours, before pyarrow is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def without_pandas() -> None:
    """From now on, whoever tries to load it hears that there is none, and does without."""
    sys.meta_path.insert(0, _NoPandas())


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)
        return None
