"""Pins: the files that a pinned manifest lists stay on disk until the pin is released.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from quackmq.archive.manifest import Manifest


class Pin:
    """A pinned manifest. Release it once, or use it in a `with` block."""

    __slots__ = ("_release", "manifest")

    def __init__(self, manifest: Manifest, release: Callable[[], None]) -> None:
        self.manifest = manifest
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Release the manifest; further calls do nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
