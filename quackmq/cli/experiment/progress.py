"""Output while experiments run: the connection records and, on a terminal, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, Self, TextIO

from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.experiment.report import Outcome
from quackmq.cli.experiment.runner import Observer, Progress

_BAR_CHARS: Final = 30
#: Terminal codes: return to the start of the line and clear it.
_CLEAR: Final = "\r\x1b[K"


class Watcher(Observer):
    """Show a progress bar on `stream` if that is a terminal. Print connection records to stdout."""

    def __init__(
        self, experiments: Sequence[Experiment], stream: TextIO, *, prints_records: bool
    ) -> None:
        self._stream = stream
        self._has_bar = stream.isatty()
        self._prints_records = prints_records
        self._total_s = sum(experiment.seconds for experiment in experiments)
        self._done_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def connected(self, experiment: Experiment, records: Sequence[str]) -> None:
        """Print the connection records, unless only reports are wanted."""
        if self._prints_records:
            self._clear()
            for record in records:
                print(record)
            sys.stdout.flush()

    def progress(self, progress: Progress) -> None:
        """Redraw the progress bar. It shows the share of the publishing time of all experiments."""
        if not self._has_bar:
            return
        # Catching up after the publishing time does not move the bar.
        of_this = min(progress.seconds, progress.experiment.seconds)
        share = min(1.0, (self._done_s + of_this) / self._total_s)
        filled = round(share * _BAR_CHARS)
        title = progress.experiment.title or progress.experiment.shape
        self._stream.write(
            f"{_CLEAR}[{'#' * filled}{'-' * (_BAR_CHARS - filled)}] {share:4.0%}  {title}: "
            f"{progress.published} published, {progress.delivered} delivered"
        )
        self._stream.flush()

    def done(self, outcome: Outcome) -> None:
        self._done_s += outcome.experiment.seconds

    def _clear(self) -> None:
        if self._has_bar:
            self._stream.write(_CLEAR)
            self._stream.flush()
