"""Cases of producers' ids and transactions."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from tests.likeness.asking import Broker, case, commit_fields, retried, until

INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 25, 26, 28
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
NEW_WAY = 5


async def begun(
    broker: Broker, name: str | None, version: int = 4, *, again: bool = True, **more: Any
) -> Any:
    """InitProducerId; with `again`, until an end that is on its way is carried out."""

    async def ask() -> Any:
        return await broker.ask(
            INIT_PRODUCER_ID,
            version,
            transactional_id=name,
            **{"transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1, **more},
        )

    return await retried(ask, lambda answer: answer.error_code if again else ErrorCode.none)


def ref_of(name: str, answer: Any) -> dict[str, Any]:
    return {
        "transactional_id": name,
        "producer_id": answer.producer_id,
        "producer_epoch": answer.producer_epoch,
    }


async def added(broker: Broker, ref: dict[str, Any], topic: str, version: int = 3) -> Any:
    fields = {f"v3_and_below_{name}": value for name, value in ref.items()}

    async def ask() -> Any:
        return await broker.ask(
            ADD_PARTITIONS,
            version,
            **fields,
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )

    answer = await retried(
        ask,
        lambda told: (
            told.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            if topic != broker.named("none")
            else ErrorCode.none
        ),
    )
    return broker.plain(answer)


async def ended(broker: Broker, ref: dict[str, Any], commit: bool, version: int = 3) -> Any:
    """The error, and in the newer way by how much the epoch grew."""

    async def ask() -> Any:
        return await broker.ask(END_TXN, version, **ref, committed=commit)

    answer = await retried(ask, lambda told: told.error_code)
    if version < NEW_WAY or answer.error_code != ErrorCode.none:
        return [
            answer.error_code,
            getattr(answer, "producer_id", None),
            getattr(answer, "producer_epoch", None),
        ]
    return [
        answer.error_code,
        answer.producer_id == ref["producer_id"],
        answer.producer_epoch - ref["producer_epoch"],
    ]


@case
async def producer_ids_asked_for_oddly(broker: Broker) -> Any:
    told: list[Any] = []

    async def tell(name: str | None, **more: Any) -> None:
        answer = await begun(broker, name, **more)
        told.append([answer.error_code, answer.producer_id >= 0, answer.producer_epoch])

    for version in (0, 2, 4, 5):
        await tell(None, version=version)
        await tell(None, version=version, transaction_timeout=0)
        await tell(None, version=version, transaction_timeout=-1)
        await tell("", version=version)
        await tell(broker.named(f"a{version}"), version=version, transaction_timeout=0)
        await tell(broker.named(f"b{version}"), version=version, transaction_timeout=-1)
        await tell(broker.named(f"c{version}"), version=version, transaction_timeout=900_000)
        await tell(broker.named(f"d{version}"), version=version, transaction_timeout=900_001)
    for version in (3, 4, 5):
        for place, (producer_id, epoch) in enumerate(
            [(7, -1), (-1, 7), (7, 7), (-2, -2), (999_999_999, 0), (0, -1)]
        ):
            more = {"producer_id": producer_id, "producer_epoch": epoch}
            await tell(None, version=version, **more)
            await tell(broker.named(f"e{version}-{place}"), version=version, **more)
    return told


@case
async def a_producer_id_asked_for_again(broker: Broker) -> Any:
    told = []
    for version in (2, 4, 5):
        name = broker.named(f"tx{version}")
        first = await begun(broker, name, version)
        told.append([first.error_code, first.producer_epoch])
        again = await begun(broker, name, version)
        told.append(
            [again.error_code, again.producer_id == first.producer_id, again.producer_epoch]
        )
        if version > 2:
            for epoch in (1, 0, 2, 7):
                more = {"producer_id": first.producer_id, "producer_epoch": epoch}
                answer = await begun(broker, name, version, **more)
                told.append([epoch, answer.error_code, answer.producer_epoch])
            other = await begun(
                broker, name, version, producer_id=first.producer_id + 77, producer_epoch=0
            )
            told.append([other.error_code, other.producer_epoch])
    return told


@case
async def transactions_ended_again(broker: Broker) -> Any:
    """What EndTxn says the second time, the other way, and of what was never begun."""
    topic = await broker.topic()
    told: list[Any] = []
    for first, second in [(True, True), (True, False), (False, False), (False, True)]:
        name = broker.named(f"tx-{first}-{second}")
        ref = ref_of(name, await begun(broker, name))
        told.append(["nothing begun", await ended(broker, ref, first)])
        told.append(await added(broker, ref, topic))
        told.append(["first", await ended(broker, ref, first)])
        told.append(["second", await ended(broker, ref, second)])
        told.append(["third", await ended(broker, ref, second)])
        told.append(["older", await ended(broker, {**ref, "producer_epoch": -1}, first)])
        told.append(["newer", await ended(broker, {**ref, "producer_epoch": 9}, first)])
        told.append(["other", await ended(broker, {**ref, "producer_id": 99_999}, first)])
    for version in (0, 1, 2, 3, 4):
        ref = {"transactional_id": broker.named("none"), "producer_id": 7, "producer_epoch": 0}
        told.append(await ended(broker, ref, True, version))
        told.append(await ended(broker, {**ref, "transactional_id": ""}, True, version))
    return told


@case
async def transactions_of_the_newer_way_ended_again(broker: Broker) -> Any:
    topic = await broker.topic()
    told: list[Any] = []
    for first, second in [(True, True), (True, False), (False, False), (False, True)]:
        name = broker.named(f"tx-{first}-{second}")
        ref = ref_of(name, await begun(broker, name, 5))
        told.append(["nothing begun", await ended(broker, ref, first, NEW_WAY)])
        ref = ref_of(name, await begun(broker, name, 5))
        group = broker.named("readers")
        fields = commit_fields(group, topic, 3)
        told.append(await broker.told(TXN_OFFSET_COMMIT, 5, **ref, generation_id=-1, **fields))
        told.append(["first", await ended(broker, ref, first, NEW_WAY)])
        told.append(["second", await ended(broker, ref, second, NEW_WAY)])
        told.append(["older", await ended(broker, {**ref, "producer_epoch": -1}, first, NEW_WAY)])
        told.append(["newer", await ended(broker, {**ref, "producer_epoch": 9}, first, NEW_WAY)])
        told.append(["other", await ended(broker, {**ref, "producer_id": 99_999}, first, NEW_WAY)])
    return told


@case
async def what_cannot_be_added(broker: Broker) -> Any:
    topic, none = await broker.topic(), broker.named("none")
    name = broker.named("tx")
    ref = ref_of(name, await begun(broker, name))
    told = [
        await added(broker, ref, none),
        await added(broker, {**ref, "producer_epoch": 7}, topic),
        await added(broker, {**ref, "producer_epoch": -1}, topic),
        await added(broker, {**ref, "producer_id": 99_999}, topic),
        await added(broker, {**ref, "transactional_id": none}, topic),
        await added(broker, {**ref, "transactional_id": ""}, topic),
        await added(broker, {**ref, "producer_epoch": -1}, topic, version=1),
        await added(broker, {**ref, "transactional_id": none}, none),
    ]
    for change in (
        {},
        {"producer_epoch": 7},
        {"producer_id": 99_999},
        {"transactional_id": none},
        {"transactional_id": ""},
    ):
        for version in (1, 3):
            fields = {**ref, **change, "group_id": broker.named("readers")}
            told.append(await broker.told(ADD_OFFSETS, version, **fields))
    told.append(await broker.told(ADD_OFFSETS, 3, **ref, group_id=""))
    return told


@case
async def offsets_that_a_transaction_cannot_commit(broker: Broker) -> Any:
    topic, none = await broker.topic(), broker.named("none")
    told: list[Any] = []
    name, group = broker.named("tx"), broker.named("readers")
    ref = ref_of(name, await begun(broker, name))
    told.append(await broker.told(ADD_OFFSETS, 3, **ref, group_id=group))
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, commit_fields(group, none, 1)),
        ({}, commit_fields(group, topic, 1, metadata="x" * 5000)),
        ({}, commit_fields("", topic, 1)),
        ({"producer_epoch": -1}, commit_fields(group, topic, 1)),
        ({"producer_epoch": 7}, commit_fields(group, topic, 1)),
        ({"producer_id": 99_999}, commit_fields(group, topic, 1)),
        ({}, commit_fields(group, topic, 1, member_id="me")),
        ({}, {**commit_fields(group, topic, 1), "generation_id": 5}),
        ({}, {**commit_fields(group, topic, 1, member_id="me"), "generation_id": 5}),
        (
            {},
            {
                **commit_fields(group, topic, 1, group_instance_id="inst", member_id="me"),
                "generation_id": 5,
            },
        ),
    ]
    for version in (2, 3):
        for change, fields in wanted:
            told.append(
                await broker.told(
                    TXN_OFFSET_COMMIT, version, **{"generation_id": -1, **ref, **change, **fields}
                )
            )
    return told


@case
async def transactions_listed(broker: Broker) -> Any:
    """A duration of 0 or more leaves out what has not been open for so long, and nothing else."""
    topic = await broker.topic()
    open_name, idle, done = (broker.named(name) for name in ("open", "idle", "done"))
    ref = ref_of(open_name, await begun(broker, open_name))
    await added(broker, ref, topic)
    await begun(broker, idle)
    done_ref = ref_of(done, await begun(broker, done))
    await added(broker, done_ref, topic)
    await ended(broker, done_ref, True)

    async def described() -> Any:
        return await broker.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=[done])

    async def listed(version: int, **filters: Any) -> Any:
        answer = await broker.ask(
            LIST_TRANSACTIONS,
            version,
            **{"state_filters": [], "producer_id_filters": [], **filters},
        )
        mine = [
            (each.transactional_id, each.transaction_state)
            for each in answer.transaction_states
            if each.transactional_id.startswith(broker.named(""))
            and not each.transactional_id.endswith(".any")
        ]
        return [answer.error_code, sorted(answer.unknown_state_filters), sorted(mine)]

    async def is_ready() -> bool:
        """All is done, and has taken a millisecond at least."""
        (state,) = (await described()).transaction_states
        older = await listed(1, duration_filter=0)
        return state.transaction_state == "CompleteCommit" and len(older[-1]) == 3

    await until(is_ready)
    told = [await listed(0)]
    for duration in (-1, -5, 0, 3_600_000, 2**62):
        told.append([duration, await listed(1, duration_filter=duration)])
    for states in (["Ongoing"], ["ongoing"], ["Empty", "Nonsense"], ["CompleteCommit"], [""]):
        told.append([states, await listed(1, state_filters=states)])
    told.append(await listed(1, producer_id_filters=[ref["producer_id"]]))
    told.append(await listed(1, producer_id_filters=[-1]))
    told.append(await listed(1, state_filters=["Nonsense"], duration_filter=0))
    prefix = broker.named("").replace(".", "[.]")
    for pattern in (None, "", prefix + "o.*", ".*done", "done", "(", "(?=x)", "x" * 900):
        told.append(await listed(2, transactional_id_pattern=pattern))
    told.append(await listed(2, transactional_id_pattern=".*e", state_filters=["Empty"]))
    found = await broker.told(
        DESCRIBE_TRANSACTIONS, 0, transactional_ids=[open_name, broker.named("none"), ""]
    )
    for each in found["transaction_states"]:
        each["producer_id"] = each["producer_id"] >= 0
    told.append(found)
    await ended(broker, ref, False)
    return told


@case
async def producers_described(broker: Broker) -> Any:
    topic = await broker.topic()
    told = []
    for name, partition in [
        (topic, 0),
        (topic, 7),
        (topic, -1),
        (broker.named("none"), 0),
        ("", 0),
    ]:
        told.append(
            await broker.told(
                DESCRIBE_PRODUCERS, 0, topics=[{"name": name, "partition_indexes": [partition]}]
            )
        )
    return told


@case
async def coordinators_looked_for(broker: Broker) -> Any:
    told = []
    for version in (0, 2, 3, 4, 6):
        for kind in (0, 1, 2, 9):
            for key in (broker.named("x"), ""):
                if version == 0 and kind:
                    continue
                try:
                    answer = await broker.ask(
                        10, version, key=key, key_type=kind, coordinator_keys=[key]
                    )
                except ConnectionError:
                    told.append([version, kind, key, "disconnected"])
                    continue
                found = answer.coordinators[0] if version >= 4 else answer
                told.append([version, kind, key, found.error_code, found.node_id, found.port > 0])
    return told
