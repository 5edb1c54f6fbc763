"""Find the module that holds a limit, for tests that change limits by name."""

from __future__ import annotations

from types import ModuleType

from quackmq.cli.limits_command import limits_modules


def home_of(name: str) -> ModuleType:
    """Return the `limits` module that defines `name`. KeyError."""
    for module in limits_modules():
        if name in module.__annotations__:
            return module
    raise KeyError(name)
