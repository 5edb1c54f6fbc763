"""kcat, a command line around an old librdkafka, from Debian.

It publishes lines of text, with neither headers nor times here, and tells no offsets.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

from tests.interop.clients import interface
from tests.interop.clients.interface import TOPIC, AtTime, Message, Refused, Start
from tests.interop.deliveries import Event
from tests.interop.programs import Client as Program
from tests.interop.python.telling import BURST, PAUSE_S
from tests.interop.running import DEADLINE_SECONDS


def kcat(address: str, *arguments: str, stdin: str = "") -> str:
    """Run it to its end and return what it wrote."""
    done = subprocess.run(
        ["kcat", "-b", address, "-X", "fetch.wait.max.ms=10", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- as a member of a group, and as a producer that never ends ------------------------------------


class MemberProgram(Program):
    """kcat as it is: understood by what it prints, ended by a signal.

    It commits by itself, and does not say so; what it had printed when it left is committed.
    """

    # It takes one more record from librdkafka after the signal, and does not print it.
    drops_when_it_leaves = True

    RECORD: Final = re.compile(r"record (\d+) (\d+) (.*)")
    #: What comes or goes stands before the last colon, in words that depend on the protocol.
    REBALANCED: Final = re.compile(r"% Group \S+ rebalanced\b(.*): (\S+ \[\d+\].*)")
    PARTITION: Final = re.compile(r"\[(\d+)\]")

    def command(self, settings: dict[str, Any]) -> list[str]:
        options = {
            "session.timeout.ms": settings["session_ms"],
            "heartbeat.interval.ms": settings["heartbeat_ms"],
            "partition.assignment.strategy": (
                "cooperative-sticky" if settings["cooperative"] else "range"
            ),
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 100,
        }
        if settings["instance"]:
            options["group.instance.id"] = settings["instance"]
        # All in one stream, so that what it says keeps its order.
        merged = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
        format_ = ["-u", "-f", "record %p %o %s\n"]
        joining = ["-G", settings["group"], settings["topic"]]
        return [*merged, *base_command(settings, options), *format_, *joining]

    def understand(self, line: str) -> list[Event]:
        now_ms = time.time() * 1000
        if record := self.RECORD.match(line):
            return [Event("record", now_ms, (int(record[1]),), int(record[2]), record[3])]
        if rebalanced := self.REBALANCED.match(line):
            kind = "assigned" if "assign" in rebalanced[1].split(",")[0] else "revoked"
            numbers = self.PARTITION.findall(rebalanced[2])
            return [Event(kind, now_ms, tuple(int(number) for number in numbers))]
        return []

    def end(self, process: subprocess.Popen[str]) -> None:
        process.terminate()

    def afterword(self, events: Sequence[Event]) -> list[Event]:
        last = {event.partitions: event for event in events if event.kind == "record"}
        return [
            event._replace(kind="committed", offset=event.offset + 1) for event in last.values()
        ]


class ProducerProgram(Program):
    """kcat that sends what it reads, which is written here. One process at a time."""

    def command(self, settings: dict[str, Any]) -> list[str]:
        options = {"enable.idempotence": "true", "linger.ms": 2}
        return [*base_command(settings, options), "-P", "-t", settings["topic"], "-p", "0"]

    def begun(self, process: subprocess.Popen[str]) -> None:
        self._over = threading.Event()
        self._written = 0
        self._writer = threading.Thread(target=self._write, args=(process,))
        self._writer.start()

    def end(self, process: subprocess.Popen[str]) -> None:
        self._over.set()
        self._writer.join()

    def afterword(self, events: Sequence[Event]) -> list[Event]:
        return [Event("sent", 0, total=self._written)]

    def _write(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with process.stdin as lines:
            while process.poll() is None and not self._over.wait(PAUSE_S):
                numbers = range(self._written, self._written + BURST)
                lines.write("".join(f"{number}\n" for number in numbers))
                lines.flush()
                self._written += BURST


def base_command(settings: dict[str, Any], options: dict[str, Any]) -> list[str]:
    options = {"reconnect.backoff.max.ms": 200, "log_level": 0, **options}
    given = [f"-X{name}={value}" for name, value in options.items()]
    # -E: that a broker is away is no reason to end.
    return ["kcat", "-E", "-b", settings["address"], *given]


# --- the adapter ----------------------------------------------------------------------------------


class Kcat(interface.Client):
    tells_offsets: ClassVar = False
    member_program: ClassVar = MemberProgram()
    producer_program: ClassVar = ProducerProgram()

    def publisher(
        self,
        address: str,
        *,
        compression: str | None = None,
        acks: Literal["0", "1", "all"] = "all",
        idempotent: bool = False,
    ) -> Publisher:
        options = (f"-Xacks={acks}", f"-Xenable.idempotence={str(idempotent).lower()}")
        return Publisher(address, "-z", compression or "none", *options)

    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader:
        places = ("-p", str(partitions[0])) if len(partitions) == 1 else ()
        level = "read_committed" if committed else "read_uncommitted"
        offset = f"s@{start.ms}" if isinstance(start, AtTime) else OFFSETS.get(start, str(start))
        options = (f"-Xisolation.level={level}", "-Xauto.offset.reset=error", "-o", offset)
        reader = Reader(address, topic, *places, *options)
        self._alive.callback(reader.close)
        return reader


OFFSETS: Final[dict[Start, str]] = {"start": "beginning", "end": "end"}


class Publisher(interface.Publisher):
    def __init__(self, address: str, *options: str) -> None:
        self._address = address
        self._options = options

    def send(self, topic: str, *messages: Message) -> list[int]:
        """Publish the messages of each partition by a process of its own."""
        lines: dict[int | None, str] = {}
        for message in messages:
            value = (message.value or b"").decode()
            lines[message.partition] = lines.get(message.partition, "") + f"{value}\n"
        for partition, stdin in lines.items():
            place = () if partition is None else ("-p", str(partition))
            kcat(self._address, "-P", "-t", topic, *place, *self._options, stdin=stdin)
        return []

    def close(self) -> None:
        """Nothing is open between two calls."""


class Reader(interface.Reader):
    #: Partition, offset, time, lengths of key and value; then both as they are.
    FORMAT: Final = "%p %o %T %K %S\n%k%s\n"

    def __init__(self, address: str, topic: str, *options: str) -> None:
        self._address = address
        self._topic = topic
        self._process = subprocess.Popen(
            ["kcat", "-C", "-b", address, "-t", topic, "-X", "fetch.wait.max.ms=10"]
            + ["-u", "-q", "-f", self.FORMAT, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._deadline = threading.Timer(DEADLINE_SECONDS, self._process.kill)
        self._deadline.start()

    def take(self, count: int) -> list[Message]:
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> Message:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        head = self._process.stdout.readline().split()
        if not head:
            said = self._process.stderr.read().decode()
            name = "OFFSET_OUT_OF_RANGE" if "out of range" in said else "ended"
            raise Refused(name, said)
        partition, offset, timestamp, key_length, value_length = map(int, head)
        key = self._read(key_length)
        value = self._read(value_length)
        self._process.stdout.read(1)
        return Message(value, key, (), timestamp, partition, offset)

    def _read(self, length: int) -> bytes | None:
        assert self._process.stdout is not None
        return None if length < 0 else self._process.stdout.read(length)

    def bounds(self) -> tuple[int, int]:
        return self._ask(-2), self._ask(-1)

    def offset_at(self, time_ms: int) -> int | None:
        found = self._ask(time_ms)
        return None if found < 0 else found

    def _ask(self, time_ms: int) -> int:
        told = kcat(self._address, "-Q", "-t", f"{self._topic}:0:{time_ms}")
        return int(told.rsplit(maxsplit=1)[1])

    def close(self) -> None:
        self._deadline.cancel()
        self._process.kill()
        with self._process:
            pass
