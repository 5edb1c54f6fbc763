"""The archive of an experiment: it is written while the experiment runs, holds everything at the
end, and is compared with the accounts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quackmq.cli import limits
from quackmq.cli.experiment import runner as experiment_run
from quackmq.cli.experiment.archive_check import compare_archive
from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.experiment.report import Outcome
from tests.cli.test_experiment import CALM
from tests.cli.test_experiment_programs import CONNECT, PUBLISH, SUBSCRIBE
from tests.kit.tables import each

pytestmark = pytest.mark.processes


def run_experiment(directory: Path, publish: str, **settings: object) -> Outcome:
    """Run an experiment with a script that publishes and one that subscribes."""
    for name, script in (("publish.sh", publish), ("subscribe.sh", SUBSCRIBE)):
        (directory / name).write_text(script)
    experiment = Experiment(
        subs=0,
        pub_commands=[f"sh {directory / 'publish.sh'}"],
        sub_commands=[f"sh {directory / 'subscribe.sh'}"],
        command_ms=limits.EXPERIMENT_LONGEST_COMMAND_MS,
        **(CALM | settings),
    )
    observer = experiment_run.Observer()
    return asyncio.run(experiment_run.run(experiment, directory / "data", observer, "os"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The data directory and the outcome of an experiment: 12 entries of p1 and 3 of the program p2
    in topic 1, and 12 of p1 in topic 2."""
    directory = tmp_path_factory.mktemp("experiment")
    outcome = run_experiment(
        directory, PUBLISH, pubs=1, topics=2, entries=24, pub_topics={"p2": ["1"]}
    )
    return directory / "data", outcome


def test_q8_the_archive_holds_the_complete_history_of_every_topic(
    finished: tuple[Path, Outcome],
) -> None:
    directory, outcome = finished
    assert outcome.problems() == []
    assert outcome.archive is not None
    assert (outcome.archive.entries, outcome.archive.files) == (27, 2)
    for topic, count in (("1", 15), ("2", 12)):
        table = pq.ParquetDataset(directory / "archive" / topic).read(["offset", "value"])
        assert table["offset"].to_pylist() == list(range(count))
    numbers = [int(value.split()[1]) for value in table["value"].to_pylist()]
    assert numbers == list(range(12)), "topic 2 has only entries of p1"


Change = Callable[[pa.Table], pa.Table]


def without(*rows: int) -> Change:
    return lambda table: table.take([row for row in range(len(table)) if row not in rows])


def with_values_swapped(table: pa.Table) -> pa.Table:
    """Swap the contents of the first two entries."""
    values = table["value"].to_pylist()
    values[:2] = values[1::-1]
    index = table.schema.get_field_index("value")
    return table.set_column(index, "value", pa.array(values, pa.binary()))


IN_TOPIC_2 = "the archive of topic 2"


@each(
    ("change", "problems"),
    [
        (
            without(0),
            [f"{IN_TOPIC_2} lacks entry 1", f"{IN_TOPIC_2} lacks entry 1 of p1"],
        ),
        (
            without(4, 5),
            [
                f"{IN_TOPIC_2} lacks entries 5 to 6",
                f"{IN_TOPIC_2} lacks entries 5 to 6 of p1",
            ],
        ),
        (
            without(11),
            [f"{IN_TOPIC_2} lacks entry 12", f"{IN_TOPIC_2} lacks entry 12 of p1"],
        ),
        (
            lambda table: pa.concat_tables([table.slice(0, 3), table.slice(2)]),
            [
                f"{IN_TOPIC_2} has entry 3 twice, or too late",
                f"{IN_TOPIC_2} has entry 3 of p1 twice, or too late",
            ],
        ),
        (
            with_values_swapped,
            [
                f"{IN_TOPIC_2} lacks entry 1 of p1",
                f"{IN_TOPIC_2} has entry 1 of p1 twice, or too late",
            ],
        ),
    ],
)
def test_q8_entries_that_a_file_lacks_doubles_or_moves_are_named(
    change: Change, problems: list[str], finished: tuple[Path, Outcome], tmp_path: Path
) -> None:
    directory, outcome = finished
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    (file,) = copy.glob("archive/2/0/*.parquet")
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)
    assert list(compare_archive(copy, outcome, 0).problems) == problems


def test_q8_a_file_that_cannot_be_read_and_entries_of_programs_are_missed_too(
    finished: tuple[Path, Outcome], tmp_path: Path
) -> None:
    directory, outcome = finished
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (file,) = copy.glob("archive/1/0/*.parquet")
    file.write_bytes(b"quack")
    result = compare_archive(copy, outcome, 0)
    unreadable, *missing = result.problems
    assert unreadable.startswith("the archive of topic 1 cannot be read: ")
    assert missing == [
        "the archive of topic 1 lacks entries 1 to 12 of p1",
        "the archive has 0 entries of publisher p2, but the broker accepted 3",
    ]
    changed = replace(outcome, archive=result)
    assert changed.problems() == [unreadable, *missing], "and the exit code is 1"


def test_only_the_first_differences_are_named(
    finished: tuple[Path, Outcome], tmp_path: Path
) -> None:
    directory, outcome = finished
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (file,) = copy.glob("archive/2/0/*.parquet")
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table.take(list(range(len(table) - 1, -1, -1))), file)
    *named, rest = compare_archive(copy, outcome, 0).problems
    assert len(named) == limits.EXPERIMENT_ARCHIVE_PROBLEMS
    # Offsets and numbers: a gap before the first entry, and 11 entries that come too late, each.
    assert rest == "the archive differs from the accounts in 14 more ways"


def test_q7_q8_entries_that_leave_the_live_buffer_are_archived_while_the_experiment_runs(
    tmp_path: Path,
) -> None:
    """The publisher goes on until its first entries are in the archive."""
    publish = f"""ROLE=pub {CONNECT}
    until grep -qs parquet {tmp_path}/data/archive/1/0/_manifest.json || [ "$answer" = terminate ]
    do say "topic 1 [quack]"; sleep 0.1; done
    say terminate"""
    outcome = run_experiment(tmp_path, publish, pubs=0, delta_ms=50)
    assert outcome.problems() == []
    assert outcome.archive is not None
    assert 0 < outcome.archive.archived_early <= outcome.archive.entries == outcome.published
