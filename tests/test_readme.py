"""What the README's five-minute tour tells its readers to type works as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.readme import INDENTED, ROOT, Block, Tour, Wrong, blocks, commands, section, typed

TITLE = "Five minutes"


@pytest.mark.needs("kcat", "curl", "socat")
def test_the_five_minute_tour_works_line_by_line(tmp_path: Path) -> None:
    tour = blocks(section((ROOT / "README.md").read_text(), TITLE))
    assert any("quackmq serve" in block.text for block in tour)
    with Tour(tmp_path) as running:
        for block in tour:
            running.run(block)
        # Whoever types it all once more, against the same broker, has twice as much there.
        for kind, text in tour:
            if "quackmq serve" not in text:
                running.run(Block(kind, text.replace("4 records in 1 file", "8 records in …")))


# --- whoever runs it notices --------------------------------------------------------------------


def test_a_section_ends_where_the_next_one_begins() -> None:
    readme = "# A\n\n## One\n\nfirst\n\n### more\n\nsecond\n\n## Two\n\nthird\n"
    assert "second" in section(readme, "One")
    assert "third" not in section(readme, "One")
    with pytest.raises(Wrong, match="no section"):
        section(readme, "Three")


def test_every_block_has_to_say_what_it_is() -> None:
    assert blocks("```sh\nls\n```\n\n```text\na\n```\n") == [
        Block("sh", "ls\n"),
        Block("text", "a\n"),
    ]
    with pytest.raises(Wrong, match="how to run"):
        blocks("```\nls\n```\n")
    assert blocks("Type\n\n    make a\n    make b\n\nnow\n") == [
        Block(INDENTED, "make a\nmake b\n")
    ]


def test_in_a_session_what_is_typed_stands_behind_a_dollar() -> None:
    assert list(typed("$ echo a \\\n  b\na b\n$ true\n")) == [("echo a b", "a b\n"), ("true", "")]


def test_a_line_may_go_on_in_the_next() -> None:
    assert list(commands("# say\necho a \\\n    b\n\necho c  # d\n")) == ["echo a b", "echo c  # d"]


@pytest.mark.processes
def test_a_broker_runs_beside_what_is_typed_and_programs_find_it(tmp_path: Path) -> None:
    with Tour(tmp_path) as tour:
        tour.run(Block("sh", "pip install nothing\nquackmq serve --data ./data  # runs on\n"))
        tour.run(Block("text", "http listening on 127.0.0.1:8002\nready\n"))
        program = (
            "import http.client\n"
            "connection = http.client.HTTPConnection('127.0.0.1:8002')\n"
            "connection.request('GET', '/topics')\n"
            "print(connection.getresponse().read().decode())\n"
        )
        tour.run(Block("python", program))
        tour.run(Block("text", '{"status":"success",…}\n'))
        assert (tmp_path / "data").is_dir()
        with pytest.raises(Wrong, match="was to be printed"):
            tour.run(Block("text", "something else\n"))


@pytest.mark.processes
def test_a_line_that_fails_is_named(tmp_path: Path) -> None:
    with Tour(tmp_path) as tour:
        tour.run(Block("sh", "make test\ntrue | cat\n"))
        with pytest.raises(Wrong, match="false"):
            tour.run(Block("sh", "true\nfalse | cat\n"))
        with pytest.raises(Wrong, match="no-such-target"):
            tour.run(Block("sh", "make no-such-target\n"))
        tour.run(Block(INDENTED, "make test   # everything\nall is well\n"))
        with pytest.raises(Wrong, match="no-such-target"):
            tour.run(Block(INDENTED, "make no-such-target\n"))
        tour.run(Block("console", "$ echo quack\nquack\n"))
        with pytest.raises(Wrong, match="was to be printed"):
            tour.run(Block("console", "$ echo quack\nmoo\n"))
        with pytest.raises(Wrong, match="NameError"):
            tour.run(Block("python", "quack\n"))
