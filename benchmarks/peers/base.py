"""What the comparison needs to know of a system to run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from benchmarks.processes import Command, Server, free_ports, running


class Peer(ABC):
    """A system on one machine, fresh with every start, with its defaults but for what is named."""

    #: As the command line has it.
    name: ClassVar[str]
    #: As the table has it.
    title: ClassVar[str]
    #: The source of its client, in driver/.
    client: ClassVar[str]
    #: How it is set up, and what of that is not as it comes.
    settings: ClassVar[str]
    #: Whether what is acknowledged is on disk, and not only in the hands of the kernel.
    is_synced: ClassVar[bool]

    @abstractmethod
    def fetch(self) -> None:
        """Get it, unless it is there. Raises packages.Unavailable with the reason."""

    @abstractmethod
    def version(self) -> str:
        """After it was fetched."""

    @abstractmethod
    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        """Write what it needs into its directory; answers what starts it."""

    @contextmanager
    def started(self, directory: Path) -> Iterator[Server]:
        """It starts, and may not listen yet. The clock runs from here, without the preparation."""
        (port,) = free_ports(1)
        with running(self.prepare(directory, port), port, directory) as server:
            yield server
