"""docs/http.md: every curl line about /v1 is run, and answered as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quackmq.protocols.http import v1
from tests.protocols.http.v1.document import alike, answers, part
from tests.protocols.http.v1.serving import serving


@pytest.mark.needs("curl")
def test_every_curl_line_is_answered_as_printed(tmp_path: Path) -> None:
    run = 0
    with serving(directory=tmp_path) as served:
        for command, printed, got in answers(served):
            assert alike(got) == alike(printed), command
            run += 1
    assert run > 20


def test_paths_that_are_spoken_of_are_there() -> None:
    patterns = [re.sub(r"{\w+}", r"[^/]+", route.pattern) for route in v1.ROUTES]
    spoken_of = set(re.findall(r"/v1/[\w{}/.-]*[\w}]", part()))
    for path in spoken_of:
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path
