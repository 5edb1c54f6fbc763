"""Run a pipeline: a Spark session, a broker's address, a progress line, a way to stop.

Starting the session takes seconds. So it starts when it is first used, and wrong options are
reported before. The same pipeline runs on this machine (`local[*]`) and on a cluster: only the
master's address differs.

While a job is entered (`with Job(…) as job`), SIGTERM and SIGINT ask it to stop. A stream then ends
after its batch or within it; the next run repeats an unfinished batch, so nothing is lost or
doubled. Spark jobs of a batch pipeline are cancelled. A second signal ends the process immediately.

Not thread-safe: run a job from one thread. Signals need the main thread.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from quackmq.client.deadline import Deadline
from quackmq.client.kafka.reachable import wait_for_broker
from quackmq.spark import limits
from quackmq.spark.java import HINT, use_java
from quackmq.spark.pipelines.errors import NotInstalled, Stopped, shorten_error
from quackmq.spark.python_home import use_compiled_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

DEFAULT_MASTER: Final = "local[*]"
DEFAULT_ADDRESS: Final = "127.0.0.1:9092"
_LOCAL: Final = re.compile(r"local(?:\[(\d+|\*)(?:,\s*(?:\d+|\*))?\])?")
_SILENT: Final = "OFF"
#: Texts of Spark: the status of a stream without a source yet, and the error of a source whose
#: Python process started too slowly.
_INITIALIZING: Final = "Initializing"
_TOO_SLOW: Final = "Python worker failed to connect back"
_POLL_S: Final = 0.2
_LINE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """The batches and rows of a stream while `run_stream` waited for it."""

    batches: int = 0
    rows: int = 0
    #: Late rows. Spark counts groups of rows here, not single rows.
    late: int = 0


class Job:
    """The settings and the Spark session of a pipeline's run.

    `spark` is a session that the caller made and stops. Without it, the job starts a session on
    `master` with `configs`, and stops it at the end of the `with` block."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        spark: SparkSession | None = None,
        master: str = DEFAULT_MASTER,
        configs: Mapping[str, str] | None = None,
        log_level: str = _SILENT,
        once: bool = False,
        checkpoint: Path | None = None,
        output: TextIO | None = None,
    ) -> None:
        self.address = address
        self.once = once
        self.checkpoint = checkpoint
        #: Set by SIGTERM and SIGINT. A pipeline of several steps checks it between them.
        self.stopping = threading.Event()
        #: The signal that asked the job to stop.
        self.signal: signal.Signals | None = None
        self._master = master
        self._configs = dict(configs or {})
        self._log_level = log_level
        self._spark = spark
        self._owns_session = spark is None
        #: Whether a stream was started. Streams are stopped, not cancelled, and a following stream
        #: may finish.
        self._is_streaming = False
        self._has_exited = threading.Event()
        self._cancel_thread: threading.Thread | None = None
        self._progress_line = _ProgressLine(output or sys.stderr)
        self._former_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._install_handlers()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the signal handlers; stop the session that this job started."""
        self._progress_line.end()
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._former_handlers.clear()
        # End the thread that cancels Spark jobs before the session stops, because it uses the
        # session.
        self._has_exited.set()
        if self._cancel_thread is not None:
            self._cancel_thread.join()
        if self._spark is not None and self._owns_session:
            try:
                self._spark.stop()
            except OSError:
                # The signal that ended this process has ended Java too.
                if not self.stopping.is_set():
                    raise
            self._spark = None

    @property
    def spark(self) -> SparkSession:
        """Return the Spark session; start it if there is none. Raise NotInstalled without Java."""
        if self._spark is None:
            self.show_progress(f"starting Spark ({self._master})")
            self._spark = _start_session(self._master, self._configs, self._log_level)
            self._install_handlers()  # Spark has installed its own handler
            self.check()
        return self._spark

    @property
    def broker(self) -> dict[str, str]:
        """Return the options of `format("quackmq")` that name the broker."""
        return {"kafka.bootstrap.servers": self.address}

    def wait_for_broker(self) -> None:
        """Return when a broker listens at the address. Raise NoBroker if none does so within
        `PIPELINE_BROKER_MS`. A pipeline calls this first, before it starts Spark. Later it waits
        longer for a broker, which may be restarting."""
        wait_for_broker(self.address, Deadline(limits.PIPELINE_BROKER_MS / 1000))

    def show_progress(self, text: str) -> None:
        """Show the progress in one line; on a terminal it replaces the line before."""
        self._progress_line.show_progress(text)

    def print_line(self, text: str) -> None:
        """Print a line that the progress line does not replace."""
        self._progress_line.print_line(text)

    def check(self) -> None:
        """Raise Stopped if a signal has asked the job to stop."""
        if self.stopping.is_set():
            raise Stopped("a signal stopped the pipeline before it was done")

    def start(self, writer: DataStreamWriter) -> StreamingQuery:
        """Start a stream; wait until Spark has its source; return the query.

        Spark gives the Python process of a source ten seconds to connect. This time cannot be
        configured, and a busy machine may need longer. Then the stream is started again: it has not
        done anything yet."""
        self._is_streaming = True
        for _ in range(limits.PIPELINE_START_ATTEMPTS):
            query = writer.start()
            while query.isActive and query.status["message"].startswith(_INITIALIZING):
                time.sleep(_POLL_S)
            failure = None if query.isActive else query.exception()
            if failure is None or _TOO_SLOW not in str(failure):
                break
        return query

    def run_stream(self, *queries: StreamingQuery) -> StreamCounts:
        """Wait until these queries end, or stop them when the job is asked to stop. Return the
        counts of the first query; the others read its output. If a query fails, raise its error,
        shortened to one sentence."""
        counts = [_QueryCounts(query) for query in queries]
        try:
            while not self.stopping.wait(_POLL_S):
                for query_counts in counts:
                    query_counts.update()
                self.show_progress(counts[0].describe())
                if not all(query.isActive for query in queries):
                    break
            return self._wait_for_queries(counts)
        finally:
            for query in queries:
                query.stop()

    def finish(self, query: StreamingQuery) -> None:
        """Wait until a stream with `availableNow` ends, even if the job was asked to stop. Use it
        for a stream that reads the output of another and has little to do. After
        `PIPELINE_DRAIN_MS` it is stopped, and the next run continues it. Raise its error, shortened
        to one sentence."""
        try:
            deadline = time.monotonic() + limits.PIPELINE_DRAIN_MS / 1000
            while query.isActive and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            failure = query.exception()
            if failure is not None:
                raise shorten_error(failure)
        finally:
            query.stop()

    def _wait_for_queries(self, counts: list[_QueryCounts]) -> StreamCounts:
        """Wait until all queries have ended; return the counts of the first. If one has failed, or
        the job was asked to stop, stop the others. Raise the first error."""
        must_stop = self.stopping.is_set() or any(
            query_counts.failure() is not None for query_counts in counts
        )
        for query_counts in counts:
            if must_stop:
                query_counts.query.stop()
            while query_counts.query.isActive and not self.stopping.wait(_POLL_S):
                query_counts.update()
                self.show_progress(query_counts.describe())
            query_counts.query.stop()
            query_counts.update()
        for query_counts in counts:
            failure = query_counts.failure()
            # A failure after a stop is a consequence of the stop.
            if failure is not None and not self.stopping.is_set():
                raise shorten_error(failure)
        return StreamCounts(counts[0].batches, counts[0].rows, counts[0].late)

    # --- signals ----------------------------------------------------------------------------

    def _install_handlers(self) -> None:
        """Handle SIGTERM and SIGINT by `_on_signal`; keep the handlers that were there before.
        Python allows this in the main thread only: elsewhere do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            former_handler = signal.signal(number, self._on_signal)
            # On the second call the former handler is that of Spark: keep the one of the first
            # call.
            self._former_handlers.setdefault(number, former_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ask the job to stop, from another thread. The second signal gets its default action,
        which ends the process."""
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
        # The handler runs in the main thread, which may be in the middle of a call to Spark. It may
        # also hold the lock of `stopping`: waiting for that lock here would deadlock.
        self._cancel_thread = threading.Thread(target=self._cancel, daemon=True)
        self._cancel_thread.start()

    def _cancel(self) -> None:
        """Set `stopping`; cancel Spark's jobs repeatedly until the `with` block ends. A Spark job
        that starts after the first cancellation would otherwise run to its end."""
        self.stopping.set()
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        while not self._has_exited.wait(_POLL_S):
            if self._spark is None or self._is_streaming:
                continue
            try:
                self._spark.sparkContext.cancelAllJobs()
            except (OSError, Py4JError):
                return  # the signal has ended Java too, and its jobs


class _QueryCounts:
    """The batches and rows of one query, from the progress reports of its last batches."""

    def __init__(self, query: StreamingQuery) -> None:
        self.query = query
        self.batches = self.rows = self.late = 0
        #: The counts of the batch that was reported last: Spark may report it again.
        self._last_counts: tuple[int, int, int] | None = None
        self._rate = 0.0

    def update(self) -> None:
        """Count the batches that Spark has reported since the last call. Usually that is the batch
        that was counted last, so look at the newest report first."""
        newest = self.query.lastProgress
        if newest is None or (
            self._last_counts is not None and newest["batchId"] == self._last_counts[0]
        ):
            if newest is not None:
                self._count_batch(newest)
            return
        for progress in self.query.recentProgress:
            self._count_batch(progress)

    def describe(self) -> str:
        state = "" if self.rows or not self.query.isActive else ", waiting"
        return f"{self.batches} batches, {self.rows:,} rows, {self._rate:,.0f} rows/s{state}"

    def failure(self) -> BaseException | None:
        return self.query.exception()

    def _count_batch(self, progress: Any) -> None:
        """Count one report. A second report of the last batch replaces the first; reports of
        earlier batches are counted already."""
        batch, rows = progress["batchId"], progress["numInputRows"]
        late = sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])
        if self._last_counts is not None and batch < self._last_counts[0]:
            return
        if self._last_counts is not None and batch == self._last_counts[0]:
            self._add(-1, self._last_counts)
        self._last_counts = (batch, rows, late)
        self._add(1, self._last_counts)
        if rows:
            self._rate = progress["processedRowsPerSecond"]

    def _add(self, sign: int, batch_counts: tuple[int, int, int]) -> None:
        """Add the counts of a batch if `sign` is 1; subtract them if it is -1."""
        _, rows, late = batch_counts
        # Batches without rows are not counted.
        if rows:
            self.batches += sign
        self.rows += sign * rows
        self.late += sign * late


class _ProgressLine:
    """The progress line: overwritten on a terminal, else a new line every few seconds."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_terminal = output.isatty()
        # The first line is due at once, whatever the clock shows.
        self._printed_at = -_LINE_EVERY_S
        self._text = ""
        #: Streams print notes in a thread of Spark.
        self._lock = threading.Lock()

    def show_progress(self, text: str) -> None:
        """Show a text in place of the last one. Without a terminal, print it only if no line was
        printed in the last seconds."""
        with self._lock:
            if text == self._text:
                return
            if self._is_terminal:
                # Return to the start of the line and erase it. A text of the full width could wrap,
                # so it is one shorter.
                width = shutil.get_terminal_size().columns
                self._output.write(f"\r\x1b[K{text[: width - 1]}")
            elif time.monotonic() - self._printed_at >= _LINE_EVERY_S:
                self._output.write(text + "\n")
                self._printed_at = time.monotonic()
            else:
                return
            self._text = text
            self._output.flush()

    def print_line(self, text: str) -> None:
        with self._lock:
            self._output.write(f"\r\x1b[K{text}\n" if self._is_terminal else f"{text}\n")
            self._output.flush()
            self._text = ""

    def end(self) -> None:
        if self._is_terminal and self._text:
            self._output.write("\r\x1b[K")
            self._output.flush()
        self._text = ""


# --- the session ---------------------------------------------------------------------------------


def _start_session(master: str, configs: Mapping[str, str], log_level: str) -> SparkSession:
    """Start Java and a session with our data source. `configs` take precedence over our defaults.
    Raise NotInstalled if Java is missing or does not start. Other errors of Spark are raised with
    a short text."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    from quackmq.spark.registration import register

    if not use_java():
        raise NotInstalled(HINT)
    use_compiled_pyspark()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = SparkConf().setMaster(master).setAppName("quackmq")
    conf.setAll(list({**_default_configs(master, log_level), **configs}.items()))
    is_silent = log_level == _SILENT
    try:
        # Java runs in another session, because a terminal's signals would end it immediately. When
        # Spark's log is off, Java's stderr is closed too: Java prints ten lines before the log
        # level applies, and repeats failures that we report ourselves.
        process_options = {
            "start_new_session": True,
            "stderr": subprocess.DEVNULL if is_silent else None,
        }
        gateway = launch_gateway(conf, process_options)  # type: ignore[no-untyped-call]
        context = SparkContext(conf=conf, gateway=gateway)
        context.setLogLevel(log_level)
        spark = SparkSession(context)
        register(spark)
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            raise NotInstalled(
                "Java did not start: Spark needs version 17 or later, and memory"
                + ("; --spark-log error shows what it says" if is_silent else "")
            ) from error
        raise shorten_error(error) from error
    return spark


def _default_configs(master: str, log_level: str) -> dict[str, str]:
    """Return our settings of Spark. A local master gets as many shuffle partitions as cores."""
    configs = {
        "spark.log.level": log_level,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.stopTimeout": f"{limits.PIPELINE_STOP_MS}ms",
    }
    local = _LOCAL.fullmatch(master)
    if local is not None:
        # Spark's default of 200 is for clusters: each partition is a task, and a state to keep, in
        # every batch.
        cores = os.cpu_count() if local[1] == "*" else int(local[1] or 1)
        configs["spark.sql.shuffle.partitions"] = str(cores or 1)
        configs["spark.driver.host"] = configs["spark.driver.bindAddress"] = "127.0.0.1"
    return configs
