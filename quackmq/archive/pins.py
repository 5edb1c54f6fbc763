"""A manifest in somebody's hands: what it lists stays on disk until they let go of it.

Who may call: the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from quackmq.archive.manifest import Manifest


class Pin:
    """A manifest in use. Released once, or by leaving a `with`."""

    __slots__ = ("_release", "manifest")

    def __init__(self, held: Manifest, release: Callable[[], None]) -> None:
        self.manifest = held
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Whoever calls again does nothing."""
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
