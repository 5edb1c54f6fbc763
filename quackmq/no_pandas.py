"""Keep pyarrow from loading pandas into the processes of the broker.

pyarrow loads pandas when it makes its first value, so that it can recognise pandas values. The
broker has none, and pandas would cost 37 MB of memory and a quarter of a second at each start.

Use this only in processes of our own, before pyarrow is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def hide_pandas() -> None:
    """Make every later import of pandas fail in this process, as if it were not installed."""
    sys.meta_path.insert(0, _NoPandas())


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)
        return None
