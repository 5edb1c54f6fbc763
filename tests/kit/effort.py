"""How many cases a test of very many tries: all of them in `make test`, some in `make check`.

For tests that try one thing with many seeds or examples. Whoever changes the code wants to know
within two minutes whether it still works; the unlikely cases are left to `make test`.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings

#: The profile of hypothesis that `make check` names; see tests/conftest.py.
QUICK: Final = "quick"
#: In `make check`, one case of so many is tried...
_SHARE: Final = 12
#: ...and no fewer than this.
_LEAST: Final = 2


def of(count: int) -> int:
    """How many of so many cases to try."""
    if settings.get_current_profile_name() != QUICK:
        return count
    return min(count, max(count // _SHARE, _LEAST))
