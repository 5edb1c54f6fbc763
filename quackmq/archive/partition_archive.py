"""The state of one archived partition in memory: its manifest, its problem, its pins.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio

from quackmq.archive.layout import MANIFEST
from quackmq.archive.manifest import Manifest, list_names
from quackmq.errors import QuackError, UnknownPartition
from quackmq.model.topic import PartitionKey


class PartitionArchive:
    """The state of one partition. Hold its lock to change its files on disk."""

    def __init__(
        self,
        key: PartitionKey,
        topic: str,
        lock: asyncio.Lock,
        problem: QuackError | None = None,
        is_new: bool = False,
    ) -> None:
        self.key = key
        self.topic = topic
        self.lock = lock
        self.problem = problem
        #: Whether nothing of it was archived when the broker was opened.
        self.is_new = is_new
        self.manifest: Manifest | None = None
        #: The file with the durable manifest (manifest_pointers.py).
        self.manifest_name = MANIFEST
        self.size = 0
        self.is_deleted = False
        #: Whether the last change failed: its manifest may be on disk, or the one before.
        self.commit_unknown = False
        #: Whether there may be files that no manifest lists.
        self.has_orphans = False
        #: Pinned manifests by version, and how often each is pinned.
        self._pinned: dict[int, tuple[Manifest, int]] = {}

    def set_manifest(self, current: Manifest, changed: dict[PartitionKey, None]) -> None:
        """Make a manifest visible to readers, and add the partition to the changed ones."""
        changed[self.key] = None
        self.manifest = current
        self.size = current.size

    def require_changeable(self) -> Manifest:
        """Return the manifest. Raises UnknownPartition, or the partition's problem, if it may not
        be changed."""
        if self.is_deleted or self.manifest is None:
            raise unknown_partition_error(self.key)
        if self.problem is not None:
            raise without_traceback(self.problem)
        return self.manifest

    def pin(self) -> Manifest:
        """Pin the current manifest; return it."""
        assert self.manifest is not None
        version = self.manifest.version
        pinned, count = self._pinned.get(version, (self.manifest, 0))
        self._pinned[version] = pinned, count + 1
        return self.manifest

    def unpin(self, pinned: Manifest) -> bool:
        """Release one pin of a manifest; return whether this version is no longer pinned."""
        _, count = self._pinned[pinned.version]
        if count > 1:
            self._pinned[pinned.version] = pinned, count - 1
            return False
        del self._pinned[pinned.version]
        return True

    def names_in_use(self) -> set[str]:
        return {name for pinned, _ in self._pinned.values() for name in list_names(pinned)}


def without_traceback(problem: QuackError) -> QuackError:
    """Return the error without the traceback of earlier raises, which would keep objects alive."""
    return problem.with_traceback(None)


def unknown_partition_error(key: PartitionKey) -> UnknownPartition:
    return UnknownPartition(f"partition {key.partition} of {key.topic_id} is not archived")
