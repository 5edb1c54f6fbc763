"""Run an experiment: a broker in this process, and peers in processes connected to it by pipes.

    this process                               a process for each peer
    broker ── line protocol ── pipe ──────────► stdin   publisher or subscriber
                          └─── pipe ◄────────── stdout
    control ───────────────── socket ◄────────► control: ready, go, done, end, report

All peers start, connect and choose their topics, and the connection records are shown. Then
publishers publish until their time is over or they have published everything, subscribers catch up,
all peers terminate, and the counts are compared. At the end everything is archived, and the archive
is compared with the counts. `peer` is the program of a peer, `report` checks the counts, and
`archive_check` checks the archive.

Programs of the user (`program`) have pipes too, but no control channel. A publisher among them
begins at once, so it is started when all subscribers are ready.

Whatever happens, no process is left behind, and the store is closed. SIGINT and SIGTERM end an
experiment early and cleanly; its report says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings
from quackmq.cli import limits
from quackmq.cli.experiment.accounts import CALLER, Accounts
from quackmq.cli.experiment.archive_check import compare_archive
from quackmq.cli.experiment.peer import Behaviour, Part
from quackmq.cli.experiment.peer_process import PeerProcess
from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.experiment.program import ProgramProcess
from quackmq.cli.experiment.report import MORTAL, Outcome, Sample
from quackmq.errors import QuackError, QuackTimeout
from quackmq.protocols.line.codec.messages import Role
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.stores.local import LocalOptions, LocalStore

log = logging.getLogger(__name__)

#: Interval between two checks whether subscribers have caught up.
_CHECK_S: Final = 0.02
#: If δ is at most this long, a late subscriber returns when all entries have expired. If δ is
#: longer, it returns as soon as publishing is over.
_LATE_S: Final = 5.0

Sync = Literal["always", "interval", "os"]


class Progress(NamedTuple):
    """The progress of an experiment."""

    experiment: Experiment
    seconds: float
    published: int = 0
    delivered: int = 0


class Observer:
    """Callbacks during an experiment. Override the ones you need."""

    def connected(self, experiment: Experiment, records: Sequence[str]) -> None:
        """All peers have connected."""

    def progress(self, progress: Progress) -> None: ...


async def run(
    experiment: Experiment,
    directory: Path,
    observer: Observer,
    sync: Sync = "always",
    stopping: asyncio.Event | None = None,
) -> Outcome:
    """Run the experiment in this directory, archive everything, and compare the archive with the
    accounts. Raises QuackError if the experiment cannot be performed."""
    async with AsyncExitStack() as opened:
        store = await _open_store(directory, sync)
        opened.push_async_callback(store.close)
        # A program may choose topics of its own; they are created with the same policy.
        settings = BrokerSettings(default_policy=experiment.policy)
        broker = Broker(store, settings, archive=store)
        await broker.open()
        opened.push_async_callback(broker.close)
        for name in experiment.topic_names:
            await broker.create_topic(CALLER, name, partitions=1, policy=experiment.policy)
        line_server = LineServer(
            broker, None, LineSettings(answer_ms=experiment.answer_ms, reading=experiment.reading)
        )
        await line_server.start()
        opened.push_async_callback(line_server.close)
        running = _ExperimentRun(
            experiment, broker, line_server, observer, stopping or asyncio.Event()
        )
        opened.push_async_callback(running.end_processes)
        outcome = await running.run()
        archived_early = await _archive_all(broker, list(outcome.held))
    # The broker is closed: what is read now is on disk.
    result = await asyncio.to_thread(compare_archive, directory, outcome, archived_early)
    return dataclasses.replace(outcome, archive=result)


async def _open_store(directory: Path, sync: Sync) -> TieredStore:
    """Open a log with an archive. Closing it closes both."""
    log_store = await LocalStore.open(directory, LocalOptions(sync=sync))
    try:
        return await TieredStore.open(log_store, log_store.disk)
    except BaseException:
        await log_store.close()
        raise


async def _archive_all(broker: Broker, topic_names: Sequence[str]) -> int:
    """Archive all entries of these topics. Return how many were archived before. If archiving
    fails, log the reason; the comparison then finds the entries that are missing."""
    assert broker.archive is not None, "the store has an archive"
    archived_early = 0
    for name in topic_names:
        (partition,) = (await broker.archive.describe(CALLER, name)).partitions
        archived_early += partition.next_offset
        try:
            await broker.archive.archive(CALLER, name)
        except QuackError as error:
            log.error("topic %s cannot be archived: %s", name, error)
    return archived_early


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """Provide an event that SIGINT and SIGTERM set. Needs a running event loop."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _ExperimentRun:
    def __init__(
        self,
        experiment: Experiment,
        broker: Broker,
        line_server: LineServer,
        observer: Observer,
        stopping: asyncio.Event,
    ) -> None:
        self._experiment = experiment
        self._broker = broker
        self._line_server = line_server
        self._accounts = Accounts(broker, line_server)
        self._observer = observer
        self._stopping = stopping
        self._publishers: dict[str, PeerProcess] = {}
        #: The current process of each subscriber; `_former` has the first processes of late ones.
        self._subscribers: dict[str, PeerProcess] = {}
        self._former: list[PeerProcess] = []
        #: The programs of the user.
        self._programs: list[ProgramProcess] = []
        self._samples: list[Sample] = []
        #: The number of entries in each topic, at the last sample.
        self._published: dict[str, int] = {}
        self._start_s = 0.0

    async def run(self) -> Outcome:
        """Perform all phases of the experiment and return its outcome. Raises QuackTimeout if the
        peers do not get ready, and QuackError if one ends too early."""
        experiment = self._experiment
        self._observer.progress(Progress(experiment, 0.0))
        records, start_ns = await self._connect_peers()
        self._observer.connected(experiment, records)
        for process in self._publishers.values():
            process.send(["go", time.monotonic_ns()])
        sampling = asyncio.get_running_loop().create_task(self._sample())
        try:
            await self._publish()
            await self._reconnect_late_subscribers(start_ns)
            await self._wait_for_subscribers()
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])
        if not sampling.cancelled():
            sampling.result()  # it only ends by itself if it has failed
        await self._end(self._subscribers.values())
        await self._stop_programs(Role.SUB)
        await self.end_processes()
        await self._await_disconnects()
        return await self._make_outcome(records)

    async def end_processes(self) -> None:
        """Kill all processes that are still running."""
        processes = [*self._former, *self._publishers.values(), *self._subscribers.values()]
        await asyncio.gather(*(process.kill() for process in processes))
        await asyncio.gather(*(program.kill() for program in self._programs))

    # --- phases -----------------------------------------------------------------------------

    async def _connect_peers(self) -> tuple[list[str], int]:
        """Start all peers and wait until they have chosen their topics; then start the subscribers'
        work. Return the connection records, and the start time."""
        for part in self._experiment.subscribers():
            self._subscribers[part.id] = await self._launch(part)
        for part in self._experiment.publishers():
            self._publishers[part.id] = await self._launch(part)
        everybody = [*self._subscribers.values(), *self._publishers.values()]
        await _wait_for_all(*(process.wait_for("ready") for process in everybody))
        records = self._line_server.records()
        await self._launch_programs(Role.SUB)
        start_ns = time.monotonic_ns()
        self._start_s = start_ns / 1e9
        await self._disconnect_late_subscribers(start_ns)
        for process in self._subscribers.values():
            process.send(["go", start_ns])
        await self._launch_programs(Role.PUB)
        # A program may have ended already, so the server does not list it any more.
        records += [each.record for each in self._programs if each.record is not None]
        # Shorter ids first, so that p2 comes before p10.
        records.sort(key=lambda each: (each.role, len(each.id), each.id))
        return [str(record) for record in records], start_ns

    async def _launch(self, part: Part) -> PeerProcess:
        """Start a peer process and give the other ends of its pipes to the line server. Kill the
        process if the line server refuses."""
        process, read_fd, write_fd = await PeerProcess.start(part)
        try:
            await self._line_server.attach(read_fd, write_fd, f"pipes of process {process.id}")
        except BaseException:
            await process.kill()
            raise
        return process

    async def _launch_programs(self, role: Role) -> None:
        """Start the programs of the user that have this role, and wait until they have chosen their
        topics, or until a signal. Raises QuackError if one does not."""
        if self._stopping.is_set():
            return
        experiment = self._experiment
        parts = experiment.publishers() if role is Role.PUB else experiment.subscribers()
        ids = {part.id for part in parts}
        for program in experiment.programs():
            if program.role is role:
                self._programs.append(
                    await ProgramProcess.start(
                        program, self._line_server.attach, experiment.command_ms
                    )
                )
        for process in self._programs_of(role):
            await self._wait_unless_stopped(process.wait_until_connected(ids), None)
            if process.record is not None:
                ids.add(process.record.id)

    async def _stop_programs(self, role: Role) -> None:
        is_interrupted = self._stopping.is_set()
        await asyncio.gather(*(each.stop(is_interrupted) for each in self._programs_of(role)))

    async def _publish(self) -> None:
        """Wait until all publishers have published, or until a signal or the deadline; then end
        them. Programs of the user have only the time of publishing."""
        publishing_ends_s = time.monotonic() + self._experiment.seconds
        deadline_s = self._experiment.seconds + limits.EXPERIMENT_WAIT_MS / 1000

        async def all_are_done() -> None:
            # As one task: asyncio warns about the unread exceptions of a cancelled gather.
            await asyncio.gather(
                *(process.wait_for("done") for process in self._publishers.values())
            )

        async def all_programs_have_left() -> None:
            await asyncio.gather(
                *(each.wait_until_disconnected() for each in self._programs_of(Role.PUB))
            )

        await self._wait_unless_stopped(all_are_done(), deadline_s)
        await self._end(self._publishers.values())
        await self._wait_unless_stopped(
            all_programs_have_left(), max(0.0, publishing_ends_s - time.monotonic())
        )
        await self._stop_programs(Role.PUB)

    async def _disconnect_late_subscribers(self, start_ns: int) -> None:
        """Start the late subscribers alone, and wait for their reports. They leave when they are
        started."""
        for process in self._late_subscribers():
            process.send(["go", start_ns])
        await _wait_for_all(*(process.wait_for("report") for process in self._late_subscribers()))

    async def _reconnect_late_subscribers(self, start_ns: int) -> None:
        """Start each late subscriber again, now as a steady one under the same id. With a short δ,
        wait first until all entries have expired, so that it skips them all."""
        late = self._late_subscribers()
        if not late:
            return
        delta_ms = self._experiment.delta_ms
        if delta_ms is not None and delta_ms / 1000 <= _LATE_S:
            # One millisecond more than δ: then even the last entry is older than δ.
            await self._wait_unless_stopped(asyncio.sleep((delta_ms + 1) / 1000), None)
        for process in late:
            part = msgspec.structs.replace(process.part, behaviour=Behaviour.STEADY)
            await process.kill()
            self._former.append(process)
            self._subscribers[part.id] = await self._launch(part)
        back = [self._subscribers[process.part.id] for process in late]
        await _wait_for_all(*(process.wait_for("ready") for process in back))
        for process in back:
            process.send(["go", start_ns])

    async def _wait_for_subscribers(self) -> None:
        """Wait until all live subscribers have caught up and the others are dead."""
        delta_ms = self._experiment.delta_ms or 0
        # A slow subscriber has caught up at the latest when all entries are older than δ, because
        # it skips old entries. At most one minute of δ is waited for.
        end_s = time.monotonic() + (limits.EXPERIMENT_SETTLE_MS + min(delta_ms, 60_000)) / 1000
        while time.monotonic() < end_s and not self._stopping.is_set():
            if await self._have_caught_up():
                return
            await asyncio.sleep(_CHECK_S)

    async def _have_caught_up(self) -> bool:
        """Return whether no subscriber has work left: live subscribers have no undelivered entries,
        and silent or dying ones have ended or cannot end any more."""
        for process in self._subscribers.values():
            if process.has_ended:
                continue
            if process.part.behaviour in MORTAL and await self._may_die(process):
                return False
            left = await self._accounts.count_leftovers(process.part.id, process.part.topics)
            if process.part.behaviour not in MORTAL and left.undelivered:
                return False
        for program in self._programs_of(Role.SUB):
            record = program.record
            if record is None or program.has_disconnected:
                continue
            if (await self._accounts.count_leftovers(record.id, program.topics)).undelivered:
                return False
        return True

    async def _may_die(self, process: PeerProcess) -> bool:
        """Return whether a silent or dying subscriber that is still running will end. It ends only
        if it gets more entries than it answers first."""
        published = sum([(await self._accounts.topic_end(topic)) for topic in process.part.topics])
        return published > process.part.after

    async def _end(self, processes: Iterable[PeerProcess]) -> None:
        """Ask the processes to terminate by the protocol, and wait for their exit. A process that
        takes too long is left running; `end_processes` kills it."""
        living = [process for process in processes if not process.has_ended]
        for process in living:
            process.send(["end"])
        if living:
            await asyncio.wait(
                [process.ended for process in living], timeout=limits.EXPERIMENT_WAIT_MS / 1000
            )

    async def _await_disconnects(self) -> None:
        """Wait until the broker has noticed that the processes are gone."""
        end_s = time.monotonic() + limits.EXPERIMENT_WAIT_MS / 1000
        while self._line_server.records() and time.monotonic() < end_s:
            await asyncio.sleep(_CHECK_S)

    # --- accounts ---------------------------------------------------------------------------

    async def _make_outcome(self, records: Sequence[str]) -> Outcome:
        """Return the outcome: the reports of the peers beside the counts of the broker."""
        held = {name: await self._accounts.topic_end(name) for name in self._topic_names()}
        publishers = [self._accounts.of_publisher(each) for each in self._publishers.values()]
        publishers += [
            self._accounts.of_publishing_program(each) for each in self._programs_of(Role.PUB)
        ]
        # From the plan: the second process of a late subscriber has the behaviour "steady".
        subscribers = [
            await self._accounts.of_subscriber(self._subscribers[part.id], part.behaviour, held)
            for part in self._experiment.subscribers()
        ]
        subscribers += [
            await self._accounts.of_subscribing_program(each, held)
            for each in self._programs_of(Role.SUB)
        ]
        return Outcome(
            experiment=self._experiment,
            records=records,
            publishers=publishers,
            subscribers=subscribers,
            held=held,
            samples=self._samples,
            was_interrupted=self._stopping.is_set(),
        )

    def _topic_names(self) -> list[str]:
        """Return the topics of the experiment, with those that only programs have chosen."""
        chosen = [topic for program in self._programs for topic in program.topics]
        return list(dict.fromkeys([*self._experiment.topic_names, *chosen]))

    # --- progress --------------------------------------------------------------

    async def _sample(self) -> None:
        """Record a sample at intervals until cancelled. The interval is longer with many
        subscribers, because each sample then takes longer."""
        experiment = self._experiment
        every_s = max(experiment.slice_ms, experiment.subs * experiment.topics // 10) / 1000
        while True:
            now_s = time.monotonic() - self._start_s
            live = 0
            for name in self._topic_names():
                end = await self._accounts.topic_end(name)
                self._published[name] = end
                live += end - await self._broker.pushing.first_live(self._accounts.key(name))
            # `live` can be negative: entries may be published and expire between the two reads.
            self._samples.append(Sample(now_s, max(0, live), self._longest_backlog()))
            self._report_progress()
            await asyncio.sleep(every_s)

    def _longest_backlog(self) -> int:
        """Return the number of entries in its topics that the slowest connected subscriber has
        neither received nor skipped."""
        return max(
            (
                sum(self._published.get(topic, 0) for topic in record.topics)
                - record.entries
                - record.skipped
                for record in self._line_server.records()
                if record.role is Role.SUB
            ),
            default=0,
        )

    def _report_progress(self) -> None:
        """Tell the observer how many entries are published and delivered."""
        delivered = sum(
            each.entries for each in self._line_server.records() if each.role is Role.SUB
        )
        seconds = time.monotonic() - self._start_s
        self._observer.progress(
            Progress(self._experiment, seconds, sum(self._published.values()), delivered)
        )

    # --- helpers ----------------------------------------------------------------------------

    def _programs_of(self, role: Role) -> list[ProgramProcess]:
        return [each for each in self._programs if each.program.role is role]

    def _late_subscribers(self) -> list[PeerProcess]:
        """Return the late subscribers that have not come back: a returned one is steady."""
        return [
            process
            for process in self._subscribers.values()
            if process.part.behaviour is Behaviour.LATE
        ]

    async def _wait_unless_stopped(self, work: Awaitable[object], deadline_s: float | None) -> None:
        """Wait for the work, a signal or the deadline; then cancel the work."""
        future: asyncio.Future[Any] = asyncio.ensure_future(work)
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(
                [future, stopped], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if future.done():
                future.result()
        finally:
            for each in (future, stopped):
                each.cancel()
            await asyncio.wait([future, stopped])


async def _wait_for_all(*work: Awaitable[object]) -> None:
    """Wait for all, for at most the time that processes may take to start or end. Raises
    QuackTimeout."""
    try:
        async with asyncio.timeout(limits.EXPERIMENT_WAIT_MS / 1000):
            await asyncio.gather(*work)
    except TimeoutError:
        raise QuackTimeout(
            f"not all processes were ready within {limits.EXPERIMENT_WAIT_MS // 1000} s"
        ) from None
