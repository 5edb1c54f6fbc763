"""A manifest in use: the files that it lists stay on disk until it is released.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from quackmq.archive.manifest import Manifest


class Pin:
    """A manifest in use. Release it once, or use it in a `with` block."""

    __slots__ = ("_release", "manifest")

    def __init__(self, held: Manifest, release: Callable[[], None]) -> None:
        self.manifest = held
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
        where: TracebackType | None,
    ) -> None:
        self.release()
