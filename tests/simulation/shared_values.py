"""Small states and cursors that several clients change at once; what they saw is linearizable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from quackmq.errors import LimitReached, QuackError, StateChanged
from quackmq.model.topic import Cursor, CursorKey
from tests.simulation.linearizable import Operation, final_states
from tests.simulation.model import UNKNOWN_OUTCOMES, Violation
from tests.simulation.together_clients import TOPIC, Together


class Seen(NamedTuple):
    """What is there: a value and its version."""

    value: object
    version: int


class History:
    """What happened to one value since it was last certain."""

    def __init__(self, name: str, first: Seen) -> None:
        self.name = name
        self._first = first
        self._operations: list[Operation[Seen]] = []

    def begin(
        self, life: Together, name: str, apply: Callable[[Seen], Seen | None]
    ) -> Operation[Seen]:
        """Note an operation that begins; until it ends, nobody knows whether it happened."""
        operation = Operation(name, life.tick(), apply, is_unknown=True)
        self._operations.append(operation)
        return operation

    def end(self, life: Together, operation: Operation[Seen]) -> None:
        operation.ended, operation.is_unknown = life.tick(), False

    def refused(self, operation: Operation[Seen]) -> None:
        self._operations.remove(operation)

    def settle(self, life: Together, seen: Seen) -> None:
        """Nothing is under way, and this is there: check all that happened, and begin anew."""
        now = life.tick()
        for operation in self._operations:
            operation.ended = min(operation.ended, now)
        possible = final_states(self._first, self._operations)
        if seen not in possible:
            told = "; ".join(str(each) for each in self._operations)
            raise Violation(f"{self.name} is {seen}, after {self._first} and {told}")
        life.counts["operations found linearizable"] += len(self._operations)
        self._first, self._operations = seen, []


class SharedStates:
    name = "states"
    clients = 3
    _keys = ("shared/a", "shared/b")

    def __init__(self) -> None:
        self._histories = {key: History(f"state {key}", Seen(None, 0)) for key in self._keys}
        self._version = 0

    async def check(self, life: Together) -> None:
        for key, history in self._histories.items():
            state = await life.store.state(key)
            history.settle(life, Seen(state.value, state.version))

    async def step(self, life: Together, number: int) -> None:
        key = life.source.choice(self._keys)
        history = self._histories[key]
        state = Seen(None, 0)

        def is_there(now: Seen) -> Seen | None:
            return now if now == state else None

        looking = history.begin(life, "look", is_there)
        found = await life.store.state(key)
        state = Seen(found.value, found.version)
        looking.name = f"look {state}"
        history.end(life, looking)
        if life.source.random() < 0.3:
            return
        wrong = life.source.random() < 0.1
        expected = state.version + 1 if wrong else state.version
        value: bytes | None = b"%d" % life.tick() + b"s" * life.source.choice((0, 50, 900))
        if expected and life.source.random() < 0.15:
            value = None
        after = Seen(value, expected + 1 if value is not None else 0)
        name = f"put {after} over {expected}"
        putting = history.begin(life, name, lambda now: after if now.version == expected else None)
        try:
            answer = await life.store.put_state(key, value, expected)
        except StateChanged:
            putting.name += ", refused"
            putting.apply = lambda now: now if now.version != expected else None
            history.end(life, putting)
            life.counts["compare-and-set that met another version"] += 1
            return
        except LimitReached:
            history.refused(putting)
            raise
        if Seen(answer.value, answer.version) != after:
            raise Violation(f"{key} was put as {after}, the answer is {answer}")
        history.end(life, putting)


class SharedCursors:
    name = "cursors"
    clients = 3

    def __init__(self) -> None:
        self._histories: dict[CursorKey, History] = {}

    async def check(self, life: Together) -> None:
        for key in self._keys(life):
            self._histories.setdefault(key, History(f"cursor {key.name}", Seen(None, 0)))
        found = await life.store.cursors()
        for key, history in self._histories.items():
            cursor = found.get(key)
            history.settle(life, Seen(None if cursor is None else cursor.metadata, 0))

    def _keys(self, life: Together) -> list[CursorKey]:
        topic = life.broker.topic(TOPIC)
        return [CursorKey("shared", topic.id, partition) for partition in range(2)]

    async def step(self, life: Together, number: int) -> None:
        keys = self._keys(life)
        if life.source.random() < 0.4:
            await self._look(life, life.source.choice(keys))
            return
        chosen = keys if life.source.random() < 0.3 else [life.source.choice(keys)]
        cursors, begun = [], []
        for key in chosen:
            metadata = f"m{life.tick()}"
            cursors.append(Cursor(key, life.source.randint(0, 9), metadata, life.now_ms()))
            operation = self._histories[key].begin(
                life, f"set {metadata}", partial(_replace_by, Seen(metadata, 0))
            )
            begun.append((self._histories[key], operation))
        try:
            await life.store.set_cursors(cursors)
        except QuackError as error:
            if not isinstance(error, UNKNOWN_OUTCOMES):
                for history, operation in begun:
                    history.refused(operation)
            raise
        for history, operation in begun:
            history.end(life, operation)

    async def _look(self, life: Together, key: CursorKey) -> None:
        history = self._histories[key]
        seen = Seen(None, 0)
        looking = history.begin(life, "look", lambda now: now if now == seen else None)
        cursor = (await life.store.cursors()).get(key)
        seen = Seen(None if cursor is None else cursor.metadata, 0)
        looking.name = f"look {seen}"
        history.end(life, looking)


def _replace_by(new: Seen, _: Seen) -> Seen:
    return new
