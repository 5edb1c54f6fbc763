"""The sink as it is, with blows at its points: what Spark's processes load in `torture`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from quackmq.spark import limits as spark_limits
from quackmq.spark.broker.staging import Target
from quackmq.spark.sink import sink
from quackmq.spark.source.source import QuackSource
from tests.spark.torture import LIFE_S, PAUSE_S

NAME = "quackmq-torture"
#: So small that a task stages its rows in several calls.
CHUNK_BYTES = 1_000


class TortureSource(QuackSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return TortureSink(dict(self.options), schema, overwrite)


class TortureSink(sink.StreamSink):
    def __init__(self, given: dict[str, str], schema: StructType, overwrite: bool) -> None:
        self._settings = json.loads(given.pop("blows"))
        super().__init__(given, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> sink.Message:
        spark_limits.SPARK_CHUNK_BYTES = CHUNK_BYTES  # type: ignore[misc]
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty(sink.BATCH_PROPERTY) or -1)
        (self._attempts(context) / f"{context.attemptNumber()}").touch()
        self._strike("before-stage", batch)
        if not self._settings["keyed"]:
            sink.stream_target = _without_key
        told = super().write(self._struck_on_the_way(iterator, batch))
        self._strike("after-stage", batch)
        return told

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        self._strike("before-commit", batchId)
        super().commit(messages, batchId)
        self._strike("after-commit", batchId)

    def _struck_on_the_way(
        self, iterator: Iterator[pa.RecordBatch], batch: int
    ) -> Iterator[pa.RecordBatch]:
        for rows in iterator:
            middle = rows.num_rows // 2
            yield rows.slice(0, middle)
            self._strike("mid-stage", batch)
            yield rows.slice(middle)

    def _strike(self, point: str, batch: int) -> None:
        for blow in self._settings["blows"]:
            if (blow["point"], blow["batch"]) == (point, batch) and self._is_first(blow):
                getattr(self, f"_{blow['how']}")()

    def _is_first(self, blow: dict[str, Any]) -> bool:
        """Whoever makes the file strikes; each blow falls once."""
        mark = Path(self._settings["marks"]) / f"{blow['batch']}-{blow['point']}-{blow['how']}"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _kill(self) -> None:
        for pid in self._settings["pids"]:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _raise(self) -> None:
        raise RuntimeError("a blow")

    def _executor(self) -> None:
        """Its JVM is the parent of the daemon whose child this process is."""
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _speculate(self) -> None:
        """Be so slow that another attempt at this task begins: it tells so by its mark."""
        context = TaskContext.get()
        assert context is not None
        mark = self._attempts(context) / f"{context.attemptNumber() + 1}"
        deadline = time.monotonic() + LIFE_S
        while not mark.exists():
            assert time.monotonic() < deadline, "no speculative attempt began"
            time.sleep(PAUSE_S)

    def _attempts(self, context: TaskContext) -> Path:
        """Where the attempts at a task of this batch are marked as begun."""
        batch = context.getLocalProperty(sink.BATCH_PROPERTY)
        name = f"attempts.{batch}.{context.stageId()}.{context.partitionId()}"
        directory = Path(self._settings["marks"]) / name
        directory.mkdir(exist_ok=True)
        return directory

    def _broker(self) -> None:
        """Wait until it was killed and is back."""
        wish = Path(self._settings["marks"]) / "broker"
        wish.touch()
        deadline = time.monotonic() + LIFE_S
        while wish.exists():
            assert time.monotonic() < deadline
            time.sleep(PAUSE_S)


def _without_key(context: TaskContext | None) -> Target:
    """The commit's key dropped: every run of a batch is one of its own."""
    told = _stream_target(context)
    return Target(told.key, told.key, told.turn)


_stream_target = sink.stream_target
