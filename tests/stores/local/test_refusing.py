"""A store that can no longer write says so as often as it is asked, and keeps nothing of that."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from quackmq.errors import StoreReadOnly
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import batch_of


async def test_a_refusal_does_not_grow_with_those_before_it(tmp_path: Path) -> None:
    """One error is raised again and again: the frames of all who met it would stay with it."""
    store = await LocalStore.open(tmp_path, LocalOptions())
    topic = await store.create_topic("ducks", 1, Policy())
    failure = StoreReadOnly("no space left on device")
    store._committer.write_failure.error = failure
    lengths = set()
    for _ in range(20):
        with pytest.raises(StoreReadOnly):
            await store.append([Append(PartitionKey(topic.id, 0), batch_of(b"quack"))])
        lengths.add(len(list(traceback.walk_tb(failure.__traceback__))))
    assert len(lengths) == 1
    store._committer.write_failure.error = None
    await store.close()
