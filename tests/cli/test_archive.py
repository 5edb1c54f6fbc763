"""`quackmq archive ls`, `verify` and `export`: what they print of a directory, and exit codes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from quackmq.archive import manifest as manifests
from quackmq.archive.parquet.from_batches import CommittedBatch
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.cli import text
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.cli.main import main
from quackmq.errors import DamagedData
from quackmq.model.topic import PartitionKey
from tests.archive.support import NOON_MS
from tests.cli.archives import add, change, make_store, numbered, trim_log
from tests.kit.server import Server
from tests.stores.local.directories import content_of, flip
from tests.stores.local.test_inspection import undecodable


class Output:
    def __init__(self, exit_code: int, out: str, err: str) -> None:
        self.exit_code = exit_code
        self.out = out
        self.err = err
        self.lines = out.splitlines()


class Command:
    """Runs `quackmq archive` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Output:
        try:
            exit_code: object = main(["archive", *map(str, arguments)])
        except SystemExit as ending:
            exit_code = ending.code
        assert isinstance(exit_code, int)
        return Output(exit_code, *self._capsys.readouterr())


@pytest.fixture
def archive(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Topic `ducks`: partition 0 has offsets 0 to 299 in two files, partition 1 has 0 to 49."""
    path = tmp_path / "data"
    topic_id = make_store(path)
    add(path, PartitionKey(topic_id, 0), [numbered(0, 100), numbered(100, 100)])
    add(path, PartitionKey(topic_id, 0), [numbered(200, 100)])
    add(path, PartitionKey(topic_id, 1), [numbered(0, 50)])
    return path


def manifest_of(directory: Path, partition: int = 0) -> manifests.Manifest:
    with ArchiveDirectory(directory) as archived:
        found = archived.manifest(ArchivedPartition("ducks", partition))
        assert found is not None
        return found


def file_of(directory: Path, partition: int = 0, index: int = 0) -> Path:
    name = manifest_of(directory, partition).files[index].name
    return directory / "archive" / "ducks" / str(partition) / name


# --- ls --------------------------------------------------------------------------------------


def test_ls_shows_what_is_archived(archive: Command, directory: Path) -> None:
    output = archive("ls", directory)
    assert (output.exit_code, output.err) == (0, "")
    rows = [line.split() for line in output.lines]
    assert rows[0] == "TOPIC PARTITION FIRST NEXT RECORDS BYTES FILES FROM TO".split()
    size = manifest_of(directory).size
    assert rows[1][:7] == ["ducks", "0", "0", "300", "300", str(size), "2"]
    assert rows[1][7:] == ["2023-11-14T22:13:20.000Z", "2023-11-14T22:18:19.000Z"]
    assert rows[2][:5] == ["ducks", "1", "0", "50", "50"]
    assert len(rows) == 3


def test_ls_shows_files(archive: Command, directory: Path) -> None:
    rows = [line.split() for line in archive("ls", "--files", directory, "ducks:0").lines]
    assert [row[0] for row in rows] == [
        "TOPIC",
        "ducks",
        "00000000000000000000-00000001.parquet",
        "00000000000000000200-00000002.parquet",
    ]
    assert rows[3][1:4] == ["200", "300", "100"]


def test_ls_as_json_says_the_same_to_programs(archive: Command, directory: Path) -> None:
    told = orjson.loads(archive("ls", "--json", directory).out)
    first, second = told["partitions"]
    assert (first["topic"], first["partition"], first["records"]) == ("ducks", 0, 300)
    assert first["directory"] == "archive/ducks/0"
    assert [file["next_offset"] for file in first["files"]] == [200, 300]
    assert second["next_offset"] == 50
    assert told["findings"] == []


def test_ls_of_a_directory_without_an_archive_is_empty(archive: Command, tmp_path: Path) -> None:
    make_store(tmp_path / "data")
    output = archive("ls", tmp_path / "data")
    assert (output.exit_code, len(output.lines)) == (0, 1)


def test_ls_names_a_damaged_manifest_and_shows_the_rest(archive: Command, directory: Path) -> None:
    flip(directory / "archive" / "ducks" / "0" / "_manifest.json", 20)
    output = archive("ls", directory)
    assert output.exit_code == 1
    assert output.lines[1].startswith("ducks")
    assert output.lines[2] == (
        "damage: archive/ducks/0/_manifest.json: the manifest's checksum is wrong"
    )
    assert orjson.loads(archive("ls", "--json", directory).out)["findings"]


# --- verify ----------------------------------------------------------------------------------


def test_verify_says_what_it_looked_at(archive: Command, directory: Path) -> None:
    output = archive("verify", directory)
    assert (output.exit_code, output.err) == (0, "")
    size = manifest_of(directory).size + manifest_of(directory, 1).size
    assert output.lines == [f"no damage in 2 partitions, 3 files, 350 records, {size} bytes"]
    assert "1 partition, 1 file, 50 records" in archive("verify", directory, "ducks:1").out


@pytest.mark.parametrize(("position", "what"), [(40, "row group 0"), (-40, "footer")])
def test_verify_names_a_damaged_range_with_its_offsets(
    archive: Command, directory: Path, position: int, what: str
) -> None:
    path = file_of(directory)
    flip(path, position % path.stat().st_size)
    output = archive("verify", directory)
    assert output.exit_code == 1
    assert output.lines[0].startswith(f"damage: archive/ducks/0/{path.name}, offsets 0 to 199: ")
    assert what in output.lines[0]
    assert output.lines[1].startswith("1 damaged range in 2 partitions, 3 files, 150 records, ")


def test_verify_names_a_missing_file(archive: Command, directory: Path) -> None:
    file_of(directory, index=1).unlink()
    output = archive("verify", directory)
    assert output.exit_code == 1
    assert "offsets 200 to 299: the file is missing" in output.lines[0]


def test_verify_names_a_lost_manifest_whose_records_the_log_has_no_more(
    archive: Command, directory: Path
) -> None:
    key = manifest_of(directory).key
    (directory / "archive" / "ducks" / "0" / "_manifest.json").unlink()
    assert archive("verify", directory).exit_code == 0, "the log may have them all"
    trim_log(directory, key, 300)
    output = archive("verify", directory)
    assert output.exit_code == 1
    assert output.lines[0].startswith("damage: archive/ducks/0, offsets 0 to 299: ")
    assert "restore it from a backup" in output.lines[0]


@pytest.mark.parametrize("owner", [None, b"{}", b'{"topic_id":"ducks"}', b'{"topic_id":7}'])
def test_verify_names_a_damaged_owner_of_a_partition_without_manifest_and_goes_on(
    archive: Command, directory: Path, owner: bytes | None
) -> None:
    place = directory / "archive" / "ducks"
    for partition in ("0", "1"):
        (place / partition / "_manifest.json").unlink()
    if owner is None:
        (place / "_topic.json").unlink()
    else:
        (place / "_topic.json").write_bytes(owner)
    output = archive("verify", directory)
    assert (output.exit_code, output.err) == (1, "")
    for line in output.lines[:2]:
        assert line.startswith("damage: archive/ducks/_topic.json: ")
    assert output.lines[2].startswith("2 damaged ranges in 2 partitions, ")


def test_verify_names_a_manifest_that_is_damaged_meanwhile_and_goes_on(
    archive: Command, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(directory, index=1).unlink()
    real: Callable[..., Any] = ArchiveReader.scan

    def damage_first(reader: ArchiveReader, manifest: manifests.Manifest, file: Any) -> Any:
        if (manifest.key.partition, file.first_offset) == (0, 200):
            flip(directory / "archive" / "ducks" / "0" / "_manifest.json", 20)
        return real(reader, manifest, file)

    monkeypatch.setattr(ArchiveReader, "scan", damage_first)
    output = archive("verify", directory)
    assert (output.exit_code, output.err) == (1, "")
    assert output.lines[0] == (
        "damage: archive/ducks/0/_manifest.json: the manifest's checksum is wrong"
    )
    assert output.lines[1].startswith("1 damaged range in 2 partitions, 2 files, 250 records, ")


def test_verify_takes_a_log_that_begins_where_the_archive_ends_for_no_damage(
    archive: Command, directory: Path
) -> None:
    trim_log(directory, manifest_of(directory).key, 300)
    assert archive("verify", directory).exit_code == 0


def test_verify_names_a_gap_between_archive_and_log(archive: Command, directory: Path) -> None:
    trim_log(directory, manifest_of(directory).key, 310)
    output = archive("verify", directory)
    assert output.exit_code == 1
    assert output.lines[0] == (
        "damage: archive/ducks/0, offsets 300 to 309: neither archive nor log has them: the log "
        "starts at 310"
    )


def test_verify_names_rows_that_are_of_another_partition(archive: Command, directory: Path) -> None:
    """Checksums are right there: somebody has put the file in this place."""
    first, second = manifest_of(directory), manifest_of(directory, 1)
    strange = dataclasses.replace(
        first, version=first.version + 1, files=second.files, next_offset=second.next_offset
    )
    shutil.copy(file_of(directory, 1), directory / "archive" / "ducks" / "0")
    change(directory, strange)
    output = archive("verify", directory)
    assert output.exit_code == 1
    assert "the rows belong to ducks:1" in output.lines[0]


def test_verify_takes_a_quarantined_batch_for_no_damage(archive: Command, tmp_path: Path) -> None:
    topic_id = make_store(tmp_path / "data")
    add(tmp_path / "data", PartitionKey(topic_id, 0), [poison(), numbered(1, 9)])
    output = archive("verify", tmp_path / "data")
    assert output.exit_code == 0
    assert output.lines[0].startswith("poison: archive/ducks/0/_quarantined-")
    assert "offsets 0 to 0: kept raw, because it cannot be decoded" in output.lines[0]
    assert output.lines[1].startswith("no damage, 1 quarantined batch in 1 partition, 2 files, 9 ")
    assert archive("ls", tmp_path / "data").lines[-1] == output.lines[0]


def test_verify_notes_what_no_manifest_lists(archive: Command, directory: Path) -> None:
    place = directory / "archive" / "ducks" / "0"
    (place / "_new-00000000000000000300-00000003.parquet").write_bytes(b"begun")
    (place / "readme.txt").write_text("mine")
    output = archive("verify", directory)
    assert output.exit_code == 0
    assert output.lines[0].endswith("does not list it: the next start removes it")
    assert output.lines[1].endswith("does not list it, and the broker did not create it")
    assert output.lines[2].startswith("no damage, 2 notes in ")


def merged_away_within(method: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The second file, which a broker replaces by another one at the moment when a method of the
    reader is about to read it."""
    old = manifest_of(directory)
    gone = file_of(directory, index=1)
    real: Callable[..., Any] = getattr(ArchiveReader, method)

    def replaced(reader: ArchiveReader, manifest: manifests.Manifest, file: Any) -> Any:
        if gone.exists() and file.name == gone.name:
            merged = dataclasses.replace(old.files[1], name=manifests.file_name(200, 9))
            gone.rename(gone.with_name(merged.name))
            change(directory, manifests.replace(old, [gone.name], [merged], old.version))
        return real(reader, manifest, file)

    monkeypatch.setattr(ArchiveReader, method, replaced)
    return gone


def test_verify_goes_on_by_the_new_manifest_where_a_file_was_merged_meanwhile(
    archive: Command, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = merged_away_within("scan", directory, monkeypatch)
    output = archive("verify", directory)
    assert not gone.exists()
    assert output.exit_code == 0
    assert "350 records" in output.lines[-1]


def test_verify_tells_how_far_it_has_got(
    archive: Command, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PROGRESS_EVERY_S", 0.0)
    lines = archive("verify", directory).err.splitlines()
    assert lines[-1].endswith("(100 %)") and len(lines) == 3


@pytest.mark.processes
def test_an_archive_is_looked_at_while_a_broker_has_the_directory_open(
    archive: Command, directory: Path
) -> None:
    with Server("serve", "--data", directory, "--kafka", "127.0.0.1:0") as server:
        server.ready()
        assert archive("ls", directory).exit_code == 0
        output = archive("verify", directory)
        assert output.exit_code == 0
        assert "a broker has it open: whether log and archive join was not checked" in output.out


def test_a_copy_of_the_archive_alone_can_be_verified(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "archive", tmp_path / "copy" / "archive")
    assert archive("verify", tmp_path / "copy").exit_code == 0


# --- export ----------------------------------------------------------------------------------


def offsets(target: Path, partition: int = 0) -> list[int]:
    """By a reader that nobody here wrote, from every file below."""
    found: list[int] = []
    for path in sorted((target / str(partition)).glob("*.parquet")):
        found += pq.read_table(path, columns=["offset"]).column("offset").to_pylist()
    return found


def test_export_copies_a_topic_and_lists_it(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "deep" / "export"
    output = archive("export", directory, "ducks", target)
    assert (output.exit_code, output.err) == (0, "")
    size = sum(path.stat().st_size for path in target.rglob("*.parquet"))
    assert output.lines == [f"350 records in 3 files, {size} bytes, exported to {target}"]
    assert offsets(target) == list(range(300))
    assert offsets(target, 1) == list(range(50))
    told = orjson.loads((target / "_manifest.json").read_bytes())
    assert (told["kind"], told["topic"]) == ("quackmq export", "ducks")
    assert [part["partition"] for part in told["partitions"]] == [0, 1]
    assert [file["name"] for file in told["partitions"][0]["files"]] == [
        "0/00000000000000000000-00000001.parquet",
        "0/00000000000000000200-00000002.parquet",
    ]
    whole = target / "0" / "00000000000000000000-00000001.parquet"
    assert whole.read_bytes() == file_of(directory).read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--from", "150"], range(150, 300)),
        (["--before", "150"], range(150)),
        (["--from", "190", "--before", "210"], range(190, 210)),
        (["--from", "200", "--before", "300"], range(200, 300)),
        (["--since", str(NOON_MS + 250_000)], range(250, 300)),
        (["--until", str(NOON_MS + 50_000)], range(50)),
        (["--since", "2023-11-14T22:13:30Z", "--until", "2023-11-14T22:13:40"], range(10, 20)),
        (["--since", "2024-01-01"], range(0)),
        (["--from", "1000"], range(0)),
    ],
)
def test_export_takes_offsets_and_times(
    archive: Command, directory: Path, tmp_path: Path, options: list[str], expected: range
) -> None:
    output = archive("export", directory, "ducks:0", tmp_path / "export", *options)
    assert output.exit_code == 0
    assert offsets(tmp_path / "export") == list(expected)
    assert output.lines[-1].startswith(f"{len(expected)} records in ")


def test_export_copies_files_as_they_are_that_lie_between_its_times(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    times = ["--since", str(NOON_MS), "--until", str(NOON_MS + 250_000)]
    assert archive("export", directory, "ducks:0", target, *times).exit_code == 0
    assert [path.name for path in sorted(target.glob("0/*"))] == [
        "00000000000000000000-00000001.parquet",
        "00000000000000000200.parquet",
    ]
    whole = target / "0" / "00000000000000000000-00000001.parquet"
    assert whole.read_bytes() == file_of(directory).read_bytes()
    assert offsets(target) == list(range(250))


def test_export_begins_behind_what_was_trimmed(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    change(directory, manifests.trim(manifest_of(directory), 30))
    assert archive("export", directory, "ducks:0", tmp_path / "export").exit_code == 0
    assert offsets(tmp_path / "export") == list(range(30, 300))


def test_export_stops_at_damage_and_leaves_nothing(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    flip(file_of(directory, index=1), 40)
    output = archive("export", directory, "ducks", tmp_path / "new" / "export")
    assert output.exit_code == 1
    assert output.lines[0].startswith("damage: archive/ducks/0/") and "200 to 299" in output.out
    assert not (tmp_path / "new").exists()


def test_export_can_leave_out_what_is_damaged(
    archive: Command, directory: Path, tmp_path: Path
) -> None:
    flip(file_of(directory), 40)
    output = archive("export", "--skip-damaged", directory, "ducks", tmp_path / "export")
    assert output.exit_code == 1
    assert output.lines[0].startswith("damage: archive/ducks/0/") and "0 to 199" in output.lines[0]
    assert output.lines[1].startswith("150 records in 2 files, ")
    assert offsets(tmp_path / "export") == list(range(200, 300))
    told = orjson.loads((tmp_path / "export" / "_manifest.json").read_bytes())
    assert "0 to 199" in told["partitions"][0]["damaged"][0]["reason"]


@pytest.mark.parametrize("options", [[], ["--skip-damaged"], ["--from", "250"]])
def test_export_goes_on_by_the_new_manifest_where_a_file_was_merged_meanwhile(
    archive: Command,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    method = "scan" if "--from" in options else "pieces"
    gone = merged_away_within(method, directory, monkeypatch)
    output = archive("export", directory, "ducks:0", tmp_path / "export", *options)
    assert not gone.exists()
    assert (output.exit_code, len(output.lines)) == (0, 1)
    assert offsets(tmp_path / "export") == list(range(250 if "--from" in options else 0, 300))


def test_export_of_what_is_not_archived_yet_says_how_to_archive_it(
    archive: Command, tmp_path: Path
) -> None:
    make_store(tmp_path / "data")
    output = archive("export", tmp_path / "data", "ducks", tmp_path / "export")
    assert output.exit_code == 2
    assert output.err.endswith("POST /v1/topics/ducks/archive/now archives them\n")


def test_export_copies_a_quarantined_batch_as_it_came(archive: Command, tmp_path: Path) -> None:
    topic_id = make_store(tmp_path / "data")
    add(tmp_path / "data", PartitionKey(topic_id, 0), [poison(), numbered(1, 9)])
    output = archive("export", tmp_path / "data", "ducks", tmp_path / "export")
    assert output.exit_code == 0
    assert output.lines[0].startswith("poison: 0/_quarantined-")
    (raw,) = (tmp_path / "export" / "0").glob("*.batch")
    assert raw.read_bytes() == bytes(poison().batch.view)


def test_export_names_a_quarantined_batch_that_retention_deletes_meanwhile(
    archive: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, target = tmp_path / "data", tmp_path / "export"
    add(data, PartitionKey(make_store(data), 0), [poison(), numbered(1, 9)])
    real: Callable[..., Any] = ArchiveReader.pieces

    def trim_first(reader: ArchiveReader, manifest: manifests.Manifest, file: Any) -> Any:
        if file in manifest.quarantined:
            change(data, manifests.trim(manifest, 5))
            (data / "archive" / "ducks" / "0" / file.name).unlink()
        return real(reader, manifest, file)

    monkeypatch.setattr(ArchiveReader, "pieces", trim_first)
    output = archive("export", data, "ducks", target)
    assert output.exit_code == 0
    assert output.lines[0] == "ducks:0: offsets 0 to 0 were deleted meanwhile"
    assert offsets(target) == list(range(1, 10))
    assert not list((target / "0").glob("*.batch"))


def test_export_leaves_out_a_damaged_quarantined_batch_only_if_asked(
    archive: Command, tmp_path: Path
) -> None:
    data, target = tmp_path / "data", tmp_path / "export"
    manifest = add(data, PartitionKey(make_store(data), 0), [poison(), numbered(1, 9)])
    flip(data / "archive" / "ducks" / "0" / manifest.quarantined[0].name, 3)
    output = archive("export", data, "ducks", target)
    assert (output.exit_code, target.exists()) == (1, False)
    output = archive("export", data, "ducks", target, "--skip-damaged")
    assert output.exit_code == 1
    assert output.lines[0].startswith("damage: archive/ducks/0/_quarantined-")
    assert offsets(target) == list(range(1, 10))
    told = orjson.loads((target / "_manifest.json").read_bytes())
    assert len(told["partitions"][0]["damaged"]) == 1


def test_export_leaves_no_part_of_a_file_that_is_deleted_meanwhile(
    archive: Command, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = ArchiveReader.scan
    is_trimmed = False

    def end_early(reader: ArchiveReader, manifest: manifests.Manifest, file: Any) -> Any:
        nonlocal is_trimmed
        yield from real(reader, manifest, file)
        if not is_trimmed:
            is_trimmed = True
            change(directory, manifests.trim(manifest, 200))
            yield DamagedData("the next row group is missing")

    monkeypatch.setattr(ArchiveReader, "scan", end_early)
    target = tmp_path / "export"
    output = archive("export", directory, "ducks:0", target, "--from", "50")
    assert output.exit_code == 0
    assert output.lines[0] == "ducks:0: offsets 50 to 199 were deleted meanwhile"
    assert offsets(target) == list(range(200, 300))


def test_no_look_changes_anything(archive: Command, directory: Path, tmp_path: Path) -> None:
    before = content_of(directory)
    for action in ("ls", "verify"):
        assert archive(action, directory).exit_code == 0
    assert archive("export", directory, "ducks", tmp_path / "export").exit_code == 0
    assert content_of(directory) == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ls", "{}/none"], "none is not a directory"),
        (["verify", "{}"], "contains neither quackmq.json nor archive"),
        (["ls", "{}/data", "geese"], "there is no topic 'geese' in the archive"),
        (
            ["verify", "{}/data", "ducks:2"],
            "the archive of topic ducks has partitions 0, 1, not '2'",
        ),
        (["export", "{}/data", "ducks"], "arguments are required: TARGET"),
        (["export", "{}/data", "ducks", "{}/data"], "data is not an empty directory"),
        (["export", "{}/data", "ducks", "{}/x", "--since", "noon"], "'noon' is not a time"),
        (
            ["export", "{}/data", "ducks", "{}/x", "--from", "-1"],
            "must be a whole number from 0 on, got '-1'",
        ),
        (["export", "{}/data", "ducks", "{}/x", "--from", "3", "--before", "3"], "is not below"),
        (
            ["export", "{}/data", "ducks", "{}/x", "--since=2024-01-01", "--until=2023-01-01"],
            "--since is not earlier",
        ),
        (["import", "{}/none", "ducks"], "none is neither a file nor a directory"),
        (["import", "{}/data", "ducks"], "there is no .parquet file"),
        (["import", "{}/data/archive/ducks", "ducks"], "export it first"),
        ([], "arguments are required: ACTION"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence_with_exit_code_2(
    archive: Command, directory: Path, arguments: list[str], complaint: str
) -> None:
    # What lies in a data directory is no archive of anybody's until it is in `archive`.
    if arguments[:2] == ["import", "{}/data"]:
        shutil.rmtree(directory / "archive")
    output = archive(*(argument.format(directory.parent) for argument in arguments))
    assert (output.exit_code, output.out) == (2, "")
    assert complaint in output.err
    assert output.err.startswith("quackmq") and output.err.count("\n") == 1


def poison() -> CommittedBatch:
    """A batch at offset 0 that nobody can open."""
    return CommittedBatch(undecodable(), NOON_MS)
