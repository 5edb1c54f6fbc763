"""`make dist` notices a built file that has too much or too little in it."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from quackmq import __version__
from tests.dist.package import BadPackage, check, check_changelog, package_files
from tests.kit.readme import ROOT

LICENSE = {"quackmq-0.1.0.dist-info/licenses/LICENSE": b"Apache"}


@pytest.fixture(scope="module")
def packages() -> dict[str, bytes]:
    return {name: (ROOT / name).read_bytes() for name in package_files(ROOT)}


def wheel(directory: Path, content: dict[str, bytes]) -> Path:
    path = directory / "quackmq-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as built:
        for name, data in content.items():
            built.writestr(name, data)
    return path


def sdist(directory: Path, content: dict[str, bytes]) -> Path:
    path = directory / "quackmq-0.1.0.tar.gz"
    with tarfile.open(path, "w") as built:
        for name, data in content.items():
            member = tarfile.TarInfo(f"quackmq-0.1.0/{name}")
            member.size = len(data)
            built.addfile(member, io.BytesIO(data))
    return path


def test_the_packages_and_their_license_are_what_a_wheel_and_an_sdist_have(
    tmp_path: Path, packages: dict[str, bytes]
) -> None:
    assert {"quackmq/py.typed", "quackmq/cli/entry.py"} <= packages.keys()
    check(wheel(tmp_path, packages | LICENSE))
    check(sdist(tmp_path, packages | {"LICENSE": b"Apache", "docs/http.md": b"# HTTP"}))


def test_tests_and_missing_files_are_noticed(tmp_path: Path, packages: dict[str, bytes]) -> None:
    with pytest.raises(BadPackage, match="what nobody needs: tests"):
        check(wheel(tmp_path, packages | LICENSE | {"tests/test_it.py": b""}))
    with pytest.raises(BadPackage, match="what nobody needs: tests"):
        check(sdist(tmp_path, packages | {"LICENSE": b"", "tests/test_it.py": b""}))
    fewer = {name: data for name, data in packages.items() if name != "quackmq/cli/entry.py"}
    with pytest.raises(BadPackage, match=r"lacks quackmq/cli/entry\.py"):
        check(wheel(tmp_path, fewer | LICENSE))
    with pytest.raises(BadPackage, match="no license"):
        check(wheel(tmp_path, packages))


def test_a_path_of_this_machine_is_noticed(tmp_path: Path, packages: dict[str, bytes]) -> None:
    ours = {"quackmq-0.1.0.dist-info/direct_url.json": f"file://{ROOT}/dist".encode()}
    with pytest.raises(BadPackage, match="has a path of this machine"):
        check(wheel(tmp_path, packages | LICENSE | ours))


def test_the_changelog_says_what_is_in_this_version() -> None:
    check_changelog((ROOT / "CHANGELOG.md").read_text(), __version__)


@pytest.mark.parametrize(
    "text",
    [
        "## Unreleased\n- new\n",
        "## 0.1.0\n- new\n",
        "## 0.1.0 – 2026-11-18\n\n## 0.0.9 – 2026-01-01\n- old\n",
    ],
)
def test_a_version_without_a_dated_section_in_the_changelog_is_noticed(text: str) -> None:
    with pytest.raises(BadPackage, match=r"says nothing about version 0\.1\.0"):
        check_changelog(text, "0.1.0")
