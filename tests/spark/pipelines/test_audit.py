"""`audit`: whatever is planted is found, each and only that; what is whole is proved whole (S5)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from quackmq.broker import Commit, MemberRef
from quackmq.broker.push.push_subscription import PushSubscription
from quackmq.errors import DamagedData, NotFound, OffsetOutOfRange, QuackTimeout, UnknownTopic
from quackmq.model.leases import LeaseRange
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.topic import PartitionKey
from quackmq.spark import limits as spark_limits
from quackmq.spark import table
from quackmq.spark.broker.archive import ArchivePlan
from quackmq.spark.broker.http import Access, Http
from quackmq.spark.pipelines import audit as pipeline
from quackmq.spark.pipelines.audit import Options, audit
from quackmq.spark.pipelines.audit_checks import receipts as audit_receipts
from quackmq.spark.pipelines.audit_checks.holes import (
    AbortedNumbers,
    Damage,
    Explanation,
    ReadPartition,
    Span,
    Spans,
    explain,
)
from quackmq.spark.pipelines.audit_checks.runs import check_runs, make_runs
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.report import Report
from tests.broker.pushed_peer import PATIENT, peer_of
from tests.broker.support import get_all
from tests.broker.transacting import Transactor
from tests.kit import effort
from tests.kit.tables import each
from tests.protocols.http.v1.serving import CALLER
from tests.spark.pipelines import audit_model as model
from tests.spark.serving import Broker, serving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)

SPOILERS = (model.lose, model.double, model.double_offset, model.swap)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


# --- without Spark -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(effort.of(100)))
def test_the_audit_by_runs_finds_what_the_audit_record_by_record_finds(seed: int) -> None:
    chance = random.Random(seed)
    rows = model.history(chance, batches=15)
    for _ in range(chance.randrange(5)):
        chance.choice(SPOILERS)(chance, rows)
    is_whole = chance.random() < 0.5
    # Cut anywhere into batches, and those anywhere into tasks.
    batches = model.arrow(rows).to_batches(max_chunksize=chance.choice([1, 7, 1000]))
    a_task = -(-len(batches) // chance.choice([1, 3]))
    tasks = [batches[at : at + a_task] for at in range(0, len(batches), a_task)]
    runs = pa.Table.from_batches([made for task in tasks for made in make_runs(task)])
    found: list[dict[str, Any]] = []
    for partition in (0, 1):
        for share in pc.unique(runs.column("share")).to_pylist():
            own = (pc.field("partition") == partition) & (pc.field("share") == share)
            if (some := runs.filter(own)).num_rows:
                told = check_runs(some, is_whole).to_pylist()
                found += [{**each, "partition": partition} for each in told]
    assert model.told(found) == model.judged(rows, is_whole=is_whole)


def test_a_history_that_nobody_spoilt_has_no_findings() -> None:
    rows = model.history(random.Random(0))
    assert model.judged(rows, is_whole=True) == set()


def test_numbers_that_begin_at_0_again_go_on() -> None:
    last = 2**31 - 1
    rows = [model.Row(0, at, 7, 0, (last - 2 + at) % 2**31) for at in range(6)]
    del rows[4]  # number 1
    runs = pa.Table.from_batches(make_runs(model.arrow(rows).to_batches()))
    found = check_runs(runs.filter(pc.field("share") >= 0)).to_pylist()
    assert [(each["kind"], each["first_sequence"], each["records"]) for each in found] == [
        ("lost", 1, 1)
    ]


def test_numbers_of_aborted_transactions_are_not_lost() -> None:
    known = Explanation(aborted=[AbortedNumbers(7, 0, 10, 5)], archived=Spans([Span(20, 26)]))
    nowhere = Span(0, 0)
    assert known.count_lost(7, 0, 10, 5, nowhere) == 0
    assert known.count_lost(7, 0, 8, 9, nowhere) == 4
    assert known.count_lost(7, 1, 10, 5, nowhere) == 5
    assert known.count_lost(8, 0, 3, 5, Span(19, 30)) == 0  # with its marker it fits into the hole
    assert known.count_lost(8, 0, 3, 6, Span(19, 30)) == 6


def test_numbers_of_deleted_records_are_not_lost() -> None:
    known = Explanation(deleted=Spans([Span(0, 10)]), archived=Spans([Span(20, 26)]))
    assert known.count_lost(7, 0, 0, 10, Span(0, 12)) == 0
    assert known.count_lost(7, 0, 0, 12, Span(0, 12)) == 2
    assert known.count_lost(7, 0, 0, 5, Span(8, 12)) == 3, "only two of its offsets are deleted"
    assert known.count_lost(7, 0, 0, 5, Span(12, 15)) == 5
    assert known.count_lost(7, 0, 0, 15, Span(0, 30)) == 0, "the rest fits into an archived hole"


@pytest.mark.parametrize("seed", range(effort.of(20)))
def test_numbers_of_very_many_aborted_transactions_are_found_among_them(seed: int) -> None:
    """Also where they begin at 0 again."""
    chance = random.Random(seed)
    begin = chance.choice([0, 2**31 - 150])
    aborted: list[AbortedNumbers] = []
    gone: set[int] = set()
    at = begin
    for _ in range(40):
        at += chance.randrange(4)
        size = chance.randrange(1, 9)
        aborted.append(AbortedNumbers(7, 0, at % 2**31, size))
        gone |= {number % 2**31 for number in range(at, at + size)}
        at += size
    chance.shuffle(aborted)
    known = Explanation(aborted=aborted)
    for _ in range(50):
        first, count = chance.randrange(begin - 5, at + 5) % 2**31, chance.randrange(1, 60)
        asked = {number % 2**31 for number in range(first, first + count)}
        assert known.count_lost(7, 0, first, count, Span(0, 0)) == len(asked - gone)
    assert known.count_lost(7, 1, begin, 5, Span(0, 0)) == 5


class Damaged:
    """A broker without an archive, whose log has one batch that cannot be read."""

    def get(self, path: str, **query: Any) -> Any:
        if path.endswith("archive"):
            raise NotFound("no archive")
        if query["offset"] < 8:
            raise DamagedData("the batch at offset 5 is damaged", 8)
        marker = {"first_offset": 8, "next_offset": 9, "reason": "marker"}
        return SimpleNamespace(json={"holes": [marker], "next_offset": 20, "end_offset": 20})

    def post(self, path: str, asked: Any) -> Any:
        topic = {"id": "id", "partitions": [{"first_offset": 0}]}
        return SimpleNamespace(json={"topics": [topic]})


def test_what_is_damaged_in_the_log_is_named_and_ends_no_audit() -> None:
    read = ReadPartition("ducks", "id", 0, Span(0, 20), Spans([Span(5, 9), Span(12, 13)]))
    found = explain(cast(Any, Damaged()), read)
    assert found.unreadable == [Damage(Span(5, 8), 3, "the batch at offset 5 is damaged")]
    assert found.reasons == {"marker": 1}
    assert [damage.span for damage in found.damages] == [Span(12, 13)]


class Trimming:
    """A broker without an archive, whose retention deletes one more offset at each question about
    the log, `trims` times."""

    def __init__(self, trims: int) -> None:
        self.first_offset = 0
        self.questions = 0
        self._trims = trims

    def get(self, path: str, **query: Any) -> Any:
        if path.endswith("archive"):
            raise NotFound("no archive")
        self.questions += 1
        if self.questions <= self._trims:
            self.first_offset += 1
            raise OffsetOutOfRange(f"the log begins at {self.first_offset}")
        hole = {"first_offset": 2, "next_offset": 4, "reason": "marker"}
        return SimpleNamespace(json={"holes": [hole], "next_offset": 20, "end_offset": 20})

    def post(self, path: str, asked: Any) -> Any:
        topic = {"id": "id", "partitions": [{"first_offset": self.first_offset}]}
        return SimpleNamespace(json={"topics": [topic]})


def test_holes_are_asked_for_again_if_retention_deletes_some_meanwhile() -> None:
    read = ReadPartition("ducks", "id", 0, Span(0, 20), Spans([Span(0, 4)]))
    found = explain(cast(Any, Trimming(trims=2)), read)
    assert found.reasons == {"deleted": 2, "marker": 2}
    assert found.damages == []
    assert list(found.deleted) == [Span(0, 2)]


def test_holes_of_a_partition_that_always_changes_stay_unexplained() -> None:
    broker = Trimming(trims=1000)
    read = ReadPartition("ducks", "id", 0, Span(0, 20), Spans([Span(0, 20)]))
    found = explain(cast(Any, broker), read)
    assert broker.questions == spark_limits.AUDIT_EXPLANATIONS
    assert found.unexplained == 20 - spark_limits.AUDIT_EXPLANATIONS + 1


def chain(*steps: tuple[str, int, int, int], lent_to: int = 0) -> pa.Table:
    """Receipts in their order: kind, from, first, next."""
    names = ("kind", "from_offset", "first_offset", "next_offset")
    rest = {"lost": 0, "lent_to": lent_to, "at_partition": 0}
    return pa.Table.from_pylist(
        [
            {**dict(zip(names, step, strict=True)), **rest, "at_offset": at}
            for at, step in enumerate(steps)
        ]
    )


def taken(*offsets: int) -> list[tuple[str, int, int, int]]:
    return [("taken", offset, offset, offset + 1) for offset in offsets]


def acked(*offsets: int) -> list[tuple[str, int, int, int]]:
    return [("acked", offset, offset, offset + 1) for offset in offsets]


BEGUN = ("begun", 0, 0, 0)
OVER = ("over", 4, 5)


@each(
    ("steps", "cursor", "found"),
    [
        ([BEGUN, *taken(0, 1, 2)], 3, []),
        ([BEGUN, *taken(0, 2)], 3, [("untold", 1, 2)]),
        ([BEGUN, *taken(1, 2)], 3, [("untold", 0, 1)]),
        ([BEGUN, *taken(0, 1)], 3, [("untold", 2, 3)]),
        ([BEGUN], 2, [("untold", 0, 2)]),
        ([BEGUN, *taken(0, 1)], None, []),
        ([BEGUN, *taken(0, 1, 1, 2)], 3, [("doubled", 1, 2)]),
        ([BEGUN, *taken(0, 2, 1, 3)], 4, [("reordered", 1, 2)]),
        ([BEGUN, *taken(0, 1), ("moved", 2, 0, 0), *taken(0, 1)], 2, []),
        ([BEGUN, ("taken", 0, 2, 3)], 3, [("over", 0, 2)]),
        ([*taken(4, 5)], 6, []),
        ([*taken(4, 6)], 8, [("untold", 5, 6), ("untold", 7, 8)]),
        ([BEGUN, *acked(2, 0, 1, 5)], 3, []),
        ([BEGUN, *acked(2, 0, 5)], 3, [("untold", 1, 2)]),
        ([BEGUN, *acked(2, 0, 1, 0)], 3, [("doubled", 0, 1)]),
        ([BEGUN, ("acked", 0, 2, 3), ("acked", 4, 5, 5), *acked(3)], 5, [("over", 0, 2), OVER]),
        ([BEGUN, ("passed", 3, 3, 5), *acked(0, 1, 2)], 5, []),
        ([BEGUN, ("passed", 3, 3, 5), *acked(0, 2)], 5, [("untold", 1, 2)]),
        ([BEGUN, ("passed", 0, 0, 2), ("passed", 4, 4, 6)], 2, []),
        ([("begun", 1, 1, 1), ("passed", 3, 3, 4), *acked(1, 2)], 4, []),
        ([("begun", 3, 3, 3), *acked(2, 3)], 4, []),
    ],
)
def test_a_chain_of_receipts_tells_what_is_wrong_with_it(
    steps: list[tuple[str, int, int, int]], cursor: int | None, found: list[tuple[str, int, int]]
) -> None:
    told = list(audit_receipts.check_chain(chain(*steps), cursor))
    assert told[0].kind == "taken"
    assert [each[:3] for each in told[1:]] == found


def test_what_receipts_that_were_let_go_of_may_have_told_is_no_finding() -> None:
    steps = acked(3, 4, 5, 7, 8, 10)
    (_, *untold) = audit_receipts.check_chain(chain(*steps), 11)
    assert [each[:3] for each in untold] == [("untold", 6, 7), ("untold", 9, 10)]
    (_, *untold) = audit_receipts.check_chain(chain(*steps, lent_to=8), 11)
    assert [each[:3] for each in untold] == [("untold", 9, 10)]
    (_, *untold) = audit_receipts.check_chain(chain(*steps, lent_to=20), 11)
    assert untold == []


def test_after_a_failure_a_broker_is_waited_for_once_and_the_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be a plan for each of many topics, and nobody who lets go of them."""
    waited: list[int] = []

    def request(broker: Http, *arguments: Any) -> None:
        waited.append(broker._retry_ms)
        raise QuackTimeout("nobody is there")

    monkeypatch.setattr(Http, "request", request)
    access = Access("127.0.0.1:1", "127.0.0.1:1")
    one, another = ArchivePlan(access), ArchivePlan(access)
    one.ids, another.ids = ["one"], ["another"]
    with pytest.raises(DamagedData, match="what went wrong"), ArchivePlan(access) as plan:
        plan.adopt(one)
        plan.adopt(another)
        assert (plan.ids, one.ids, another.ids) == (["one", "another"], [], [])
        raise DamagedData("what went wrong")
    assert waited == [spark_limits.SPARK_STOP_MS]


def test_a_plan_that_ends_well_is_waited_for_and_its_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []

    def request(broker: Http, *arguments: Any) -> None:
        waited.append(broker._retry_ms)
        raise QuackTimeout("nobody is there")

    monkeypatch.setattr(Http, "request", request)
    with pytest.raises(QuackTimeout), ArchivePlan(Access("127.0.0.1:1", "127.0.0.1:1")) as plan:
        plan.ids = ["one"]
    assert waited == [spark_limits.SPARK_RETRY_MS]


# --- with Spark ----------------------------------------------------------------------------------


@pytest.mark.needs("java")
def test_all_that_is_planted_in_a_dataframe_is_found_and_only_that_s5(spark: SparkSession) -> None:
    chance = random.Random(9)
    rows = model.history(chance)
    for _ in range(3):
        for spoil in SPOILERS:
            spoil(chance, rows)
    frame = spark.createDataFrame(model.arrow(rows)).coalesce(1)
    found = [row.asDict() for row in audit(frame, {model.TOPIC: [0, 1]}).collect()]
    assert {each["topic"] for each in found} == {model.TOPIC}
    expected = model.judged(rows, is_whole=True)
    assert {fact[0] for fact in expected} == {"hole", "lost", "doubled", "reordered"}
    assert model.told(found) == expected


def audited(broker: Broker, spark: SparkSession, *topics: str) -> Report:
    with Job(broker.address, spark=spark) as job:
        return pipeline.run(job, Options(topics=topics))


def line(report: Report, subscription: str | None = None) -> dict[str, Any]:
    (found,) = [
        dict(zip(report.columns, row, strict=True)) for row in report.rows if row[1] == subscription
    ]
    return found


def filled(broker: Broker, topic: str) -> None:
    """Records with and without numbers, transactions of both ends; half of it is archived."""
    broker.create(topic)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    for half in range(2):
        values = [f"numbered {at}" for at in range(20)]
        broker.publish(topic, values, settings={"enable.idempotence": True})
        broker.run(transactor.send(*[b"committed"] * 3, topic=topic))
        broker.run(transactor.commit())
        broker.run(transactor.send(*[b"aborted"] * 4, topic=topic))
        broker.run(transactor.abort())
        broker.client().publish(topic, *(f"plain {at}" for at in range(5)))
        if not half:
            broker.archive(topic)


@pytest.mark.needs("java")
def test_what_is_whole_is_proved_whole_and_its_holes_are_explained_s5(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    broker.create("empty")
    filled(broker, topic)
    broker.run(broker.broker.subscribe(CALLER, "puddles", topic, "beginning", receipts=True))
    broker.run(get_all(broker.broker, name="puddles", topic=topic))
    report = audited(broker, spark, topic, "empty")
    assert report.facts == {"verdict": "nothing was lost, doubled or reordered"}
    assert report.is_good
    of_topic = dict(zip(report.columns, report.rows[0], strict=True))
    # Each half has three records and four aborted ones in transactions, and a marker for each.
    assert (of_topic["records"], of_topic["explained"], of_topic["unexplained"]) == (56, 12, 0)
    of_subscription = line(report, "puddles")
    assert (of_subscription["records"], of_subscription["lost"]) == (56, 0)
    assert 0 <= of_subscription["p50_ms"] <= of_subscription["max_ms"]
    assert report.plot is not None
    assert broker.client().get("/v1/archive/plans").json["plans"] == [], "no file is kept for it"


@pytest.mark.needs("java")
def test_what_retention_deletes_during_the_audit_is_not_lost_s5(
    broker: Broker, spark: SparkSession, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create(topic)
    broker.publish(topic, [f"{at}" for at in range(20)], settings={"enable.idempotence": True})
    make_table = pipeline._Audit._table

    def trim_first(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        broker.trim(topic, 12)
        return make_table(self, name, *arguments, **options)

    monkeypatch.setattr(pipeline._Audit, "_table", trim_first)
    report = audited(broker, spark, topic)
    assert report.facts == {"verdict": "nothing was lost, doubled or reordered"}
    told = line(report)
    assert (told["records"], told["lost"], told["explained"]) == (8, 0, 12)


@pytest.mark.needs("java")
def test_latencies_of_entries_that_were_archived_before_they_were_taken_come_from_the_archive_s5(
    broker: Broker, spark: SparkSession, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_limits, "AUDIT_LOOKUP_OFFSETS", 7)
    broker.create(topic)
    broker.publish(topic, [f"{at}" for at in range(20)])
    broker.archive(topic)
    broker.run(broker.broker.subscribe(CALLER, "late", topic, "beginning", receipts=True))
    commits = [Commit(PartitionKey(broker.broker.topic(topic).id, 0), 16)]
    broker.run(broker.broker.groups.commit(CALLER, "late", MemberRef("", -1), commits))
    broker.run(get_all(broker.broker, name="late", topic=topic))
    report = audited(broker, spark, topic)
    told = line(report, "late")
    assert (told["records"], told["lost"]) == (20, 0)
    assert 0 <= told["p50_ms"] <= told["p99_ms"] <= told["max_ms"]
    topic_id = str(broker.broker.topic(topic).id)
    left = audit_receipts.receipts(table(spark, RECEIPTS_TOPIC, bootstrap_servers=broker.address))
    left = left.where(left.topic_id == topic_id)
    stretches = audit_receipts.find_untimed(left)
    spans = {(row.first_offset, row.next_offset) for row in stretches.collect()}
    assert spans == {(0, 16), *((at, at + 1) for at in range(16, 20))}
    records = table(spark, topic, bootstrap_servers=broker.address)
    found = audit_receipts.latencies_from_records(stretches, records).collect()
    assert sum(row.records for row in found) == 20
    assert audit_receipts.latencies(left).collect() == [], "no receipt tells a time"


async def _all_acked(broker: Broker, name: str, topic: str, crashes: bool = False) -> int:
    """Every entry, from both ends in turn; how many. With `crashes` nothing is acked after all."""
    async with peer_of(broker.broker, name, topic) as peer:
        found = await peer.take_all()
        if not crashes:
            peer.ack([*found[::-2], *found[len(found) % 2 :: 2]])
        return len(found)


@pytest.mark.needs("java")
def test_what_is_pushed_and_acknowledged_in_any_order_is_proved_whole_s5(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    filled(broker, topic)
    run, pushing = broker.run, broker.broker.pushing
    for name in ("shoveler", "wigeon"):
        run(pushing.subscribe(CALLER, name, topic, PATIENT, "beginning", receipts=True))
    assert run(_all_acked(broker, "shoveler", topic, crashes=True)) == 56
    assert run(_all_acked(broker, "shoveler", topic)) == 56, "delivered again, told once"
    run(pushing.flush())
    report = audited(broker, spark, topic)
    assert (report.is_good, report.facts["verdict"]) == (
        *(True, "nothing was lost, doubled or reordered"),
    )
    told, idle = line(report, "shoveler"), line(report, "wigeon")
    assert (told["records"], told["lost"], told["doubled"], told["reordered"]) == (56, 0, 0, 0)
    assert 0 <= told["p50_ms"] <= told["max_ms"]
    assert (idle["records"], idle["lost"]) == (0, 0)
    # One goes on without a word, as by a bug that takes entries for done.
    held = broker.broker._push.require(broker.broker.topic(topic), "wigeon")
    run(_acked_silently(broker, held, 5))
    found = line(audited(broker, spark, topic), "wigeon")
    assert (found["lost"], found["doubled"]) == (5, 0)


async def _acked_silently(broker: Broker, held: PushSubscription, count: int) -> None:
    leases = held.partition_progress[0].leases
    for lease in leases.lease(LeaseRange(0, count), range(count), count, 0):
        leases.ack(lease.offset)
    broker.broker._flusher.mark_dirty(held.partition_progress[0])
    await broker.broker.pushing.flush()


def files_of(broker: Broker, topic: str) -> list[Path]:
    told = broker.client().get(f"/v1/topics/{topic}/archive").json
    directory = Path(told["directory"])
    return [directory / "0" / file["name"] for file in told["partitions"][0]["files"]]


@pytest.mark.needs("java")
def test_what_is_planted_in_an_archived_file_is_named_s5(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    filled(broker, topic)
    broker.run(broker.broker.subscribe(CALLER, "mallard", topic, "beginning", receipts=True))
    broker.run(get_all(broker.broker, name="mallard", topic=topic))
    (file,) = files_of(broker, topic)
    rows = pq.read_table(file)
    numbers = rows.column("sequence").to_pylist()
    numbers[7], numbers[9] = numbers[9], numbers[7]
    numbers[11] = numbers[10]
    spoilt = rows.set_column(
        rows.schema.get_field_index("sequence"), "sequence", pa.array(numbers, pa.int32())
    )
    producer = rows.column("producer_id")[0].as_py()
    pq.write_table(pa.concat_tables([spoilt.slice(0, 3), spoilt.slice(4)]), file)
    report = audited(broker, spark, topic)
    assert not report.is_good
    found = line(report)
    wrong = {name: found[name] for name in ("lost", "doubled", "reordered", "unexplained")}
    assert wrong == {"lost": 2, "doubled": 1, "reordered": 2, "unexplained": 1}
    whose = f"of producer {producer}, epoch 0"
    facts = report.facts
    assert facts["lost 1"] == f"{topic}/0: number 3 {whose}, at offset 3"
    assert facts["lost 2"] == f"{topic}/0: number 11 {whose}, before offset 12"
    assert facts["doubled 1"] == f"{topic}/0: number 10 {whose}, at offset 11"
    assert f"{topic}/0: number 7 {whose}, at offset 9" in facts.values()
    assert "1 of them are missing" in facts["hole 1"]
    # What was delivered before is delivered: of that its receipts are the proof.
    assert line(report, "mallard")["lost"] == 0


@pytest.mark.needs("java")
def test_what_is_planted_among_receipts_is_named_s5(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    broker.create(topic)
    broker.publish(topic, [f"{at}" for at in range(10)])
    run = broker.run
    run(broker.broker.subscribe(CALLER, "teal", topic, "beginning", receipts=True))
    messages = run(get_all(broker.broker, name="teal", topic=topic))
    run(broker.broker.seek(CALLER, "teal", topic, "beginning"))
    again = run(get_all(broker.broker, name="teal", topic=topic))
    assert (len(messages), len(again)) == (10, 10)
    assert audited(broker, spark, topic).is_good, "read again on purpose is not doubled"
    receipt = {
        **{"subscription": "teal", "topic": topic, "topic_id": str(broker.broker.topic(topic).id)},
        **{"partition": 0, "kind": "taken", "from_offset": 4, "first_offset": 4},
        **{"next_offset": 6, "lost": 0, "time_ms": 1, "append_times": []},
    }
    forged = json.dumps(receipt)
    missing = "subscription", "partition", "kind", "first_offset", "lost", "time_ms"
    halves = [json.dumps({**receipt, each: None}) for each in missing]
    broker.publish(RECEIPTS_TOPIC, ["no receipt", "{}", *halves, forged])
    # The cursor of another one goes on without a word.
    run(broker.broker.subscribe(CALLER, "smew", topic, "beginning", receipts=True))
    run(_move_silently(broker, topic, "smew", 3))
    report = audited(broker, spark, topic)
    assert (line(report, "teal")["doubled"], line(report, "teal")["lost"]) == (2, 0)
    assert (line(report, "smew")["lost"], line(report, "smew")["doubled"]) == (3, 0)
    assert report.facts["lost 1"] == (
        f"{topic}/0 for smew: offsets 0 to 2: passed without a receipt (3)"
    )
    assert not report.is_good


@pytest.mark.needs("java")
def test_a_subscription_of_whose_receipts_none_is_left_is_named_s5(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    broker.create(topic)
    broker.publish(topic, ["a", "b"])
    run = broker.run
    run(broker.broker.subscribe(CALLER, "garganey", topic, "beginning", receipts=True))
    run(get_all(broker.broker, name="garganey", topic=topic))
    run(broker.broker.delete_topic(CALLER, RECEIPTS_TOPIC))
    report = audited(broker, spark, topic)
    assert [row[1] for row in report.rows] == [None]
    assert report.facts == {
        "verdict": "nothing was lost, doubled or reordered",
        "unproved 1": f"{topic} for garganey: there is no topic {RECEIPTS_TOPIC}",
    }
    run(broker.broker.subscribe(CALLER, "gadwall", topic, "beginning", receipts=True))
    report = audited(broker, spark, topic)
    assert [row[1] for row in report.rows] == [None, "gadwall"]
    assert report.facts["unproved 1"] == f"{topic} for garganey: all its receipts were deleted"


async def _move_silently(broker: Broker, topic: str, name: str, offset: int) -> None:
    """As a bug would that moves cursors and forgets to tell."""
    delivery = broker.broker._pull
    found = broker.broker.topic(topic)
    subscription = delivery._require(found, name)
    await delivery._set_cursors(found, name, {0: offset})
    subscription.apply_commit({0: offset})


def test_a_topic_that_is_not_there_is_named_before_spark_starts(broker: Broker) -> None:
    with Job(broker.address) as job, pytest.raises(UnknownTopic, match="no topic geese"):
        pipeline.run(job, Options(topics=("geese",)))
    assert job._spark is None
