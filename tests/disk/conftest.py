"""These tests use a real disk."""

from __future__ import annotations

from tests.kit.real_disk import real_directory

__all__ = ["real_directory"]
