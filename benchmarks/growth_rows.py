"""What a row of the growth benchmark is: a cost, measured on a stage of each size.

A stage is a broker that was given so much of one dimension: topics, subscriptions, stored bytes.
Rows of the same stage share it, and are measured in the order in which they are listed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from benchmarks.growth_curves import Curve, Target
from benchmarks.growth_systems import MOST_TURN_MS, System


class Measured(NamedTuple):
    value: float
    note: str = ""


class Stage(ABC):
    dimension: ClassVar[str]
    sizes: ClassVar[Sequence[int]]
    quick_sizes: ClassVar[Sequence[int]]
    #: The largest size at which Kafka is measured.
    kafka_most: ClassVar[int] = 0
    #: How long a broker is watched that has nothing to do, and how many batches of 1 MB a load has.
    FULL_SECONDS: ClassVar[float] = 12.0
    QUICK_SECONDS: ClassVar[float] = 5.0
    FULL_LARGE_BATCHES: ClassVar[int] = 3_000
    QUICK_LARGE_BATCHES: ClassVar[int] = 500

    def __init__(self, system: System, size: int, is_quick: bool) -> None:
        self.system = system
        self.size = size
        self.is_quick = is_quick
        #: Connections, which are closed before the system is killed.
        self.opened = ExitStack()
        self.large_batches = self.QUICK_LARGE_BATCHES if is_quick else self.FULL_LARGE_BATCHES
        self.seconds = self.QUICK_SECONDS if is_quick else self.FULL_SECONDS

    @abstractmethod
    def open(self) -> None:
        """Start the system and give it as much of the dimension as the size says."""


def median_ms(requests: Iterable[Callable[[], object]]) -> float:
    """Make requests one after the other; return the median of the milliseconds that they took."""
    took = []
    for request in requests:
        began = time.perf_counter()
        request()
        took.append(time.perf_counter() - began)
    return median(took) * 1_000


def longest_pause(stage: Stage) -> Measured:
    """Milliseconds, with the cause."""
    found = stage.system.longest_pause()
    return Measured(found.pause_ms, f"{found.cpu_ms} ms of it were CPU; {found.cause}")


def heaviest_turn(stage: Stage) -> Measured:
    """The CPU of the turn of the event loop with the most CPU: how long it would last on an idle
    machine, unless the loop waited for the disk."""
    found = stage.system.heaviest_turn()
    many = f"{found.too_heavy} turns above {MOST_TURN_MS} ms; the heaviest: "
    return Measured(found.cpu_ms, f"{many if found.too_heavy else ''}{found.cause}")


S = TypeVar("S", bound=Stage)


@dataclass(frozen=True)
class Row(Generic[S]):
    #: As the command line has it.
    name: str
    title: str
    unit: str
    stage: type[S]
    measure: Callable[[S], float | Measured]
    targets: Sequence[Target] = ()
    with_kafka: bool = False

    def curve(self) -> Curve:
        return Curve(self.name, self.title, self.stage.dimension, self.unit)

    def value(self, stage: Any) -> Measured:
        found = self.measure(stage)
        return found if isinstance(found, Measured) else Measured(found)
