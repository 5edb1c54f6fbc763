"""Small states in the store: the bytes that released versions wrote are still understood."""

from __future__ import annotations

import pytest

from quackmq.broker import timekeeping
from quackmq.broker.groups.state import GroupSettings, StoredGroup, decode_group, encode_group
from quackmq.broker.queue_registrations import _decode_counters
from quackmq.broker.staging.series import CommittedTurn, _decode
from quackmq.broker.staging.stage import CommittedStage, decode_committed
from quackmq.broker.transactions.state import decode_id_state
from quackmq.clock import Gap, StoredTime
from quackmq.errors import DamagedStore
from quackmq.groups import GroupKind, GroupState, StoredMember, StoredMembership
from quackmq.model.transactional_id import TransactionalIdState, TransactionState
from tests.kit.tables import each

MEMBER = StoredMember("m-1", "one", "duck", "pond", 10_000, 60_000, (("range", b"\0\xff"),), b"x")
GROUP = StoredGroup(
    GroupKind.CLASSIC,
    7,
    "consumer",
    {"one": "m-1"},
    (),
    GroupSettings(True, 45_000, 5_000),
    None,
    StoredMembership(GroupState.STABLE, "range", "m-1", (MEMBER,)),
)
GROUP_BYTES = (
    b'{"kind": "classic", "generation": 7, "protocol_type": "consumer", "static_members": '
    b'{"one": "m-1"}, "member_ids": [], "settings": {"holds_retention": true, '
    b'"session_timeout_ms": 45000, "heartbeat_interval_ms": 5000}, "empty_since_ms": null, '
    b'"members": {"state": "Stable", "protocol": "range", "leader": "m-1", "members": '
    b'[{"member_id": "m-1", "instance_id": "one", "client_id": "duck", "client_host": "pond", '
    b'"session_timeout_ms": 10000, "rebalance_timeout_ms": 60000, "protocols": [["range", '
    b'"AP8="]], "assignment": "eA=="}]}}'
)


def test_a_group_is_written_and_read_as_before() -> None:
    assert encode_group(GROUP) == GROUP_BYTES
    assert decode_group(GROUP_BYTES) == GROUP


def test_a_group_of_a_version_that_stored_no_members_is_read() -> None:
    value = (
        b'{"kind": "consumer", "generation": 3, "protocol_type": "consumer", "static_members": '
        b'{}, "member_ids": ["m-1", "m-2"], "settings": {"holds_retention": false, '
        b'"session_timeout_ms": 45000, "heartbeat_interval_ms": 5000}, "empty_since_ms": 5}'
    )
    expected = StoredGroup(
        GroupKind.CONSUMER, 3, "consumer", {}, ("m-1", "m-2"), GroupSettings(), 5
    )
    assert decode_group(value)._replace(settings=GroupSettings()) == expected


@each(
    "change",
    [
        (b'"generation": 7', b'"generation": "7"'),
        (b'"kind": "classic"', b'"kind": "other"'),
        (b'"holds_retention": true, ', b""),
        (b'"empty_since_ms": null, ', b""),
        (b'{"one": "m-1"}', b'{"one": 1}'),
        (b'"member_ids": []', b'"member_ids": [1]'),
        (b'"AP8="', b'"?"'),
    ],
)
def test_a_group_that_cannot_be_decoded_is_damage(change: tuple[bytes, bytes]) -> None:
    old, new = change
    assert old in GROUP_BYTES
    with pytest.raises(DamagedStore):
        decode_group(GROUP_BYTES.replace(old, new))


def test_a_transactional_id_is_read_as_before() -> None:
    value = (
        b'{"producer_id": 7, "epoch": 3, "state": "CompleteCommit", "timeout_ms": 60000, '
        b'"updated_ms": 1700000000000, "previous_producer_id": 7, "previous_epoch": 2}'
    )
    committed = TransactionState.COMPLETE_COMMIT
    assert decode_id_state(value) == TransactionalIdState(
        7, 3, committed, 60_000, 1_700_000_000_000, 7, 2
    )
    with pytest.raises(DamagedStore):
        decode_id_state(value.replace(b', "previous_epoch": 2', b""))


def test_a_committed_stage_and_the_last_turn_of_a_series_are_read_as_before() -> None:
    stage = b'{"contents": "c", "records": 2, "committed_ms": 3}'
    assert decode_committed(stage) == CommittedStage("c", 2, 3)
    turn = b'{"number": 1, "contents": "c", "records": 2, "committed_ms": 3, "topics": ["a"]}'
    assert _decode(turn) == CommittedTurn(1, "c", 2, 3, ("a",))


def test_the_time_is_read_as_before() -> None:
    value = (
        b'{"time_ms": 5, "boot": "b", "elapsed_ms": 6, "accepted_ms": 7, "paused_since_ms": null, '
        b'"gaps": [[1, 2, 3]]}'
    )
    assert timekeeping._decode(value) == StoredTime(5, "b", 6, 7, None, (Gap(1, 2, 3),))
    with pytest.raises(DamagedStore):
        timekeeping._decode(value.replace(b"[1, 2, 3]", b"[1, 2]"))


def test_counters_of_registrations_are_read_as_before_and_never_guessed() -> None:
    assert _decode_counters(b'{"producers": 4, "consumers": 2}') == (4, 2)
    assert _decode_counters(None) == (0, 0)
    with pytest.raises(DamagedStore):
        _decode_counters(b'{"producers": 4}')
