"""Opening a directory: create it if it is new, recover its state, begin a new run.

A crash while a directory is created leaves one without `quackmq.json`, which is created again from
the start. A crash while one is opened leaves the old checkpoint or the new one. Both are right,
because until the new one is in place, only bytes that are also in the journal are written.

A directory of format 2 is opened unchanged: it has no packs yet. Its number is set to 3 before the
first pack is written, so that an older program refuses it instead of missing data.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from quackmq.disk.interface import read_file, replace_file
from quackmq.disk.real import Disk
from quackmq.errors import DamagedStore, UnusableDirectory
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog
from quackmq.stores.core.committer import Committer
from quackmq.stores.local import recovery
from quackmq.stores.local.files import checkpoint, packs
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.format import FORMAT_VERSION
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.journal import JournalLocation, slot_path
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.medium import LocalMedium
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.orphans import OrphanFiles
from quackmq.stores.local.recovery import META_PATH, Meta, Recovered

_logger = logging.getLogger("quackmq.store")
LOCK_PATH: Final = "lock"
#: Not the store's own: the archive keeps old records there (`quackmq.archive.layout`).
_ARCHIVE_DIRECTORY: Final = "archive"
#: The content that a directory may have if its creation was interrupted.
_BEGINNINGS: Final = {
    LOCK_PATH,
    JOURNAL_DIRECTORY,
    LOG_DIRECTORY,
    checkpoint.PATH,
    f"{checkpoint.PATH}.new",
    f"{META_PATH}.new",
}


async def open_directory(
    disk: Disk, options: LocalOptions, now_ms: Callable[[], int]
) -> tuple[Committer, LocalMedium, Meta]:
    """Lock the directory, create or recover its content, and write the first checkpoint of a new
    run. Raises StoreLocked, NewerFormat, DamagedStore, UnusableDirectory, OSError."""
    # Check before the lock file is created: a directory of another program must stay unchanged.
    if recovery.read_meta(disk) is None:
        _check_new(disk)
    disk.lock(LOCK_PATH)
    # Read again with the lock: another broker may have created the store meanwhile.
    if recovery.read_meta(disk) is None:
        _make(disk, options)
    recovered = recovery.recover(disk, options)
    clean = recovered.header.clean
    if not clean:
        _logger.info(
            "the store was not closed cleanly: %d frames replayed, %d discarded",
            recovered.replayed_frames,
            recovered.discarded_frames,
        )
    if recovered.meta.format < FORMAT_VERSION:
        # Before anything is written that an older program would not know.
        replace_file(disk, META_PATH, recovered.meta.encode())
    _begin_run(disk, recovered)
    # List the files that exist now, before the committer writes new ones.
    orphans = OrphanFiles(disk, recovered, clean=clean)
    # A number that no pack has, whether a checkpoint names it or not.
    numbers = (*packs.list_packs(disk), *recovered.packed.sizes)
    recovered.first_pack = max(numbers, default=0) + 1
    medium = LocalMedium(disk, options, recovered)
    committer = Committer(medium, recovered.loaded(), now_ms)
    await medium.start(committer, recovered)
    if orphans:
        medium.sweep(orphans)
    return committer, medium, recovered.meta


def _check_new(disk: Disk) -> None:
    """Raise unless a store may be created here: in an empty directory, or in one whose creation was
    interrupted."""
    strange = set(disk.list("")) - _BEGINNINGS
    if _ARCHIVE_DIRECTORY in strange:
        raise DamagedStore(
            f"there is an {_ARCHIVE_DIRECTORY}/ but no {META_PATH} and no log that continues it: "
            f"restore both from a backup, or use another directory and import the records there "
            f"with `quackmq archive import`"
        )
    if strange:
        raise UnusableDirectory(
            f"the directory is not empty and contains no QuackMQ data (found {min(strange)!r}): "
            "use an empty or a new directory"
        )
    if holds_data(disk):
        raise DamagedStore(f"{META_PATH} is missing, but its data exists: restore it from a backup")


def holds_data(disk: Disk) -> bool:
    """Return whether anything was written here after the directory was created."""
    slots = (f"{JOURNAL_DIRECTORY}/{name}" for name in disk.list(JOURNAL_DIRECTORY))
    return bool(disk.list(LOG_DIRECTORY)) or any(read_file(disk, slot) for slot in slots)


def _make(disk: Disk, options: LocalOptions) -> None:
    """Create a store. The file with the format version comes last: without it, it is no store."""
    disk.make_directory(JOURNAL_DIRECTORY)
    disk.make_directory(LOG_DIRECTORY)
    disk.sync_directory("")
    start = JournalLocation(0, 0)
    # The slot that a checkpoint names always exists, so that a missing one is noticed.
    disk.open(slot_path(start.slot), create=True).close()
    disk.sync_directory(JOURNAL_DIRECTORY)
    # Run 0 and epoch 0 mean that no broker has used the directory yet. Frames count from 1.
    header = CheckpointHeader(0, 0, True, options.sync, disk.boot_id(), 1, start)
    replace_file(disk, checkpoint.PATH, checkpoint.encode(header, Catalog().capture()))
    meta = Meta(
        str(uuid.uuid4()),
        int.from_bytes(os.urandom(4), "little"),
        options.journal_slots,
        options.journal_slot_bytes,
    )
    replace_file(disk, META_PATH, meta.encode())


def _begin_run(disk: Disk, recovered: Recovered) -> None:
    """Begin a new run, so that no old bytes are taken for new ones. Begin a new leader epoch unless
    the store was closed cleanly, because the end of the log may have been cut off.

    In the weak sync modes a power cut may have lost offsets that were readable. Skip as many as it
    can have lost, so that no offset is assigned twice."""
    old = recovered.header
    epoch = old.epoch if old.clean and old.run else old.epoch + 1
    recovered.header = replace(old, run=old.run + 1, epoch=epoch, clean=False)
    # Another boot id means that the machine was restarted, perhaps by a power cut.
    lost = not old.clean and old.sync != "always" and old.boot_id != disk.boot_id()
    for log in recovered.logs.values():
        log.epoch = epoch
        if lost:
            log.high_watermark += limits.UNSYNCED_OFFSETS
            log.end_offset = log.high_watermark
